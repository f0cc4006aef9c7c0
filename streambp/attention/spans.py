"""Which keys each query may read, and the rectangles that cover them. Integers only.

Vocabulary:

- span: the keys that one query may read. In causal models it is an interval: it starts at the query's own document (or
  after the left padding, or where the window starts) and ends with the query itself (or where the right padding starts).
- run: consecutive queries of one row whose spans follow one rule.
- block: a rectangle [q0, q1) x [k0, k1) of one or more rows, computed by one kernel call. Its kind says which of its
  pairs count:

      FULL    all of them
      CAUSAL  k <= q; a square on the diagonal, so that top-left and bottom-right alignment agree
      BAND    k > q - window; the near edge of a sliding window, entirely below the diagonal
      WINDOW  q - window < k <= q, queries aligned to the last keys; for kernels that know windows
      VARLEN  one CAUSAL block for each document, windowed if a window is set; for kernels that take cu_seqlens
      MASK    whatever a tile of the mask says

Every (query, key) pair inside a span lies in exactly one block and counts there; no other pair counts.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator


class Kind(enum.Enum):
    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"
    WINDOW = "window"
    VARLEN = "varlen"
    MASK = "mask"


@dataclasses.dataclass(frozen=True)
class Run:
    """Queries [q0, q1) read keys from k0 on: up to themselves, or up to k1 (exclusive) where k1 is given."""

    q0: int
    q1: int
    k0: int
    k1: int | None = None

    def clip(self, start: int, stop: int) -> Run:
        return dataclasses.replace(self, q0=max(self.q0, start), q1=min(self.q1, stop))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What a backend wants its blocks to look like; None means no limit."""

    q_block: int | None = None
    k_block: int | None = None
    native_window: bool = False
    native_varlen: bool = False


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows [b0, b1), queries [q0, q1), keys [k0, k1), all absolute."""

    kind: Kind
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
        """Pairs that a kernel computes for each row, masked ones among them."""
        if self.kind is Kind.VARLEN:
            steps = zip(self.cu_q, self.cu_q[1:], self.cu_k, self.cu_k[1:], strict=False)
            return sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in steps)
        return (self.q1 - self.q0) * (self.k1 - self.k0)


@dataclasses.dataclass(frozen=True)
class Spans:
    """The spans of a whole batch: the runs of each row, and the sliding window if there is one."""

    length: int
    rows: tuple[tuple[Run, ...], ...]
    window: int | None = None

    @classmethod
    def causal(cls, batch_size: int, length: int, window: int | None = None) -> Spans:
        return cls(length, ((Run(0, length, 0),),) * batch_size, window)

    def blocks(self, start: int, stop: int, tiling: Tiling) -> Iterator[Block]:
        """The blocks of queries [start, stop)."""
        for b0, b1, runs in self._row_groups():
            clipped = [run.clip(start, stop) for run in runs if run.q0 < stop and run.q1 > start]
            if tiling.native_varlen and _is_packed(clipped):
                for row in range(b0, b1):
                    yield from self._varlen_blocks(row, clipped, tiling)
            else:
                for run in clipped:
                    yield from self._run_blocks(b0, b1, run, tiling)

    def _row_groups(self) -> Iterator[tuple[int, int, tuple[Run, ...]]]:
        first = 0
        for row in range(1, len(self.rows) + 1):
            if row == len(self.rows) or self.rows[row] != self.rows[first]:
                yield first, row, self.rows[first]
                first = row

    def _run_blocks(self, b0: int, b1: int, run: Run, tiling: Tiling) -> Iterator[Block]:
        window = self.window
        step = tiling.q_block or run.q1 - run.q0
        if window is not None and tiling.native_window and run.k1 is None:
            k0 = max(run.k0, run.q0 - window + 1)
            yield Block(Kind.WINDOW, b0, b1, run.q0, run.q1, k0, run.q1, window)
            return
        if window is not None:
            step = min(step, window)
        for q0 in range(run.q0, run.q1, step):
            q1 = min(q0 + step, run.q1)
            # Keys below `full` are in some queries' windows only; from `stop` on, in some queries' past only.
            full, stop = run.k0, q0 if run.k1 is None else run.k1
            if window is not None:
                full = max(run.k0, q1 - window)
                edge = max(run.k0, q0 - window + 1)
                if edge < min(full, stop):
                    yield Block(Kind.BAND, b0, b1, q0, q1, edge, min(full, stop), window)
            yield from _full_blocks(b0, b1, q0, q1, full, stop, tiling)
            if run.k1 is None:
                yield Block(Kind.CAUSAL, b0, b1, q0, q1, q0, q1)

    def _varlen_blocks(self, row: int, runs: list[Run], tiling: Tiling) -> Iterator[Block]:
        first = runs[0]
        k0 = first.q0 if self.window is None else max(first.k0, first.q0 - self.window + 1)
        if self.window is None:
            yield from _full_blocks(row, row + 1, first.q0, first.q1, first.k0, first.q0, tiling)
        cu_q = (0, *(run.q1 - first.q0 for run in runs))
        cu_k = (0, *(run.q1 - k0 for run in runs))
        yield Block(Kind.VARLEN, row, row + 1, first.q0, runs[-1].q1, k0, runs[-1].q1, self.window, cu_q, cu_k)


def _full_blocks(b0: int, b1: int, q0: int, q1: int, k0: int, k1: int, tiling: Tiling) -> Iterator[Block]:
    step = tiling.k_block or max(1, k1 - k0)
    for start in range(k0, k1, step):
        yield Block(Kind.FULL, b0, b1, q0, q1, start, min(start + step, k1))


def _is_packed(runs: list[Run]) -> bool:
    """Several documents, one behind the other, each reading nothing before itself."""
    follows = all(a.q1 == b.q0 == b.k0 for a, b in itertools.pairwise(runs))
    return len(runs) > 1 and follows and all(run.k1 is None for run in runs)
