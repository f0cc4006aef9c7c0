"""Find the keys that a bidirectional layer's queries read, on batches without data.

A real step evaluates a mask on the device to find the keys that its queries read. Tensors without
data have no answer. But masks of windows, of prefixes and of whole rows depend on positions alone.
Such a mask is evaluated here on the CPU for a few queries and all keys.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from streambp.attention import masks
from streambp.attention.mask_scan import SCAN_TILE_SIZE
from streambp.attention.masks import DenseMask, LazyMask
from streambp.attention.spans import Spans
from streambp.chunks import Barrier
from streambp.tensors import replace_attribute

rectangles = masks.rectangular_spans


def masks_from_positions() -> contextlib.AbstractContextManager[None]:
    """Return a context manager for a step on tensors without data (on meta, or fake), whose memory
    and FLOPs are counted. Inside, the mask function of a bidirectional layer is called with real
    positions of queries and keys. Only the keys that the function lets a query read are then
    counted.

    All keys count as read if the mask depends on the values of tensors, which do not exist. Nothing
    changes for batches with a padding mask.
    """
    return replace_attribute([masks], "rectangular_spans", [_position_rectangles])


def _position_rectangles(
    mask: LazyMask, batch_size: int, length: int, device: torch.device
) -> Spans | DenseMask:
    """Return the keys that each query reads in bidirectional attention, for a batch whose tensors
    (on meta, or fake) have no values. Replaces `masks.rectangular_spans` while a step is run on
    such tensors to count its memory and FLOPs.

    The result is a `DenseMask` if the mask can be computed from positions alone, and some query
    does not read all keys. Otherwise the result is that of `masks.rectangular_spans`.

    Args:
        mask: arguments of transformers' mask function, from which the mask can be computed.
        batch_size: rows of the batch.
        length: T, tokens of a row.
        device: device of the batch.
    """
    if mask.is_bidirectional or mask.description.get("attention_mask") is not None:
        return rectangles(mask, batch_size, length, device)
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            reach_and_barriers = _reach_and_barriers(mask.description["mask_function"], length)
    except (NotImplementedError, RuntimeError):  # the mask reads tensors without data
        reach_and_barriers = None
    if reach_and_barriers is None:
        return rectangles(mask, batch_size, length, device)
    reach, barriers = reach_and_barriers
    dense = DenseMask(batch_size, length, mask, barriers)
    dense.caches[DenseMask] = DenseMask(batch_size, length, mask, (), reach)
    return dense


def _reach_and_barriers(
    function: Any, length: int
) -> tuple[tuple[tuple[int, int], ...], tuple[Barrier, ...]] | None:
    """Compute two tuples from a mask function: intervals of keys that blocks of queries read, and
    ranges of positions at which a sequence cannot be cut into chunks. Return None if every query
    reads all keys.

    A block is SCAN_TILE_SIZE (a constant) consecutive queries; its interval is (first, end) with
    `end` exclusive. No chunk may end between two neighbours of which the first reads the second.
    Only the first and the last query of a block are evaluated. This assumes that each query reads
    an interval of keys around itself, whose ends never fall from one query to the next.

    Args:
        function: transformers' mask function, called with indices of row, head, query and key.
        length: T, tokens of a row.
    """
    firsts = range(0, length, SCAN_TILE_SIZE)
    pairs = []
    for q0 in firsts:
        pairs += [q0, min(q0 + SCAN_TILE_SIZE, length) - 1]
    keys = torch.arange(length, device="cpu")
    read = _evaluate(function, torch.tensor(pairs, device="cpu")[:, None], keys[None])  # [n, T]
    if bool(read.all()):
        return None
    first_keys = torch.where(read, keys, length).amin(1).tolist()
    last_keys = torch.where(read, keys, -1).amax(1).tolist()
    reach = []
    for first, end in zip(first_keys[::2], last_keys[1::2], strict=True):
        reach.append((min(first, end + 1), end + 1))
    # A chunk cannot end between a query and its next key, if the query reads that key.
    blocked = _evaluate(function, keys[:-1], keys[1:])  # [T - 1]
    edges = torch.diff(torch.nn.functional.pad(blocked.to(torch.int8), (1, 1)))
    starts = ((edges == 1).nonzero().flatten() + 1).tolist()
    ends = (edges == -1).nonzero().flatten().tolist()
    barriers = []
    for start, end in zip(starts, ends, strict=True):
        barriers.append(Barrier(start, end))
    return tuple(reach), tuple(barriers)


def _evaluate(function: Any, query: Tensor, key: Tensor) -> Tensor:
    """Return a bool tensor: True where the mask function lets a query read a key, in row 0 and head
    0. The result's shape is that of `query` [n] or [n, 1] broadcast with `key` [n] or [1, T].

    Args:
        function: transformers' mask function, called with indices of row, head, query and key.
        query: positions of queries, on the CPU.
        key: positions of keys, on the CPU.

    Raises:
        NotImplementedError: the function's result has no values (it is on meta).
    """
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    result: Any = function(zero, zero, query, key)
    shape = torch.broadcast_shapes(query.shape, key.shape)
    if not isinstance(result, Tensor):
        result = torch.tensor(bool(result), device="cpu")
    if result.is_meta:
        raise NotImplementedError("the mask function gave a tensor without data")
    return result.expand(shape)
