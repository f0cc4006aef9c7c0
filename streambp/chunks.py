"""How a sequence is cut into chunks. Integers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

AUTO_CHUNKS = 8
AUTO_MIN_TOKENS = 2048
AUTO_MAX_TOKENS = 8192
AUTO_RULE = (
    f"auto: an {AUTO_CHUNKS}th of the sequence, "
    f"at least {AUTO_MIN_TOKENS} and at most {AUTO_MAX_TOKENS} tokens over all rows of the batch"
)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Positions `[start, stop)` of every row; `index` counts from the front of the sequence."""

    index: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """`length` positions in chunks of `size`; the last chunk takes what is left."""

    length: int
    size: int

    def __len__(self) -> int:
        return -(-self.length // self.size)

    def __getitem__(self, index: int) -> Chunk:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.size
        return Chunk(index, start, min(start + self.size, self.length))

    def __iter__(self) -> Iterator[Chunk]:
        return (self[index] for index in range(len(self)))

    def backward(self) -> Iterator[Chunk]:
        """Last to first: the only order in which a chunk's dK and dV are complete. [Note: prefix accumulation order]"""
        return (self[index] for index in reversed(range(len(self))))


def plan_chunks(length: int, batch_size: int, chunk_size: int | Literal["auto"]) -> ChunkPlan:
    """Cut `length` positions of `batch_size` rows. The rule behind "auto" is `AUTO_RULE`."""
    if chunk_size == "auto":
        tokens = min(max(-(-length * batch_size // AUTO_CHUNKS), AUTO_MIN_TOKENS), AUTO_MAX_TOKENS)
        size = tokens // max(1, batch_size)
    else:
        size = chunk_size
    return ChunkPlan(length, max(1, min(size, length)))
