"""Pack the tokens of a batch into one row: without padding, and with shared prefixes only once.

Two rows share a token if their ids are equal from the first token up to that token, at the same
positions. The computed tokens therefore form a tree. The packed row contains the tree depth first,
segment after segment. The tokens of a row from its first new token on form a segment; the tokens
before the segment are pieces of earlier segments. A query reads the pieces before its segment, and
its own segment up to itself. All of these tokens come earlier in the packed row, so the packed row
is causal like any other row.

Left padding is no part of a row, and a row's positions are counted without padding. Padding is not
computed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from streambp.attention.spans import QueryRun, Spans
from streambp.chunks import Forks

# minimum of shared tokens; with fewer, small attention blocks cost more than they save
MIN_SHARED_TOKENS = 64
# minimum savings, fraction of B * T tokens; ignores prefixes that are equal by chance
MIN_SAVED_FRACTION = 0.1
# overhead of a chunk in layers with states, in tokens; 38 and more on a CPU
CHUNK_OVERHEAD_TOKENS = 64
REASON_NOTHING_SHARED = (
    "a packed row saves too little: the last call's rows have no padding, and no beginning in "
    "common"
)
COMPARED_RANGE_GROWTH = 4  # growth of the compared range while rows match


@dataclasses.dataclass(frozen=True)
class PackedSpan:
    """Consecutive tokens [start, stop) of the packed row that are also consecutive in a row of the
    batch. The packed row contains the tokens of all rows, without padding, and tokens of shared
    prefixes only once.

    Attributes:
        row_start: index of the first token in the batch's row, counted without padding.
        start: index of the first token in the packed row.
        stop: index behind the last token in the packed row.
    """

    row_start: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class BatchRow:
    """The tokens of one row of the batch [B, T], as ranges of the packed row. The packed row
    contains the tokens of all rows, without padding, and tokens of shared prefixes only once.

    Attributes:
        column: the column of the row's first token in the batch, behind left padding.
        packed_spans: ranges of the packed row that together have all tokens of this row, first to
            last; () if the row is padding alone.
    """

    column: int
    packed_spans: tuple[PackedSpan, ...]

    @property
    def length(self) -> int:
        """Return the number of tokens of this row of the batch, without padding."""
        return sum(span.stop - span.start for span in self.packed_spans)


@dataclasses.dataclass(frozen=True)
class TreeSegment:
    """Consecutive tokens of the packed row that one batch row has and no earlier batch row shares.
    The packed row contains the batch's tokens, with tokens of shared prefixes only once.

    Attributes:
        row: index of the batch row.
        span: the range of these tokens.
        prefix_spans: ranges of the packed row with the batch row's tokens before the segment, first
            to last. Segments of earlier batch rows contain these tokens.
    """

    row: int
    span: PackedSpan
    prefix_spans: tuple[PackedSpan, ...]


@dataclasses.dataclass(frozen=True)
class PrefixTree:
    """The packed row for a batch [B, T]: without padding, and with tokens of shared prefixes only
    once. The rows form a tree with a branch at each first difference.

    A rotary embedding may depend on the highest position in a batch, which padding may have. The
    packed row then ends with an additional token at that position, outside of all batch rows.

    Args:
        width: the number of columns T of the batch, with padding.
        rows: the batch's rows, in order.
        segments: segments of the packed row, first to last. A segment has the tokens of one batch
            row that no earlier batch row shares. The segments contain all tokens but the additional
            token.
        extra_position: position of the additional token; None: there is none.
    """

    width: int
    rows: tuple[BatchRow, ...]
    segments: tuple[TreeSegment, ...]
    extra_position: float | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all rows, without padding, where tokens of a shared prefix
        count once. The additional token at `extra_position` is not counted."""
        return self.segments[-1].span.stop if self.segments else 0

    @property
    def length(self) -> int:
        """Return the number of tokens of the packed row, with the additional token at
        `extra_position` if there is one."""
        return self.tokens + (self.extra_position is not None)

    @property
    def tokens_of_rows(self) -> int:
        """Return the number of tokens of all rows, without padding. A token of a shared prefix
        counts once for each row that has it."""
        return sum(row.length for row in self.rows)

    @functools.cached_property
    def forks(self) -> Forks:
        """Return a pair (start, continued) for each segment of the packed row. `start` is the index
        of the segment's first token. `continued` is the index behind the token that precedes the
        segment in its batch row, or 0 if the segment begins its batch row. A segment has the tokens
        of one batch row that no earlier batch row shares. A layer with recurrent states starts the
        segment from the states at `continued`. The additional token at `extra_position` counts as a
        segment with `continued` 0."""
        pairs: list[tuple[int, int]] = []
        for segment in self.segments:
            continued = segment.prefix_spans[-1].stop if segment.prefix_spans else 0
            pairs.append((segment.span.start, continued))
        if self.extra_position is not None:
            pairs.append((self.tokens, 0))
        return tuple(pairs)

    @property
    def min_chunks(self) -> int:
        """Return the number of pieces into which the packed row is cut by the positions where rows
        branch or end. Layers with recurrent states need at least as many chunks."""
        return len({0, self.length, *itertools.chain.from_iterable(self.forks)}) - 1

    def padding(self) -> Iterator[tuple[int, int, int]]:
        """Yield (row index, start, stop) for each range of padding in the batch. The columns
        [start, stop) are before the first token of the row or behind its last token."""
        for index, row in enumerate(self.rows):
            for start, stop in ((0, row.column), (row.column + row.length, self.width)):
                if start < stop:
                    yield index, start, stop

    def token_positions(self, device: torch.device) -> Tensor:
        """Return indices [B, T]: the position in the packed row of each token of the batch. The
        index of padding is the packed row's length.

        Args:
            device: device of the result.
        """
        indices = torch.full((len(self.rows), self.width), self.length, device="cpu")
        for index, row in enumerate(self.rows):
            for span in row.packed_spans:
                start = row.column + span.row_start
                indices[index, start : start + span.stop - span.start] = torch.arange(
                    span.start, span.stop, device="cpu"
                )
        return indices.to(device)

    def pack(self, batch: Tensor) -> Tensor:
        """Return the values [1, N, ...] of the packed row's N tokens from values [B, T, ...] of the
        batch. The additional token at `extra_position` gets no value."""
        # gradients are stacked; the gradient of batch[row] would have the batch's size
        rows = batch.unbind()
        parts: list[Tensor] = []
        for segment in self.segments:
            start = self.rows[segment.row].column + segment.span.row_start
            size = segment.span.stop - segment.span.start
            parts.append(rows[segment.row][start : start + size])
        return torch.cat(parts)[None]

    def spans(self, window: int | None = None) -> Spans:
        """Return the keys that each query of the packed row reads, as ranges of queries with their
        ranges of keys.

        Args:
            window: number of a row's tokens that a query reads, including the query; None: all
                earlier tokens.
        """
        runs = [
            QueryRun(segment.span.start, segment.span.stop, segment.span.start)
            for segment in self.segments
        ]
        if self.extra_position is not None:
            runs.append(QueryRun(self.tokens, self.length, self.tokens))
        shared_runs = self._shared_runs() if window is None else self._shared_runs_within(window)
        return Spans(self.length, ((*runs, *shared_runs),), window)

    def _shared_runs(self) -> Iterator[QueryRun]:
        """Yield a `QueryRun` (a range of queries and the keys that they read) for each range of
        keys in earlier segments, for attention without a sliding window. A segment has the tokens
        of one batch row that no earlier batch row shares. Neighbouring segments that read the same
        keys get one `QueryRun` together."""
        edges: set[int] = set()
        for segment in self.segments:
            for span in segment.prefix_spans:
                edges.update((span.start, span.stop))
        sorted_edges = sorted(edges)
        readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for segment in self.segments:
            for span in segment.prefix_spans:
                inner_edges = [edge for edge in sorted_edges if span.start <= edge <= span.stop]
                for part in itertools.pairwise(inner_edges):
                    queries = readers.setdefault(part, [])
                    start = segment.span.start
                    if queries and queries[-1][1] == start:
                        start = queries.pop()[0]
                    queries.append((start, segment.span.stop))
        for (k0, k1), queries in sorted(readers.items()):
            for q0, q1 in queries:
                yield QueryRun(q0, q1, k0, k1)

    def _shared_runs_within(self, window: int) -> Iterator[QueryRun]:
        """Yield a `QueryRun` (a range of queries and the keys that they read) for each range of
        keys in earlier segments, for attention with a sliding window. A segment has the tokens of
        one batch row that no earlier batch row shares.

        Args:
            window: number of a row's tokens that a query reads, including the query.
        """
        for segment in self.segments:
            for prefix_span in segment.prefix_spans:
                shift = (segment.span.start - segment.span.row_start) - (
                    prefix_span.start - prefix_span.row_start
                )
                # end of the queries that read the piece
                last = min(segment.span.stop, prefix_span.stop - 1 + window + shift)
                if segment.span.start < last:
                    yield QueryRun(
                        segment.span.start, last, prefix_span.start, prefix_span.stop, shift
                    )


