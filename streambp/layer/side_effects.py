"""What a layer's forward does besides giving an output for its input.

[Note: side effects] Chunks give the layer's output and what `outputs.py` names, and nothing else. Unpatched, a gradient
also goes through whatever the forward leaves behind with its graph: an auxiliary loss in an attribute, an activation that a
hook has put into a list. A layer that does so runs whole, under a checkpoint, which keeps that graph. So does a layer that
writes to its buffers (power iterations, running statistics, counters of tokens): it would write once for each chunk, in
the probe and in recomputations, partly of products that were left out.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streambp.errors import BackwardError

KEEPS = (
    "its forward, or a hook inside it, leaves tensors behind with their graph (for an auxiliary loss?), through "
    "which chunks would give no gradient"
)
Buffers = dict[tuple[nn.Module, str], Tensor]


class Origin:
    """Where the graph of a run on trial starts.

    Whoever keeps a part of that graph keeps this object; a gradient that comes here from elsewhere than the trial raises.
    """

    def __init__(self) -> None:
        self.trying = True

    def of(self, x: Tensor) -> Tensor:
        """A copy of x [..., B, C, h] with the graph's start behind it."""
        started: Tensor = _Started.apply(x, self, True)
        return started

    def behind(self, x: Tensor) -> Tensor:
        """The same without a copy of x [..., B, C, h], which must not be written to."""
        started: Tensor = _Started.apply(x, self, False)
        return started


class _Started(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, origin: Origin, may_be_written: bool) -> Tensor:
        ctx.origin = origin
        return x.clone() if may_be_written else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.origin.trying:
            raise BackwardError(
                "This loss uses a tensor that a hook inside a streamed layer kept when streambp tried the layer on random "
                "tokens, at its first call. Empty what your hooks collect after a first forward, or keep the last entry "
                "alone: from now on the layer runs whole, and its hooks see the sequence once."
            )
        return grad, None, None


def is_kept(origin: weakref.ref[Origin]) -> bool:
    """Whether somebody still holds a graph that starts there, when those who tried have let go of it."""
    if origin() is not None:
        gc.collect()  # of graphs in cycles
    return origin() is not None


def buffers_of(layer: nn.Module) -> Buffers:
    """The buffers inside a layer by their module and name; none on meta, none of a tensor subclass."""
    return {
        (module, name): buffer
        for module in layer.modules()
        for name, buffer in module._buffers.items()
        if type(buffer) is Tensor and buffer.device.type != "meta"
    }


def copies(buffers: Buffers) -> Buffers:
    """Copies of these buffers, without a graph."""
    return {slot: buffer.detach().clone() for slot, buffer in buffers.items()}


@contextlib.contextmanager
def in_place_of_buffers(stand_ins: Buffers) -> Iterator[None]:
    """Within, modules have these buffers. Their own are put back, never written to: graphs may have saved them."""
    own = {(module, name): module._buffers[name] for module, name in stand_ins}
    try:
        for (module, name), buffer in stand_ins.items():
            module._buffers[name] = buffer
        yield
    finally:
        for (module, name), mine in own.items():
            module._buffers[name] = mine


def written_since(before: Buffers) -> Buffers:
    """Those of these earlier values that modules' buffers do not have any more."""
    return {(module, name): old for (module, name), old in before.items() if not _same(module._buffers[name], old)}


def _same(buffer: Tensor | None, old: Tensor) -> bool:
    if buffer is None or buffer.shape != old.shape or buffer.dtype != old.dtype:
        return False
    return torch.equal(_bytes(buffer), _bytes(old))  # where they are NaN as well


def _bytes(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).view(torch.uint8)
