"""How a sequence is cut into chunks. Integers only, but for a chunk's part of a tensor."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from streambp.errors import ConfigError

if TYPE_CHECKING:  # the command line reads settings without torch
    from torch import Tensor

MIN_CHUNKS, NEAR = 4, 64  # of a verified step; how far from the ideal size another one is looked for
AUTO_CHUNKS = 8
AUTO_MIN_TOKENS = 2048
AUTO_MAX_TOKENS = 8192
AUTO_RULE = (
    f"auto: an {AUTO_CHUNKS}th of the sequence, "
    f"at least {AUTO_MIN_TOKENS:,} and at most {AUTO_MAX_TOKENS:,} tokens over all rows of the batch, rounded down to a "
    "power of two in each row"
)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Positions `[start, stop)` of every row; `index` counts from the front of the sequence."""

    index: int
    start: int
    stop: int

    def part(self, x: Tensor, dim: int) -> Tensor:
        """These positions of x [..., T, ...], T at `dim`: a view, or x itself where they are all."""
        count = self.stop - self.start
        return x if x.shape[dim] == count else x.narrow(dim, self.start, count)


Forks = tuple[tuple[int, int], ...]  # (start, origin), as of `ChunkPlan`


@dataclasses.dataclass(frozen=True)
class Barrier:
    """No chunk may end at `first`, `last` or between: a position before the end would read one at or behind it."""

    first: int
    last: int


def merged(barriers: Iterable[Barrier]) -> tuple[Barrier, ...]:
    """The same ends forbidden by barriers that rise, are disjoint and apart from one another."""
    found: list[Barrier] = []
    for barrier in sorted(barriers, key=lambda barrier: barrier.first):
        if found and barrier.first <= found[-1].last + 1:
            barrier = Barrier(found[-1].first, max(found.pop().last, barrier.last))
        found.append(barrier)
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """`length` positions in chunks of `size`, or in those that stop at `ends`.

    Args:
        size: what was asked for; the last chunk takes what is left. Where `ends` are given, chunks may be longer.
        ends: rising, the last is `length`; () for every `size` positions.
        forks: where a chunk starts at `start`, it goes on from the one that ends at `origin`, or from none if that is 0.
            All others go on from the one before them.
    """

    length: int
    size: int
    ends: tuple[int, ...] = ()
    forks: Forks = ()

    def __post_init__(self) -> None:
        if not self.ends:
            object.__setattr__(self, "ends", (*range(self.size, self.length, self.size), self.length))

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """First to last."""
        return tuple(Chunk(index, *ends) for index, ends in enumerate(itertools.pairwise((0, *self.ends))))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Chunk:
        if index < 0:
            raise IndexError(index)
        return self.chunks[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.chunks)

    @functools.cached_property
    def backward(self) -> tuple[Chunk, ...]:
        """Last to first: the only order in which a chunk's dK and dV are complete. [Note: prefix accumulation order]"""
        return self.chunks[::-1]

    @functools.cached_property
    def before(self) -> tuple[int | None, ...]:
        """For each chunk the index of the one that it goes on from; None: it starts anew."""
        ending, origins = {end: index for index, end in enumerate(self.ends)}, dict(self.forks)
        return tuple(ending.get(origins.get(chunk.start, chunk.start)) for chunk in self)

    @functools.cached_property
    def behind(self) -> dict[int, tuple[int, int]]:
        """The first and the last of the chunks that go on from a chunk, by its index."""
        found: dict[int, tuple[int, int]] = {}
        for index, before in enumerate(self.before):
            if before is not None:
                found[before] = (found.get(before, (index,))[0], index)
        return found

    def holding(self, position: int) -> int:
        """The index of the chunk that a position is in."""
        return bisect.bisect_right(self.ends, position)

    @functools.cached_property
    def longest(self) -> int:
        """Positions of the longest chunk."""
        return max(b - a for a, b in itertools.pairwise((0, *self.ends)))

    def avoiding(self, barriers: Sequence[Barrier]) -> ChunkPlan:
        """The plan whose chunks end outside of `barriers`: each end moves to the nearest one before it, so that no chunk is
        longer than `size`; where there is none, to the nearest behind.

        Args:
            barriers: rising, disjoint and apart from one another.
        """
        starts = [barrier.first for barrier in barriers]
        ends: list[int] = []
        start = 0
        while start < self.length:
            end = min(start + self.size, self.length)
            at = bisect.bisect_right(starts, end) - 1
            if at >= 0 and end <= barriers[at].last:
                before, behind = barriers[at].first - 1, barriers[at].last + 1
                end = before if before > start else behind
            ends.append(end)
            start = end
        return ChunkPlan(self.length, self.size, tuple(ends))

    def forked(self, forks: Forks, least: int) -> ChunkPlan:
        """The plan with these forks, which are at least `least` positions apart: chunks end at each of them, and between
        them after every `size` positions, where that leaves at least `least`."""
        size, ends = max(self.size, least), list[int]()
        for start, stop in itertools.pairwise(sorted({0, self.length, *itertools.chain.from_iterable(forks)})):
            ends += [*range(start + size, stop - least + 1, size), stop]
        return ChunkPlan(self.length, self.size, tuple(ends), forks)

    def with_least(self, tokens: int) -> ChunkPlan:
        """The plan whose chunks have at least so many positions: ends that come too soon after the one before, or too close
        before the last, are left out."""
        ends: list[int] = []
        for end in self.ends[:-1]:
            if end - (ends[-1] if ends else 0) >= tokens and self.length - end >= tokens:
                ends.append(end)
        return ChunkPlan(self.length, self.size, (*ends, self.length))