@dataclasses.dataclass(frozen=True)
class _RowTokens:
    """Place of one batch row's tokens, without padding, from which `find_tree` compares rows and
    packs their tokens.

    Attributes:
        column: the column of the first token, behind left padding.
        length: number of tokens.
        position: position_id of the first token. Rows share tokens only at equal positions.
    """

    column: int
    length: int
    position: float


def find_tree(
    ids: Tensor,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    labelled: Tensor | None = None,
    min_prefix: int = MIN_SHARED_TOKENS,
    min_savings: float = MIN_SAVED_FRACTION,
    fork_distance: int = 1,
    chunk_overhead: float = 0,
) -> PrefixTree | str:
    """Return the packed row for a batch [B, T], or the reason against it as text. The packed row
    contains the batch's tokens, without padding, and tokens of shared prefixes only once.

    The search waits for the device a few times for each row, because it reads values of the
    tensors.

    Args:
        ids: [B, T], integers that are equal for equal tokens.
        mask: [B, T], zero for padding; None: no padding.
        positions: position_ids [1 or B, T] or [axes, 1 or B, T], integers or floats. The first axis
            has text positions; three axes have none, and columns count as text positions. Rows
            share tokens at equal text positions. None: columns count as positions.
        labelled: [B, T] in bool, True for tokens whose output has a label. A batch in which padding
            has a label is not packed. None: no padding has a label.
        min_prefix: minimum number of tokens that rows share before they branch.
        min_savings: minimum savings, as a fraction of B * T tokens including padding.
        fork_distance: minimum number of tokens between two positions at which rows branch, and
            before a row's end. Rows may share a few tokens less for that reason.
        chunk_overhead: cost of one more chunk, as a number of tokens, if chunks must end wherever
            rows branch; 0: chunks may end anywhere.
    """
    rows_or_reason = _locate_rows(ids, mask, positions, labelled)
    if isinstance(rows_or_reason, str):
        return rows_or_reason
    row_tokens, furthest = rows_or_reason
    segments, rows = _build_segments(ids, row_tokens, min_prefix, fork_distance)
    tree = PrefixTree(ids.shape[1], rows, segments, furthest)
    if not tree.tokens:
        return "the last call's batch is padding alone"
    if tree.tokens == ids.numel():
        return REASON_NOTHING_SHARED
    chunk_costs = chunk_overhead * (tree.min_chunks - 1)
    if ids.numel() - tree.tokens - chunk_costs < max(min_savings * ids.numel(), 1):
        chunk_note = f", in {tree.min_chunks} chunks at least" if chunk_costs else ""
        return (
            f"a packed row saves too little: the last call's {ids.numel():,} tokens would be "
            f"{tree.tokens:,}{chunk_note}"
        )
    return tree


