"""Plan how a sequence is cut into chunks. Only `Chunk.part` handles tensors; all other code
computes with integers."""

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

MIN_TEST_CHUNKS = 4  # chunks of a verified step
SIZE_SEARCH_RANGE = 64  # search range around the ideal size
AUTO_CHUNKS = 8
AUTO_MIN_TOKENS = 2048
AUTO_MAX_TOKENS = 8192
AUTO_RULE = (
    f"auto: an {AUTO_CHUNKS}th of the sequence, "
    f"at least {AUTO_MIN_TOKENS:,} and at most {AUTO_MAX_TOKENS:,} tokens over all rows of the "
    "batch, rounded down to a power of two in each row"
)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of a sequence: positions `[start, stop)` of every row.

    Attributes:
        index: the chunk's number in the sequence, from 0.
        start: the first position.
        stop: the position after the last one.
    """

    index: int
    start: int
    stop: int

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Return a view of x [..., T, ...] with this chunk's positions. Return x itself if
        dimension `dim` has the chunk's size already.

        Args:
            x: a tensor with the sequence's T positions, or with the chunk's alone.
            dim: index of the dimension of size T.
        """
        count = self.stop - self.start
        if x.shape[dim] == count:
            return x
        return x.narrow(dim, self.start, count)


Forks = tuple[tuple[int, int], ...]  # pairs (start, origin), see `ChunkPlan`


@dataclasses.dataclass(frozen=True)
class Barrier:
    """Range of positions at which no chunk of a sequence may end, both limits included. A chunk
    [start, stop) ends at `stop`, the position after its last token.

    There are two reasons. A query before the end may attend to a key after the end, which is not
    computed yet. Or the next chunk would begin with the last token of a packed document, and
    kernels of recurrent states have no backward for a single token.

    Attributes:
        first: the first forbidden end.
        last: the last forbidden end.
    """

    first: int
    last: int


