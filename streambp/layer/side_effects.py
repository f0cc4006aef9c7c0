"""Side effects of a layer's forward.

Chunks compute the layer's output and the other outputs that `LayerCall` returns. The unpatched
model also has gradients of tensors that the forward stores with their graph. Examples are an
auxiliary loss in an attribute, and an activation that a hook appends to a list. A layer with such
side effects runs unchunked under a checkpoint, and so keeps the graph. A layer that writes to its
buffers (power iterations, running statistics, token counters) runs unchunked too. A layer in chunks
would write once for each chunk, in tests and in recomputations, partly from skipped products.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from streambp.tensors import restoring_iterator

REASON_KEPT_GRAPH = (
    "its forward, or a hook inside it, leaves tensors behind with their graph (for an auxiliary "
    "loss?), through which chunks would give no gradient"
)
Buffers = dict[tuple[nn.Module, str], Tensor]


def buffers_of(layer: nn.Module) -> Buffers:
    """Return the buffers [...] inside a layer by (module, buffer name), without meta tensors and
    tensor subclasses. `replace_buffers` protects these buffers from writes in a test run."""
    return {
        (module, name): buffer
        for module in layer.modules()
        for name, buffer in module._buffers.items()
        if type(buffer) is Tensor and buffer.device.type != "meta"
    }


@contextlib.contextmanager
def use_buffers(buffers: Buffers) -> Iterator[None]:
    """Context manager that puts these tensors [...] in place of the modules' buffers, and puts the
    earlier tensors back at the end.

    Args:
        buffers: the tensors by (module, buffer name).
    """
    # a forward that deletes a buffer has left none, where it is computed again
    restore = restoring_iterator([(module._buffers, name) for module, name in buffers])
    try:
        for (module, name), buffer in buffers.items():
            module._buffers[name] = buffer
        yield
    finally:
        collections.deque(restore, maxlen=0)  # one call in C, which Ctrl-C cannot end half-way


def replace_buffers(buffers: Buffers) -> contextlib.AbstractContextManager[None]:
    """Context manager for a test run or a recomputation of a layer: replaces buffers in their
    modules by detached copies, and puts the original tensors back at the end. The layer thus never
    writes to the originals, which autograd graphs may have saved.

    Args:
        buffers: the original buffers, from `buffers_of`.
    """
    copies: Buffers = {}
    for key, buffer in buffers.items():
        copies[key] = buffer.detach().clone()
    return use_buffers(copies)


def find_written_buffers(copies: Buffers) -> Buffers:
    """Compare buffers with earlier copies, and return the old values [...] of the buffers that have
    changed or were deleted, by (module, buffer name). A layer that writes to its buffers runs
    unchunked.

    Args:
        copies: copies of the buffers' values before the layer ran, by (module, buffer name).
    """
    changed_buffers: Buffers = {}
    for (module, name), old in copies.items():
        current = module._buffers.get(name)  # None: a forward may delete it
        is_unchanged = (
            current is not None and current.shape == old.shape and current.dtype == old.dtype
        )
        if is_unchanged:
            current_bytes, old_bytes = (
                x.detach().reshape(-1).view(torch.uint8)  # type: ignore[union-attr]
                for x in (current, old)
            )
            is_unchanged = torch.equal(current_bytes, old_bytes)  # bits are equal for NaN as well
        if not is_unchanged:
            changed_buffers[module, name] = old
    return changed_buffers