def _locate_rows(
    ids: Tensor, mask: Tensor | None, positions: Tensor | None, labelled: Tensor | None
) -> tuple[list[_RowTokens], float | None] | str:
    """Return the place of each row's tokens in the batch, from which `find_tree` builds the tree of
    shared prefixes. If a packed row is impossible, for example because padding separates tokens,
    return the reason as text.

    The second value is the highest position in the batch if only padding has this position, for
    `PrefixTree.extra_position`; None otherwise.

    Args:
        ids: [B, T], integers that are equal for equal tokens.
        mask: [B, T], zero for padding; None: no padding.
        positions: position_ids [1 or B, T] or [axes, 1 or B, T]; None: the columns.
        labelled: [B, T] in bool, True for tokens whose output has a label; None: no labels.
    """
    batch_size, width = ids.shape
    columns = torch.arange(width, device=ids.device)[None].expand(batch_size, -1)
    # [axes, B, T]
    axes = columns[None] if positions is None else positions.reshape(-1, *positions.shape[-2:])
    axes = axes.to(ids.device).expand(-1, batch_size, -1)
    positions = columns if len(axes) == 3 else axes[0]  # [B, T], text positions
    # [B, T]
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device) != 0
    first = real.int().argmax(1)
    last = width - 1 - real.flip(1).int().argmax(1)
    length = real.sum(1)
    both_real = real[:, 1:] & real[:, :-1]
    grows = ((positions[:, 1:] - positions[:, :-1] == 1) | ~both_real).all(1)
    scored = (
        torch.zeros_like(first) if labelled is None else (labelled.to(ids.device) & ~real).any(1)
    ).to(first.dtype)
    start = positions.gather(1, first[:, None])[:, 0]
    # [B] each: over all tokens, and without padding
    highest = (axes.amax((0, 2)), axes.amax(0).masked_fill(~real, -1).amax(1))
    counts = torch.stack([first, last - first + 1, length, grows.to(first.dtype), scored])
    # Positions may have a fraction, so the table is float64 then.
    placed = torch.stack([start, *highest])
    if placed.is_floating_point():
        counts = counts.to(torch.float64)
    table = torch.cat([counts, placed.to(counts.dtype)])
    rows = [(*map(int, row[:5]), *row[5:]) for row in table.T.tolist()]
    for index, (_, extent, tokens, steady, outside, *_) in enumerate(rows):
        if tokens and extent != tokens:
            return (
                f"the attention mask of the last call's row {index} leaves out tokens between "
                "others"
            )
        if not steady:
            return f"position_ids of the last call's row {index} do not grow by one"
        if outside:
            return f"padding of the last call's row {index} predicts a label"
    furthest, read = (max(row[at] for row in rows) for at in (6, 7))
    row_tokens = [_RowTokens(row[0], row[2], row[5]) for row in rows]
    if read in (furthest, -1):
        return row_tokens, None
    return row_tokens, furthest


