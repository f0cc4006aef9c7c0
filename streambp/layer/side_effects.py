"""What a layer's forward does besides giving an output for its input.

[Note: side effects] Chunks give the layer's output and what `outputs.py` names, and nothing else. Unpatched, a gradient
also goes through whatever the forward leaves behind with its graph: an auxiliary loss in an attribute, an activation that a
hook has put into a list. A layer that does so runs whole, under a checkpoint, which keeps that graph. So does a layer that
writes to its buffers (power iterations, running statistics, counters of tokens): it would write once for each chunk, in
the probe and in recomputations, partly of products that were left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

KEEPS = (
    "its forward, or a hook inside it, leaves tensors behind with their graph (for an auxiliary loss?), through "
    "which chunks would give no gradient"
)
Buffers = dict[tuple[nn.Module, str], Tensor]


def buffers_of(layer: nn.Module) -> Buffers:
    """The buffers inside a layer by their module and name; none on meta, none of a tensor subclass."""
    return {
        (module, name): buffer
        for module in layer.modules()
        for name, buffer in module._buffers.items()
        if type(buffer) is Tensor and buffer.device.type != "meta"
    }


@contextlib.contextmanager
def in_place_of_buffers(buffers: Buffers) -> Iterator[None]:
    """Within, modules have copies of these buffers, without a graph. Their own are put back, never written to: graphs may
    have saved them."""
    own = {(module, name): module._buffers[name] for module, name in buffers}
    try:
        for (module, name), buffer in buffers.items():
            module._buffers[name] = buffer.detach().clone()
        yield
    finally:
        for (module, name), mine in own.items():
            module._buffers[name] = mine


def written_since(before: Buffers) -> Buffers:
    """Those of these earlier values that modules' buffers do not have any more."""
    written: Buffers = {}
    for (module, name), old in before.items():
        now = module._buffers[name]
        same = now is not None and now.shape == old.shape and now.dtype == old.dtype
        if same:
            one, other = (x.detach().reshape(-1).view(torch.uint8) for x in (now, old))  # type: ignore[union-attr]
            same = torch.equal(one, other)  # where they are NaN as well
        if not same:
            written[module, name] = old
    return written