def merge_barriers(barriers: Iterable[Barrier]) -> tuple[Barrier, ...]:
    """Return barriers (ranges of positions at which no chunk may end) in increasing order, with
    overlapping and adjacent ranges merged. The result forbids the same positions."""
    result: list[Barrier] = []
    for barrier in sorted(barriers, key=lambda barrier: barrier.first):
        if result and barrier.first <= result[-1].last + 1:
            barrier = Barrier(result[-1].first, max(result.pop().last, barrier.last))
        result.append(barrier)
    return tuple(result)


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """Division of a sequence of `length` positions into chunks: each of `size` positions, or with
    given ends. The object is a sequence of its `Chunk`s.

    Args:
        length: the number of positions.
        size: requested number of positions of a chunk; the last chunk may be shorter. Chunks with
            given `ends` may have other sizes.
        ends: increasing chunk ends, the last is `length`; (): a chunk ends every `size` positions.
        forks: pairs (start, origin), for a packed row: several rows concatenated, with their common
            prefix only once. The chunk that starts at `start` continues the text that ends at
            `origin`, instead of the previous chunk's. If origin is 0, the chunk begins a new text.
            (): each chunk continues the previous one.
    """

    length: int
    size: int
    ends: tuple[int, ...] = ()
    forks: Forks = ()

    def __post_init__(self) -> None:
        if not self.ends:
            object.__setattr__(
                self, "ends", (*range(self.size, self.length, self.size), self.length)
            )

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Return the chunks, first to last."""
        return tuple(
            Chunk(index, *ends) for index, ends in enumerate(itertools.pairwise((0, *self.ends)))
        )

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
        """Return the chunks in the order of backward, last to first, because later chunks attend to
        the keys of earlier chunks. When the backward of a chunk begins, all later chunks have added
        their gradients to the chunk's dK and dV.

        [Note: prefix accumulation order]
        """
        return self.chunks[::-1]

    @functools.cached_property
    def predecessors(self) -> tuple[int | None, ...]:
        """Return for each chunk the index of the chunk with the preceding tokens of its text; None
        if the chunk begins a text. The preceding tokens are in the previous chunk, unless `forks`
        names another."""
        ending = {end: index for index, end in enumerate(self.ends)}
        origins = dict(self.forks)
        return tuple(ending.get(origins.get(chunk.start, chunk.start)) for chunk in self)

    @functools.cached_property
    def successors(self) -> dict[int, tuple[int, int]]:
        """Return a dict from the index of each chunk to a pair: the smallest and largest index of
        the chunks that continue this chunk. A chunk without continuation has no entry.

        A chunk continues another chunk if it has the next tokens of the same text, and so starts
        from the recurrent states at the other's end. Each chunk continues the previous chunk,
        unless `forks` names another. Several chunks may continue a shared prefix.
        """
        ranges: dict[int, tuple[int, int]] = {}
        for index, predecessor in enumerate(self.predecessors):
            if predecessor is not None:
                ranges[predecessor] = (ranges.get(predecessor, (index,))[0], index)
        return ranges

    def chunk_index(self, position: int) -> int:
        """Return the index of the chunk that contains a position of the sequence."""
        return bisect.bisect_right(self.ends, position)

    @functools.cached_property
    def longest(self) -> int:
        """Return the number of positions in the longest chunk."""
        return max(b - a for a, b in itertools.pairwise((0, *self.ends)))

    def avoid_barriers(self, barriers: Sequence[Barrier]) -> ChunkPlan:
        """Return a plan for the same sequence whose chunks do not end at forbidden positions.

        The end of each chunk moves back from `size` positions to the nearest allowed position, and
        the next chunk begins at that position. If no position after the chunk's start is allowed,
        the end moves forward, and the chunk is longer than `size`.

        Args:
            barriers: ranges of positions at which no chunk may end, in increasing order, neither
                overlapping nor adjacent.
        """
        starts = [barrier.first for barrier in barriers]
        ends: list[int] = []
        start = 0
        while start < self.length:
            end = min(start + self.size, self.length)
            at = bisect.bisect_right(starts, end) - 1
            if at >= 0 and end <= barriers[at].last:
                end_before = barriers[at].first - 1
                end_behind = barriers[at].last + 1
                end = end_before if end_before > start else end_behind
            ends.append(end)
            start = end
        return ChunkPlan(self.length, self.size, tuple(ends))

    def split_at_forks(self, forks: Forks, min_size: int) -> ChunkPlan:
        """Return a plan for a packed row: several rows of a batch concatenated, with each common
        prefix only once. Chunks end where a prefix ends, and where the continuation of a prefix
        begins.

        Between these positions chunks end after every `size` positions of this plan, if at least
        `min_size` positions remain.

        Args:
            forks: pairs (start, origin): the text at `start` continues the prefix that ends at
                `origin`. All positions are at least `min_size` apart.
            min_size: smallest number of positions of a chunk.
        """
        size = max(self.size, min_size)
        ends = list[int]()
        for start, stop in itertools.pairwise(
            sorted({0, self.length, *itertools.chain.from_iterable(forks)})
        ):
            ends += [*range(start + size, stop - min_size + 1, size), stop]
        return ChunkPlan(self.length, self.size, tuple(ends), forks)

    def with_min_tokens(self, tokens: int) -> ChunkPlan:
        """Return a plan for the same sequence whose chunks have at least `tokens` positions each,
        or a single chunk if the sequence is shorter.

        Chunk ends of this plan that are too close to the previous end, or to the sequence's end,
        are left out.
        """
        ends: list[int] = []
        for end in self.ends[:-1]:
            if end - (ends[-1] if ends else 0) >= tokens and self.length - end >= tokens:
                ends.append(end)
        return ChunkPlan(self.length, self.size, (*ends, self.length))


def floor_power_of_two(size: int) -> int:
    """Return the largest power of two that is not above `size`, for `size` from 1 on. Chunks of
    this size are fastest with cuDNN's attention.

    cuDNN's attention is called for a few numbers of queries only, powers of two
    (`attention/spans.py`). A chunk of 2,730 queries would be split into 2,048, 512 and 170 queries,
    and each part would read all earlier keys again.
    """
    return 1 << (size.bit_length() - 1)


@functools.lru_cache  # the same chunks serve all layers and calls
def plan_chunks(length: int, batch_size: int, chunk_size: int | Literal["auto"]) -> ChunkPlan:
    """Return the division of `length` positions of `batch_size` rows into chunks.

    Args:
        length: number of positions.
        batch_size: number of rows.
        chunk_size: positions of a chunk. "auto": an eighth of the sequence, between 2,048 and 8,192
            tokens over all rows, rounded down to a power of two in each row.
    """
    if chunk_size == "auto":
        tokens = min(max(-(-length * batch_size // AUTO_CHUNKS), AUTO_MIN_TOKENS), AUTO_MAX_TOKENS)
        size = max(1, tokens // max(1, batch_size))
        size = length if size >= length else floor_power_of_two(size)
    else:
        size = chunk_size
    return ChunkPlan(length, max(1, min(size, length)))


def pick_chunk_size(seq_len: int, chunk_size: int | None = None) -> int:
    """Return a chunk size for a test of chunked computation: seq_len is cut into at least four
    chunks, and the last chunk is shorter.

    If `chunk_size` is given, it is checked by the same conditions and returned.

    Raises:
        ConfigError: `chunk_size` gives fewer than four chunks or a last chunk of the same size, or
            the sequence is too short for any size.
    """
    ideal = seq_len / (MIN_TEST_CHUNKS + 0.25)
    largest = (seq_len - 1) // (MIN_TEST_CHUNKS - 1)
    candidates = range(
        max(2, int(ideal) - SIZE_SEARCH_RANGE), min(largest, int(ideal) + SIZE_SEARCH_RANGE) + 1
    )
    best = min(
        (size for size in candidates if seq_len % size),
        key=lambda size: abs(size - ideal),
        default=None,
    )
    if best is None:
        raise ConfigError(
            f"seq_len is {seq_len}; {MIN_TEST_CHUNKS} unequal chunks need at least 9 tokens. Pass "
            "512, "
            "say."
        )
    if chunk_size is not None and not (2 <= chunk_size <= largest and seq_len % chunk_size):
        raise ConfigError(
            f"chunk_size {chunk_size} does not cut {seq_len} tokens into at least "
            f"{MIN_TEST_CHUNKS} "
            "chunks with a shorter last one, so the test would miss some chunk boundaries. Choose "
            f"a smaller --chunk-size, such as {best}, or leave --chunk-size out."
        )
    return chunk_size or best