def _build_segments(
    ids: Tensor, row_tokens: list[_RowTokens], min_prefix: int, fork_distance: int
) -> tuple[tuple[TreeSegment, ...], tuple[BatchRow, ...]]:
    """Return the segments of the packed row, in order, and each batch row's ranges of the packed
    row. A segment has the tokens of one batch row that no earlier batch row shares.

    Args:
        ids: [B, T], integers that are equal for equal tokens.
        row_tokens: the place of each row's tokens.
        min_prefix: minimum number of tokens that rows share before they branch.
        fork_distance: minimum number of tokens between two positions at which rows branch.
    """
    first_columns = [row.column for row in row_tokens]
    if any(first_columns):  # shift rows left to their first token
        firsts = torch.tensor(first_columns, device=ids.device)
        columns = (torch.arange(ids.shape[1], device=ids.device) + firsts[:, None]).clamp(
            max=ids.shape[1] - 1
        )
        ids = ids.gather(1, columns)
    # Group rows that share `min_prefix` tokens: most rows of most batches share nothing.
    starts = ids[:, :min_prefix].unique(dim=0, return_inverse=True)[1].tolist()
    groups: dict[tuple[float, ...], list[int]] = {}
    for index, (tokens_of_row, start) in enumerate(zip(row_tokens, starts, strict=True)):
        group: tuple[float, ...] = (index,)
        if tokens_of_row.length >= min_prefix:
            group = (tokens_of_row.position, start)
        groups.setdefault(group, []).append(index)
    # Groups of rows without pieces yet, and the pieces that each group shares.
    waiting: list[tuple[list[int], tuple[PackedSpan, ...]]] = []
    for rows in reversed(groups.values()):
        waiting.append((rows, ()))
    segments: list[TreeSegment] = []
    packed_spans: dict[int, tuple[PackedSpan, ...]] = {}
    end = 0
    while waiting:
        (pivot, *followers), prefix_spans = waiting.pop()
        depth = sum(packed_span.stop - packed_span.start for packed_span in prefix_spans)
        packed_spans[pivot] = prefix_spans
        if row_tokens[pivot].length > depth:
            span = PackedSpan(depth, end, end + row_tokens[pivot].length - depth)
            segments.append(TreeSegment(pivot, span, prefix_spans))
            packed_spans[pivot] = (*prefix_spans, span)
            end = span.stop
            if prefix_spans and prefix_spans[-1].stop == span.start:  # adjacent in the packed row
                packed_spans[pivot] = (
                    *prefix_spans[:-1],
                    PackedSpan(prefix_spans[-1].row_start, prefix_spans[-1].start, span.stop),
                )
        common = _shared_lengths(
            ids, pivot, followers, depth, [row.length for row in row_tokens], min_prefix
        )
        for row, at in common.items():
            # a row that ends at the branch has no own segment
            if fork_distance > 1 and at != row_tokens[row].length:
                at = min(
                    at,
                    row_tokens[row].length - fork_distance,
                    row_tokens[pivot].length - fork_distance,
                )
                common[row] = at - at % fork_distance
        short_matches = [row for row in followers if common[row] - depth < min_prefix]
        if short_matches:
            waiting.append((short_matches, prefix_spans))
        # the stack pops the longest first
        for at in sorted({at for at in common.values() if at - depth >= min_prefix}):
            path: list[PackedSpan] = []
            for packed_span in packed_spans[pivot]:
                if packed_span.row_start < at:
                    stop = min(packed_span.stop, packed_span.start + at - packed_span.row_start)
                    path.append(PackedSpan(packed_span.row_start, packed_span.start, stop))
            waiting.append(([row for row in followers if common[row] == at], tuple(path)))
    return tuple(segments), tuple(
        BatchRow(row.column, packed_spans[index]) for index, row in enumerate(row_tokens)
    )


