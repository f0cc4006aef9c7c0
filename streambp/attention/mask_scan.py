"""Scan a mask that follows no rule, tile by tile, to find out which keys its queries read.

[Note: chunk ends] A chunk may end before position c if no query before c reads a key from c on. A
causal mask allows every end. Where queries read ahead (image tokens their whole image, a prefix all
of itself), the ends between are left out (`chunks.Barrier`), and chunks get other lengths. A mask
that leaves no end is not causal in any sense and is refused.

A query that may read nothing (padding on the left) gives 0, as in torch's sdpa and in
FlashAttention. Eager attention with an additive mask gives the mean of the values of all keys
instead. The mean includes the keys of later chunks, so chunks cannot compute this mean. No query
reads the key of such a query, so nothing reads the query's output. Only its own label makes a
difference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from streambp.chunks import Barrier, ChunkPlan
from streambp.errors import UnsupportedMaskError

SCAN_TILE_SIZE = 1024

# (q0, q1, k0, k1) -> [B or 1, H or 1, q, k], True where a query reads a key
ReadTile = Callable[[int, int, int, int], Tensor]


def reads(tile: Tensor) -> Tensor:
    """Return a bool tensor for a part of an attention mask, bool or additive: True where a query
    may read a key.

    A bool mask is returned unchanged. An additive mask excludes a key by the lowest number of its
    dtype, or by -inf.

    Args:
        tile: [B or 1, H or 1, q, k], a part of a 4-D attention mask.

    Raises:
        UnsupportedMaskError: the mask has another dtype.
    """
    if tile.dtype == torch.bool:
        return tile
    if not tile.dtype.is_floating_point:
        raise UnsupportedMaskError(
            f"The 4-D attention mask is of {tile.dtype}. sdpa refuses it, and eager attention adds "
            "it to the scores, where 0 and 1 leave no key out. Pass mask.bool() (True is read) "
            "with sdpa, or a floating mask, which is added: 0 where a key is read, -inf elsewhere."
        )
    return tile > torch.finfo(tile.dtype).min / 2


def find_barriers(tile: ReadTile, length: int, device: torch.device) -> tuple[Barrier, ...]:
    """Find the positions where no chunk may end, because in some row or head an earlier query reads
    a later key; () for a causal mask. [Note: chunk ends]

    The scan costs T^2 / 2 mask elements, a tile of SCAN_TILE_SIZE^2 (a constant) at a time, and one
    synchronization with the device.

    Args:
        tile: function (q0, q1, k0, k1) -> [B or 1, H or 1, q, k] in bool, True where a query reads
            a key.
        length: T.
        device: the device on which to scan.
    """
    position = torch.arange(length, device=device)
    furthest = position.clone()  # [T], last key that a query reads in any row and head
    for q0 in range(0, length, SCAN_TILE_SIZE):
        q1 = min(q0 + SCAN_TILE_SIZE, length)
        for k0 in range(q0, length, SCAN_TILE_SIZE):
            k1 = min(k0 + SCAN_TILE_SIZE, length)
            read = tile(q0, q1, k0, k1).flatten(0, -3).any(0)  # [q, k]
            last = torch.where(read, position[k0:k1], 0).amax(1)
            furthest[q0:q1] = torch.maximum(furthest[q0:q1], last)
    # [T - 1]: a chunk cannot end at 1, 2, ..., T - 1
    blocked = furthest.cummax(0).values[:-1] >= position[1:]
    edges = torch.diff(torch.nn.functional.pad(blocked.to(torch.int8), (1, 1))).cpu()
    first, behind = ((edges == sign).nonzero().flatten() + 1 for sign in (1, -1))
    return tuple(Barrier(a, b - 1) for a, b in zip(first.tolist(), behind.tolist(), strict=True))


def find_reach(tile: ReadTile, length: int, device: torch.device) -> tuple[tuple[int, int], ...]:
    """Find the keys that each SCAN_TILE_SIZE (a constant) consecutive queries of a mask read, in
    any row and head, so that attention can leave out all other keys. The keys are an interval
    (first key, last key + 1), or (0, 0) if the queries read no key.

    The scan costs T^2 mask elements, SCAN_TILE_SIZE^2 at a time, and one synchronization with the
    device.

    Args:
        tile: function (q0, q1, k0, k1) -> [B or 1, H or 1, q, k] in bool, True where a query reads
            a key.
        length: T.
        device: the device on which to scan.
    """
    position = torch.arange(length, device=device)
    reaches: list[Tensor] = []
    for q0 in range(0, length, SCAN_TILE_SIZE):
        read = []
        for k0 in range(0, length, SCAN_TILE_SIZE):
            part = tile(q0, min(q0 + SCAN_TILE_SIZE, length), k0, min(k0 + SCAN_TILE_SIZE, length))
            read.append(part.flatten(0, -2).any(0))
        keys = torch.cat(read)  # [T]
        first = torch.where(keys, position, length).amin()
        last = torch.where(keys, position, -1).amax()
        reaches.append(torch.stack((first, last + 1)))
    reach: list[tuple[int, int]] = []
    for start, end in torch.stack(reaches).tolist():
        reach.append((min(start, end), end))
    return tuple(reach)


def move_ends(plan: ChunkPlan, barriers: tuple[Barrier, ...]) -> ChunkPlan:
    """Return the plan of a sequence's chunks with chunk ends moved away from the positions that
    `barriers` forbid. A plan of a single chunk is returned unchanged.

    Raises:
        UnsupportedMaskError: only a single chunk would remain.
    """
    if not barriers or len(plan) == 1:
        return plan
    allowed = plan.avoid_barriers(barriers)
    if len(allowed) == 1:
        raise UnsupportedMaskError(
            f"The attention mask is not causal: wherever the {plan.length} tokens are cut, a query "
            "reads a key that comes after the cut. streambp needs at least one position without "
            "such a query, between images or after a prefix. Pass a chunk_size of at least "
            f"{plan.length}, or run this batch unpatched (streambp.unpatch(model))."
        )
    return allowed


def find_empty(tile: ReadTile, length: int, device: torch.device) -> tuple[Tensor | None, bool]:
    """Find the queries that may read no key, [B or 1, T] in bool; None if every query reads a key.
    Implementations of attention differ in the output of such queries.

    The second result is True if tokens with such a query have no effect on other tokens: all heads
    agree on these queries, and no other query reads the keys of these tokens. The scan costs T^2
    mask elements and one synchronization with the device, or two if a query reads no key.

    Args:
        tile: function (q0, q1, k0, k1) -> [B or 1, H or 1, q, k] in bool, True where a query reads
            a key.
        length: T.
        device: the device on which to scan.
    """
    reading: list[Tensor] = []
    read: list[Tensor | None] = [None] * -(-length // SCAN_TILE_SIZE)
    for q0 in range(0, length, SCAN_TILE_SIZE):
        has_key: Tensor | None = None
        for index, k0 in enumerate(range(0, length, SCAN_TILE_SIZE)):
            part = tile(q0, min(q0 + SCAN_TILE_SIZE, length), k0, min(k0 + SCAN_TILE_SIZE, length))
            queries = part.any(-1)
            keys = part.any(-2)
            has_key = queries if has_key is None else has_key | queries
            previous = read[index]
            read[index] = keys if previous is None else previous | keys
        assert has_key is not None
        reading.append(has_key)
    empty = ~torch.cat(reading, -1)  # [B or 1, H or 1, T]
    if not bool(empty.any()):
        return None, True
    keys = torch.cat([part for part in read if part is not None], -1)  # [B or 1, H or 1, T]
    is_isolated = (empty.all(1) == empty.any(1)) & ~(empty & keys.any(1, keepdim=True)).any(1)
    return empty.all(1), bool(is_isolated.all())
