"""What a mask that follows no rule lets queries read, found out by looking at all of it, tile by
tile.

[Note: chunk ends] A chunk may end before position c if no query before c reads a key from c on. A
causal mask allows every end. Where queries read ahead (image tokens their whole image, a prefix all
of itself) the ends between are left out (`chunks.Barrier`), and chunks get other lengths. A mask
without any end left is not causal in any sense and is refused.

[Note: empty queries] A query that may read nothing (padding on the left) gives 0, as in torch's
sdpa and in FlashAttention. Added masks in eager attention give it the mean over all keys instead,
those of later chunks too, which nothing causal can compute. Nobody reads what such a query gives,
because nobody reads its key; its own label is all that differs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from streambp.chunks import Barrier, ChunkPlan
from streambp.errors import UnsupportedMaskError

SCAN = 1024

# q0, q1, k0, k1 -> [B or 1, H or 1, q, k], True where it is read
ReadTile = Callable[[int, int, int, int], Tensor]


def reads(tile: Tensor) -> Tensor:
    """Which pairs of a mask tile [B or 1, H or 1, q, k] count, in bool.

    A bool tile says it itself; an added one leaves a pair out with the lowest number of its dtype,
    or -inf.

    Raises:
        UnsupportedMaskError: the tile has another dtype.
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
    """Where no chunk may end, in any row or head; () for a causal mask. [Note: chunk ends]

    Costs T^2 / 2 mask elements, SCAN^2 at a time, and one wait for the device.
    """
    position = torch.arange(length, device=device)
    furthest = position.clone()  # [T] the last key that any row and head reads from a query
    for q0 in range(0, length, SCAN):
        q1 = min(q0 + SCAN, length)
        for k0 in range(q0, length, SCAN):
            k1 = min(k0 + SCAN, length)
            read = tile(q0, q1, k0, k1).flatten(0, -3).any(0)  # [q, k]
            last = torch.where(read, position[k0:k1], 0).amax(1)
            furthest[q0:q1] = torch.maximum(furthest[q0:q1], last)
    # [T - 1]: a chunk cannot end at 1, 2, ..., T - 1
    blocked = furthest.cummax(0).values[:-1] >= position[1:]
    edges = torch.diff(torch.nn.functional.pad(blocked.to(torch.int8), (1, 1))).cpu()
    first, behind = ((edges == sign).nonzero().flatten() + 1 for sign in (1, -1))
    return tuple(Barrier(a, b - 1) for a, b in zip(first.tolist(), behind.tolist(), strict=True))


def move_ends(plan: ChunkPlan, barriers: tuple[Barrier, ...]) -> ChunkPlan:
    """The plan with its chunk ends outside of the barriers. A single chunk has no end to move.

    Raises:
        UnsupportedMaskError: no end is left for several chunks.
    """
    if not barriers or len(plan) == 1:
        return plan
    moved = plan.avoiding(barriers)
    if len(moved) == 1:
        raise UnsupportedMaskError(
            f"The attention mask is not causal: wherever the {plan.length} tokens are cut, a query "
            "reads a key that comes after the cut. streambp needs a mask that allows an end of a "
            "chunk somewhere: between images, after a prefix. Pass a chunk_size of at least "
            f"{plan.length}, or run this batch unpatched (streambp.unpatch(model))."
        )
    return moved


def find_empty(tile: ReadTile, length: int, device: torch.device) -> tuple[Tensor | None, bool]:
    """Queries that read nothing [B or 1, T], None if there are none; and whether what they give
    matters to nobody else: all heads agree on them, and no query reads their keys. [Note: empty
    queries]

    Costs T^2 mask elements and one wait for the device, two if there are any.
    """
    reading: list[Tensor] = []
    read: list[Tensor | None] = [None] * -(-length // SCAN)
    for q0 in range(0, length, SCAN):
        anything: Tensor | None = None
        for index, k0 in enumerate(range(0, length, SCAN)):
            part = tile(q0, min(q0 + SCAN, length), k0, min(k0 + SCAN, length))
            queries, keys = part.any(-1), part.any(-2)
            anything = queries if anything is None else anything | queries
            before = read[index]
            read[index] = keys if before is None else before | keys
        assert anything is not None
        reading.append(anything)
    empty = ~torch.cat(reading, -1)  # [B or 1, H or 1, T]
    if not bool(empty.any()):
        return None, True
    keys = torch.cat([part for part in read if part is not None], -1)  # [B or 1, H or 1, T]
    alone = (empty.all(1) == empty.any(1)) & ~(empty & keys.any(1, keepdim=True)).any(1)
    return empty.all(1), bool(alone.all())