def _shared_lengths(
    ids: Tensor, pivot: int, rows: list[int], depth: int, lengths: list[int], first_size: int
) -> dict[int, int]:
    """Return a dict from the index of each of `rows` to the number of its first tokens that equal
    those of the row `pivot`. The packed row has equal tokens once, among the tokens of `pivot`.

    The first comparison covers a few tokens, and each later one more tokens of the rows that still
    match. Rows that differ early therefore cost little.

    Args:
        ids: [B, T], integers that are equal for equal tokens; rows begin at column 0.
        pivot: index of the row to compare with.
        rows: indices of the other rows.
        depth: number of first tokens that are known to be equal in all of these rows.
        lengths: number of tokens of each row.
        first_size: number of tokens in the first comparison.
    """
    equal_tokens = {row: min(lengths[row], lengths[pivot]) for row in rows}
    matching_rows = rows
    start = depth
    size = max(first_size, 1)
    while matching_rows and start < lengths[pivot]:
        stop = min(start + size, lengths[pivot])
        differs = ids[matching_rows, start:stop] != ids[pivot, start:stop]  # [rows, tokens]
        table = torch.stack([differs.any(1).to(torch.long), differs.int().argmax(1)]).tolist()
        matching: list[int] = []
        for row, parts, at in zip(matching_rows, *table, strict=True):
            if parts:
                equal_tokens[row] = min(equal_tokens[row], start + at)
            elif equal_tokens[row] > stop:
                matching.append(row)
        matching_rows = matching
        start = stop
        size = COMPARED_RANGE_GROWTH * size
    return equal_tokens
