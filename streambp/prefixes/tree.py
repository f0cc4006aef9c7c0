"""One packed row that holds the tokens of a batch: none of its padding, and once what rows have in common.

[Note: tree of rows] A token of a row is what the row holds up to it: two rows share a token if their ids are the same from
the first to it, at the same positions. So the tokens that are computed form a tree. It is written down depth first, one
segment after the other: a row whose tokens are new from some place on adds these as a segment, and what stands before them
are pieces of earlier segments. A query reads the pieces before its segment, and its own segment up to itself; all of these
come before it in the packed row, which is therefore causal like any other.

Left padding is no part of a row, and a row's position is counted without it. Padding is not computed at all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from streambp.attention.spans import Run, Spans
from streambp.chunks import Forks

LEAST = 64  # tokens that a branch must share to be one: fewer cost more in small blocks of attention than they save
SAVES = 0.1  # of B * T tokens: what a packed row must save, so that prefixes that are equal by chance cost nothing
A_CHUNK = 64  # tokens, as many as a chunk of a layer with states costs beside its own: measured 38 and more on a CPU
NOTHING = "a packed row saves too little: the last call's rows have no padding, and no beginning in common"
WIDER = 4  # how much more is compared where all that was compared is equal


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of the packed row: those of a row from its token `at` on, counted without padding."""

    at: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Row:
    """A row's tokens, first to last: it begins in `column` of the batch, behind its padding. () has padding alone."""

    column: int
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        """Tokens without padding."""
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Segment:
    """New tokens of the packed row, as `own` says; `row` of the batch has them, behind those of the pieces `before`."""

    row: int
    own: Piece
    before: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Tree:
    """Rows of a batch [B, T] as pieces of one packed row of `length` tokens. [Note: tree of rows]

    Args:
        width: T.
        rows: of the batch, in its order. segments: of the packed row, first to last; together they cover its tokens.
        furthest: the position of one more token at the end of the packed row, which no row has: a rotary embedding that
            depends on the highest position of a batch finds it there, where padding alone has it. None: there is none.
    """

    width: int
    rows: tuple[Row, ...]
    segments: tuple[Segment, ...]
    furthest: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens that rows have, each once."""
        return self.segments[-1].own.stop if self.segments else 0

    @property
    def length(self) -> int:
        """Tokens of the packed row."""
        return self.tokens + (self.furthest is not None)

    @property
    def tokens_of_rows(self) -> int:
        """Tokens of all rows, without padding."""
        return sum(row.length for row in self.rows)

    @functools.cached_property
    def forks(self) -> Forks:
        """Where in the packed row each segment starts, and where it goes on from, for `ChunkPlan`."""
        found = [(s.own.start, s.before[-1].stop if s.before else 0) for s in self.segments]
        return (*found, *([] if self.furthest is None else [(self.tokens, 0)]))

    @property
    def pieces(self) -> int:
        """How many there are between the places where rows part or end: as many chunks as layers with states need."""
        return len({0, self.length, *itertools.chain.from_iterable(self.forks)}) - 1

    def padding(self) -> Iterator[tuple[int, int, int]]:
        """Of each row the columns [start, stop) that hold no token: row, start, stop."""
        for index, row in enumerate(self.rows):
            for start, stop in ((0, row.column), (row.column + row.length, self.width)):
                if start < stop:
                    yield index, start, stop

    def places(self, device: torch.device) -> Tensor:
        """[B, T]: where the packed row has each token of the batch; for padding its length, which is behind it."""
        found = torch.full((len(self.rows), self.width), self.length, device="cpu")
        for index, row in enumerate(self.rows):
            for piece in row.pieces:
                start = row.column + piece.at
                found[index, start : start + piece.stop - piece.start] = torch.arange(piece.start, piece.stop, device="cpu")
        return found.to(device)

    def packed(self, batch: Tensor) -> Tensor:
        """The packed row [1, tokens, ...] of a batch [B, T, ...]."""
        columns = ((s.row, self.rows[s.row].column + s.own.at, s.own.stop - s.own.start) for s in self.segments)
        rows = batch.unbind()  # whose gradients are stacked; that of batch[row] is as large as the batch
        return torch.cat([rows[row][start : start + size] for row, start, size in columns])[None]

    def spans(self, window: int | None = None) -> Spans:
        """What the packed row's queries read.

        Args:
            window: of that many tokens of a row, the query among them; None: all before it.
        """
        own = [Run(segment.own.start, segment.own.stop, segment.own.start) for segment in self.segments]
        if self.furthest is not None:
            own.append(Run(self.tokens, self.length, self.tokens))
        before = self._whole_pieces() if window is None else self._pieces_within(window)
        return Spans(self.length, ((*own, *before),), window)

    def _whole_pieces(self) -> Iterator[Run]:
        """Neighbouring segments behind the same tokens read these in one run, however far each of them goes."""
        cuts = sorted({edge for s in self.segments for piece in s.before for edge in (piece.start, piece.stop)})
        readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for segment in self.segments:
            for piece in segment.before:
                inside = [cut for cut in cuts if piece.start <= cut <= piece.stop]
                for part in itertools.pairwise(inside):
                    queries = readers.setdefault(part, [])
                    start = queries.pop()[0] if queries and queries[-1][1] == segment.own.start else segment.own.start
                    queries.append((start, segment.own.stop))
        for (k0, k1), queries in sorted(readers.items()):
            yield from (Run(q0, q1, k0, k1) for q0, q1 in queries)

    def _pieces_within(self, window: int) -> Iterator[Run]:
        """Where positions count, each segment has a distance of its own from what it reads."""
        for segment in self.segments:
            for piece in segment.before:
                shift = (segment.own.start - segment.own.at) - (piece.start - piece.at)
                last = min(segment.own.stop, piece.stop - 1 + window + shift)  # the first query that reads nothing of it
                if segment.own.start < last:
                    yield Run(segment.own.start, last, piece.start, piece.stop, shift)


@dataclasses.dataclass(frozen=True)
class _Known:
    """What is known of a row: its first column, its tokens, and the position of the first."""

    column: int
    length: int
    position: float


def find_tree(
    ids: Tensor,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    labelled: Tensor | None = None,
    least: int = LEAST,
    saves: float = SAVES,
    apart: int = 1,
    a_chunk: float = 0,
) -> Tree | str:
    """The tree of a batch's rows; or why they are better computed as they are, or have to be.

    Args:
        ids: [B, T], integers.
        mask: [B, T], zero for padding; None: there is none.
        positions: [1 or B, T], or [axes, 1 or B, T], where axes are 3 or first is that of text, integers or floats; None:
            the columns.
        labelled: [B, T] in bool, whose outputs are scored; None: nobody says.
        least: tokens that a branch shares at least. saves: of B * T tokens, padding among them, what has to be saved.
        apart: tokens between two places where rows part, and before their ends, at least; for that a branch may share a few
            tokens less.
        a_chunk: tokens that a chunk costs beside its own, where chunks end at each of these places.

    Waits for the device, a few times for each row.
    """
    found = _look_at(ids, mask, positions, labelled)
    if isinstance(found, str):
        return found
    known, furthest = found
    segments, rows = _write_down(ids, known, least, apart)
    tree = Tree(ids.shape[1], rows, segments, furthest)
    if not tree.tokens:
        return "the last call's batch is padding alone"
    if tree.tokens == ids.numel():
        return NOTHING
    more = a_chunk * (tree.pieces - 1)
    if ids.numel() - tree.tokens - more < max(saves * ids.numel(), 1):
        cut = f", in {tree.pieces} chunks at least" if more else ""
        return f"a packed row saves too little: the last call's {ids.numel():,} tokens would be {tree.tokens:,}{cut}"
    return tree


def _look_at(
    ids: Tensor, mask: Tensor | None, positions: Tensor | None, labelled: Tensor | None
) -> tuple[list[_Known], float | None] | str:
    """What is known of each row, and the highest position of the batch if padding alone has it; or why rows stay apart."""
    batch_size, width = ids.shape
    columns = torch.arange(width, device=ids.device)[None].expand(batch_size, -1)
    given = columns[None] if positions is None else positions.reshape(-1, *positions.shape[-2:])  # [axes, B, T]
    given = given.to(ids.device).expand(-1, batch_size, -1)
    positions = columns if len(given) == 3 else given[0]  # [B, T], of text
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device) != 0  # [B, T]
    first = real.int().argmax(1)
    last = width - 1 - real.flip(1).int().argmax(1)
    length = real.sum(1)
    both = real[:, 1:] & real[:, :-1]
    grows = ((positions[:, 1:] - positions[:, :-1] == 1) | ~both).all(1)
    scored = (torch.zeros_like(first) if labelled is None else (labelled.to(ids.device) & ~real).any(1)).to(first.dtype)
    start = positions.gather(1, first[:, None])[:, 0]
    highest = given.amax((0, 2)), given.amax(0).masked_fill(~real, -1).amax(1)  # [B], of all tokens and of real ones
    counts = torch.stack([first, last - first + 1, length, grows.to(first.dtype), scored])
    # Positions keep their dtype: those with a fraction are no integers.
    placed = torch.stack([start, *highest])
    if placed.is_floating_point():
        counts = counts.to(torch.float64)
    table = torch.cat([counts, placed.to(counts.dtype)])
    rows = [(*map(int, row[:5]), *row[5:]) for row in table.T.tolist()]
    for index, (_, extent, tokens, steady, outside, *_) in enumerate(rows):
        if tokens and extent != tokens:
            return f"the attention mask of the last call's row {index} leaves out tokens between others"
        if not steady:
            return f"position_ids of the last call's row {index} do not grow by one"
        if outside:
            return f"padding of the last call's row {index} predicts a label"
    furthest, read = (max(row[at] for row in rows) for at in (6, 7))
    return [_Known(row[0], row[2], row[5]) for row in rows], None if read in (furthest, -1) else furthest


def _write_down(ids: Tensor, known: list[_Known], least: int, apart: int) -> tuple[tuple[Segment, ...], tuple[Row, ...]]:
    """The segments of all rows, depth first, and what each row is made of."""
    if any(row.column for row in known):  # each row from its first token on; anything behind its last
        firsts = torch.tensor([row.column for row in known], device=ids.device)
        columns = (torch.arange(ids.shape[1], device=ids.device) + firsts[:, None]).clamp(max=ids.shape[1] - 1)
        ids = ids.gather(1, columns)
    # Rows that have `least` tokens in common are looked at together: most rows of most batches are alone.
    starts = ids[:, :least].unique(dim=0, return_inverse=True)[1].tolist()
    alike: dict[tuple[float, ...], list[int]] = {}
    for index, (known_row, start) in enumerate(zip(known, starts, strict=True)):
        alike.setdefault((known_row.position, start) if known_row.length >= least else (index,), []).append(index)
    # Rows that are not written down yet, and the pieces that they have in common.
    waiting: list[tuple[list[int], tuple[Piece, ...]]] = [(rows, ()) for rows in reversed(alike.values())]
    segments: list[Segment] = []
    pieces: dict[int, tuple[Piece, ...]] = {}
    end = 0
    while waiting:
        (pivot, *others), before = waiting.pop()
        depth = sum(piece.stop - piece.start for piece in before)
        pieces[pivot] = before
        if known[pivot].length > depth:
            own = Piece(depth, end, end + known[pivot].length - depth)
            segments.append(Segment(pivot, own, before))
            pieces[pivot], end = (*before, own), own.stop
            if before and before[-1].stop == own.start:  # they follow each other in the packed row
                pieces[pivot] = (*before[:-1], Piece(before[-1].at, before[-1].start, own.stop))
        common = _common(ids, pivot, others, depth, [row.length for row in known], least)
        for row, at in common.items() if apart > 1 else ():
            if at != known[row].length:  # a row that ends there adds nothing
                at = min(at, known[row].length - apart, known[pivot].length - apart)
                common[row] = at - at % apart
        beside = [row for row in others if common[row] - depth < least]
        if beside:
            waiting.append((beside, before))
        for at in sorted({at for at in common.values() if at - depth >= least}):  # the longest is popped first
            ahead = (piece for piece in pieces[pivot] if piece.at < at)
            path = tuple(Piece(p.at, p.start, min(p.stop, p.start + at - p.at)) for p in ahead)
            waiting.append(([row for row in others if common[row] == at], path))
    return tuple(segments), tuple(Row(row.column, pieces[index]) for index, row in enumerate(known))


def _common(ids: Tensor, pivot: int, others: list[int], depth: int, lengths: list[int], least: int) -> dict[int, int]:
    """How many tokens each of the others has in common with the pivot; all have `depth`.

    Compares a few at first, and more of those that are the same so far: rows that part soon cost next to nothing.
    """
    found = {row: min(lengths[row], lengths[pivot]) for row in others}
    same, start, size = others, depth, max(least, 1)
    while same and start < lengths[pivot]:
        stop = min(start + size, lengths[pivot])
        differs = ids[same, start:stop] != ids[pivot, start:stop]  # [rows, tokens]
        table = torch.stack([differs.any(1).to(torch.long), differs.int().argmax(1)]).tolist()
        for row, parts, at in zip(same, *table, strict=True):
            if parts:
                found[row] = min(found[row], start + at)
        same = [row for row, parts in zip(same, table[0], strict=True) if not parts and found[row] > stop]
        start, size = stop, WIDER * size
    return found