def in_one_pass(size: int) -> int:
    """The largest power of two up to `size` positions, which are 1 or more.

    cuDNN attends few lengths of queries ([Note: few shapes]): a chunk of 2,730 would be cut into 2,048, 512 and 170 of
    them, which read their prefix one after the other.
    """
    return 1 << (size.bit_length() - 1)


@functools.lru_cache  # its chunks are then made once for all layers and calls
def plan_chunks(length: int, batch_size: int, chunk_size: int | Literal["auto"]) -> ChunkPlan:
    """Cut `length` positions of `batch_size` rows. The rule behind "auto" is `AUTO_RULE`."""
    if chunk_size == "auto":
        tokens = min(max(-(-length * batch_size // AUTO_CHUNKS), AUTO_MIN_TOKENS), AUTO_MAX_TOKENS)
        size = max(1, tokens // max(1, batch_size))
        size = length if size >= length else in_one_pass(size)
    else:
        size = chunk_size
    return ChunkPlan(length, max(1, min(size, length)))


def pick_chunk_size(seq_len: int, chunk_size: int | None = None) -> int:
    """A chunk size that cuts seq_len into at least four chunks, the last of them shorter; the user's, if it does.

    Raises:
        ConfigError: the user's does not, or none does.
    """
    ideal, most = seq_len / (MIN_CHUNKS + 0.25), (seq_len - 1) // (MIN_CHUNKS - 1)
    near = range(max(2, int(ideal) - NEAR), min(most, int(ideal) + NEAR) + 1)
    best = min((size for size in near if seq_len % size), key=lambda size: abs(size - ideal), default=None)
    if best is None:
        raise ConfigError(f"seq_len is {seq_len}; {MIN_CHUNKS} unequal chunks need at least 9 tokens. Pass 512, say.")
    if chunk_size is not None and not (2 <= chunk_size <= most and seq_len % chunk_size):
        raise ConfigError(
            f"chunk_size {chunk_size} does not cut {seq_len} tokens into at least {MIN_CHUNKS} chunks with a shorter last "
            f"one, which it takes to try every boundary. Choose a smaller --chunk-size, such as {best}, or leave it out."
        )
    return chunk_size or best
