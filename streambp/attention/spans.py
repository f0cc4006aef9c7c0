"""Keys that each query may read, and rectangles that cover them, in integers alone.

Vocabulary:

- span: the keys that one query may read. In causal models a span is an interval. The interval
  starts at the query's own document (or after the left padding, or where the window starts). The
  interval ends with the query itself (or where the right padding starts).
- run: consecutive queries of one row whose spans follow one rule.
- block: a rectangle [q0, q1) x [k0, k1) of one or more rows, computed by one kernel call. The kind
  of a block decides in which of its pairs (q, k) query q reads key k; these pairs count:

      FULL    all of them
      CAUSAL  k <= q, queries aligned to the last keys; a square on the diagonal unless the kernel
              knows bottom-right alignment
      BAND    k > q - window; the near edge of a sliding window, entirely below the diagonal
      WINDOW  q - window < k <= q, queries aligned to the last keys; for kernels that know windows
      VARLEN  one CAUSAL block for each document, windowed if a window is set; for kernels that
              take cu_seqlens
      MASK    whatever a tile of the mask says

Every (query, key) pair inside a span lies in exactly one block and counts there; no other pair
counts.

cuDNN builds a graph for every new shape, for tenths of a second, and never frees the graph. So its
blocks have few lengths, whatever the length of the sequence: multiples of `BLOCK_LENGTH_MULTIPLE`,
and powers of two below. A remainder of fewer tokens than `Tiling.min_tokens` goes to the next
kernel, which takes any length. Blocks of a few queries or keys go to that kernel, too, because
cuDNN refuses these blocks or computes wrong numbers.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator
from typing import Any

BLOCK_LENGTH_MULTIPLE = 8192
# most keys of a document that began before its chunk and still joins the chunk's VARLEN call
MAX_JOINED_KEYS = 2048


class BlockKind(enum.Enum):
    """Rule for the pairs within a rectangle of the attention matrix in which the query reads the
    key. FULL: all pairs. CAUSAL: keys up to the query. BAND: keys k > q - window, for rectangles
    with all keys before all queries. WINDOW: causal within the sliding window. VARLEN: causal
    within each packed document. MASK: a mask tensor decides."""

    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"
    WINDOW = "window"
    VARLEN = "varlen"
    MASK = "mask"


@dataclasses.dataclass(frozen=True)
class QueryRun:
    """Consecutive queries [q0, q1) of one row that read keys by the same rule: from k0 up to the
    query itself, or up to k1 (exclusive) if k1 is set.

    Attributes:
        q0: first query.
        q1: end of the queries, exclusive.
        k0: first key.
        k1: end of the keys, exclusive; None: each query's own position is its last key.
        shift: number of tokens of other batch rows that lie between these keys and the queries, if
            several batch rows are merged into one packed row; otherwise 0. A sliding window does
            not count these tokens.
    """

    q0: int
    q1: int
    k0: int
    k1: int | None = None
    shift: int = 0

    def clip(self, start: int, stop: int) -> QueryRun:
        """Return the part of the run whose queries are in [start, stop), a chunk's positions."""
        if start <= self.q0 and self.q1 <= stop:
            return self
        return dataclasses.replace(self, q0=max(self.q0, start), q1=min(self.q1, stop))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of blocks that an attention kernel prefers. A block is a rectangle of queries and keys.
    None means no limit.

    Attributes:
        q_block: most queries of a block.
        k_block: most keys of a block.
        k_forward: most keys of a block in forward, where no dK and dV are returned.
        min_tokens: fewest queries and keys of a block, for a kernel that must see few different
            lengths; None: any length is allowed.
        tail: sizes for another kernel, which computes blocks of fewer queries or keys than
            `min_tokens`; None: no such kernel.
        masked: sizes for the kernel that computes blocks of kind BAND and MASK; None: this
            object's sizes.
        bottom_right: True if CAUSAL blocks may have more keys than queries, aligned at the last
            key. False if CAUSAL blocks must be squares.
        native_window: True if WINDOW blocks are allowed.
        native_varlen: True if VARLEN blocks are allowed.
    """

    q_block: int | None = None
    k_block: int | None = None
    k_forward: int | None = None
    min_tokens: int | None = None
    tail: Tiling | None = None
    masked: Tiling | None = None
    bottom_right: bool = False
    native_window: bool = False
    native_varlen: bool = False

    def takes(self, length: int) -> bool:
        """True if the kernel supports a block with `length` queries, or with `length` keys.
        Otherwise another kernel computes the block, with the sizes in the attribute `tail`."""
        return (
            self.min_tokens is None
            or next(few_lengths(length, self.min_tokens, None), None) == length
        )

    def queries(self, q0: int, q1: int) -> list[tuple[int, int, Tiling]]:
        """Return ranges that cover queries [q0, q1), as (start, stop, sizes of blocks). The sizes
        are this object. Only a remainder that is too short for the kernel, with fewer than
        `min_tokens` queries, gets the sizes of another kernel, `tail`."""
        ranges = list[tuple[int, int, Tiling]]()
        if self.min_tokens is None:
            for start in range(q0, q1, self.q_block or max(1, q1 - q0)):
                ranges.append((start, min(start + (self.q_block or q1 - q0), q1), self))
            return ranges
        for length in few_lengths(q1 - q0, self.min_tokens, self.q_block):
            ranges.append((q0, q0 + length, self))
            q0 += length
        if q0 < q1:
            assert self.tail is not None
            ranges += self.tail.queries(q0, q1)
        return ranges

    def keys(self, k0: int, k1: int) -> list[tuple[int, int]]:
        """Return ranges (start, stop) that cover keys [k0, k1), each of a length that this kernel
        prefers. If the kernel requires at least `min_tokens` keys, the last range may have fewer;
        another kernel computes this range."""
        ranges = list[tuple[int, int]]()
        if self.min_tokens is None:
            for start in range(k0, k1, self.k_block or max(1, k1 - k0)):
                ranges.append((start, min(start + (self.k_block or k1 - k0), k1)))
            return ranges
        for length in few_lengths(k1 - k0, self.min_tokens, self.k_block):
            ranges.append((k0, k0 + length))
            k0 += length
        return [*ranges, (k0, k1)] if k0 < k1 else ranges


def few_lengths(length: int, min_tokens: int, max_tokens: int | None) -> Iterator[int]:
    """Yield the lengths into which `length` tokens are cut, so that few different lengths occur.
    cuDNN builds a graph for each new length. Each length is at least `min_tokens` and at most
    `max_tokens` (a multiple of `BLOCK_LENGTH_MULTIPLE`; None: no limit). The lengths cover all
    tokens but a remainder of less than `min_tokens`."""
    while length >= min_tokens:
        size = length - length % BLOCK_LENGTH_MULTIPLE or 1 << (length.bit_length() - 1)
        size = min(size, max_tokens or size)
        yield size
        length -= size


@dataclasses.dataclass(frozen=True)
class Block:
    """Rectangle of the attention matrix, the same for batch rows [b0, b1): queries [q0, q1) and
    keys [k0, k1). All are absolute indices. One kernel call computes a block.

    Attributes:
        kind: rule for the pairs in which the query reads the key.
        window: size of the sliding window of a block of kind BAND, WINDOW or VARLEN; None: no
            window.
        cu_q: cu_seqlens of the queries of a block of kind VARLEN, from 0; (): another kind.
        cu_k: cu_seqlens of the keys of a block of kind VARLEN, from 0; (): another kind.
    """

    kind: BlockKind
    b0: int
    b1: int
    q0: int
    q1: int
    k0: int
    k1: int
    window: int | None = None
    cu_q: tuple[int, ...] = ()
    cu_k: tuple[int, ...] = ()

    @property
    def pairs(self) -> int:
        """Return the number of (query, key) pairs that a kernel computes for each row, including
        masked pairs, to count FLOPs."""
        if self.kind is BlockKind.VARLEN:
            steps = zip(self.cu_q, self.cu_q[1:], self.cu_k, self.cu_k[1:], strict=False)
            return sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in steps)
        return (self.q1 - self.q0) * (self.k1 - self.k0)


@dataclasses.dataclass(frozen=True)
class Spans:
    """Keys that each query of a batch reads, stored as intervals.

    Attributes:
        length: number of positions of a row.
        rows: the runs of each batch row. A run is a range of queries that read keys by one rule.
        window: number of keys in the layer's sliding window, the query's own included; None: no
            window.
        caches: results that other modules compute once for these intervals.
    """

    length: int
    rows: tuple[tuple[QueryRun, ...], ...]
    window: int | None = None
    caches: dict[Any, Any] = dataclasses.field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def causal(cls, batch_size: int, length: int, window: int | None = None) -> Spans:
        """Return the keys that each query reads (`Spans`), for `batch_size` rows of `length` tokens
        with one document each and without padding.

        A query reads all keys up to itself. If there is a sliding window, the query reads the last
        `window` keys, itself included.
        """
        return cls(length, ((QueryRun(0, length, 0),),) * batch_size, window)

    @property
    def reads_ahead(self) -> bool:
        """True if a query reads a key of a later position, as in bidirectional attention."""
        return any(run.k1 is not None and run.k1 > run.q0 + 1 for runs in self.rows for run in runs)

    def blocks(self, start: int, stop: int, tiling: Tiling) -> list[Block]:
        """Return rectangles (blocks) that cover queries [start, stop) of all rows and the keys that
        they read.

        Args:
            start: first query.
            stop: end of the queries, exclusive.
            tiling: sizes of the rectangles that the kernel prefers.
        """
        blocks = list[Block]()
        first = 0
        count = len(self.rows)
        for row in range(1, count + 1):
            if row < count and self.rows[row] == self.rows[first]:
                continue  # rows with the same runs share their blocks
            b0 = first
            b1 = row
            first = row
            clipped = [
                run.clip(start, stop) for run in self.rows[b0] if run.q0 < stop and run.q1 > start
            ]
            packed = list[QueryRun]()
            if tiling.native_varlen and len(clipped) > 1:
                causal = [run for run in clipped if run.k1 is None]
                if len(causal) > 1 and all(
                    a.q1 == b.q0 == b.k0 for a, b in itertools.pairwise(causal)
                ):
                    # Consecutive documents share one call. A first document that began before the
                    # chunk joins if it reads few earlier keys; otherwise another kernel is faster.
                    opening = causal[0]
                    joins = (
                        opening.k0 == opening.q0
                        or self.window is not None
                        or opening.q1 - opening.k0 <= MAX_JOINED_KEYS
                    )
                    packed = causal if joins else causal[1:]
                    padded = [run for run in clipped if run.k1 is not None]
                    clipped = causal[: len(causal) - len(packed)] + padded
            for run in clipped:
                blocks += self._run_blocks(b0, b1, run, tiling)
            if packed:  # one call for several documents; the first may begin before its queries
                k0 = self._first_key(packed[0])
                q0 = packed[0].q0
                end = packed[-1].q1
                cu_q = (0, *(run.q1 - q0 for run in packed))
                cu_k = (0, *(run.q1 - k0 for run in packed))
                for row_index in range(b0, b1):
                    blocks.append(
                        Block(
                            BlockKind.VARLEN,
                            row_index,
                            row_index + 1,
                            q0,
                            end,
                            k0,
                            end,
                            self.window,
                            cu_q,
                            cu_k,
                        )
                    )
        return blocks

    def _run_blocks(self, b0: int, b1: int, run: QueryRun, tiling: Tiling) -> list[Block]:
        window = self.window
        blocks = list[Block]()
        if window is None:
            for q0, q1, query_tiling in tiling.queries(run.q0, run.q1):
                if run.k1 is not None:
                    blocks += [
                        Block(BlockKind.FULL, b0, b1, q0, q1, *keys)
                        for keys in query_tiling.keys(run.k0, run.k1)
                    ]
                    continue
                k0 = run.k0
                if not query_tiling.bottom_right:
                    blocks += [
                        Block(BlockKind.FULL, b0, b1, q0, q1, *keys)
                        for keys in query_tiling.keys(k0, q0)
                    ]
                    k0 = q0
                while query_tiling.k_block and q1 - k0 > max(query_tiling.k_block, q1 - q0):
                    stop = min(k0 + query_tiling.k_block, q0)
                    blocks.append(Block(BlockKind.FULL, b0, b1, q0, q1, k0, stop))
                    k0 = stop
                blocks.append(Block(BlockKind.CAUSAL, b0, b1, q0, q1, k0, q1))
            return blocks
        if tiling.native_window and run.k1 is None:
            return [
                Block(
                    BlockKind.WINDOW, b0, b1, run.q0, run.q1, self._first_key(run), run.q1, window
                )
            ]
        step = min((tiling.masked or tiling).q_block or window, window)
        for q0 in range(run.q0, run.q1, step):
            q1 = min(q0 + step, run.q1)
            # Only some queries' windows contain keys below `full`, and only some queries' pasts
            # contain keys from `stop` on.
            reach = window + run.shift
            full = max(run.k0, q1 - reach)
            stop = q0
            if run.k1 is not None:
                stop = run.k1
            edge = max(run.k0, q0 - reach + 1)
            if edge < min(full, stop):
                blocks.append(Block(BlockKind.BAND, b0, b1, q0, q1, edge, min(full, stop), reach))
            blocks += [
                Block(BlockKind.FULL, b0, b1, q0, q1, *keys) for keys in tiling.keys(full, stop)
            ]
            if run.k1 is None:
                blocks.append(Block(BlockKind.CAUSAL, b0, b1, q0, q1, q0, q1))
        return blocks

    def _first_key(self, run: QueryRun) -> int:
        """Return the first key that the first query of a run reads: the run's first key, or the
        first key of the sliding window if that is later. A block of these queries begins at this
        key."""
        return run.k0 if self.window is None else max(run.k0, run.q0 - self.window + 1)
