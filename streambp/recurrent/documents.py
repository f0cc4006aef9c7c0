"""Document boundaries of packed rows, in the form that kernels of layers with states expect.

The kernels get two arguments from transformers. Convolutions and Mamba 2's scan get seq_idx [B, T],
the document of each token. The delta rules get cu_seq_lens_q [documents + 1], the document ends of
a single row. Attention has its own form (`attention/masks.py`). A function gets the values for the
tokens of its own input:

    a convolution      seq_idx of the chunk and of the earlier tokens that its cache has prepended
    a scan             seq_idx minus the document of the token before the chunk: the start state
                       belongs to document 0
    a delta rule       cu_seqlens of the chunk, and a start state for each document: the chunk's for
                       a first document that began before the chunk, zeros for every other document;
                       the end state of the last document is the chunk's end state

Each function gets document boundaries only if its mixer passes them unpatched. A function without
such an argument mixes documents, in chunks as unpatched. The choice to drop a start state at a
document start is therefore made here, for each function, and not where states are stored.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from streambp.chunks import Barrier, Chunk, merge_barriers
from streambp.known_names import (
    CONVOLUTION,
    CONVOLUTION_STATE,
    DELTA_RULE,
    DOCUMENT_ENDS,
    DOCUMENT_IDS,
    STATE_SCAN,
)
from streambp.source import written_forward

# Document ends in the probe: inside a chunk and at a chunk's end; one document is a single token,
# and one is longer than a chunk.
TRIAL_DOCUMENT_ENDS = (3, 5, 6)


class Documents:
    """Boundaries of packed documents in one call of a layer, as arguments for the kernels of layers
    with recurrent states. Packed documents are several texts in one row.

    Args:
        ids: seq_idx [B, T] int32, the document of each token, increasing along a row; None: no such
            argument.
        ends: cu_seq_lens_q [documents + 1] int32, from 0 to T, for a batch of one row; None: no
            such argument.
        known_ends: the values of `ends` as integers; None: read the values from the device, which
            synchronizes.
    """

    def __init__(
        self, ids: Tensor | None, ends: Tensor | None, known_ends: tuple[int, ...] | None = None
    ) -> None:
        self.ids = ids
        self._ends = ends
        self.ends: tuple[int, ...] = ()
        if ends is not None:
            self.ends = tuple(ends.tolist()) if known_ends is None else known_ends
        self._cut: dict[Chunk, Tensor] = {}

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Return a dict with the arguments seq_idx [B, T] and cu_seq_lens_q [documents + 1] for the
        full sequence; an argument that the call does not have is left out."""
        arguments: dict[str, Tensor] = {}
        if self.ids is not None:
            arguments[DOCUMENT_IDS] = self.ids
        if self._ends is not None:
            arguments[DOCUMENT_ENDS] = self._ends
        return arguments

    def kernel_arguments(self, chunk: Chunk) -> dict[str, Tensor]:
        """Return the argument cu_seq_lens_q of kernels, by name, for one chunk.

        Args:
            chunk: the chunk's range of positions.

        Returns:
            The boundaries of the documents inside the chunk, [documents + 1], counted from the
            chunk's start: from 0 to the chunk's length. {} if the call has no such argument.
        """
        if self._ends is None:
            return {}
        # One tensor for all passes, because fla caches values derived from this tensor.
        if chunk not in self._cut:
            inner_ends = [end - chunk.start for end in self.ends if chunk.start < end < chunk.stop]
            ends = [0, *inner_ends, chunk.stop - chunk.start]
            self._cut[chunk] = torch.tensor(ends, dtype=self._ends.dtype, device=self._ends.device)
        return {DOCUMENT_ENDS: self._cut[chunk]}

    def continues_document(self, chunk: Chunk) -> bool:
        """True if the chunk's first token belongs to a document that begins in an earlier chunk.
        This document goes on from the state at the chunk's start. A document that begins in the
        chunk starts from zeros."""
        return chunk.start not in self.ends


class DocumentSegment(NamedTuple):
    """A range of tokens in a chunk that belong to one document. Rows whose documents have the same
    boundaries in this chunk share a segment.

    Attributes:
        rows: indices of the batch's rows that share the segment.
        start: first token, counted from the chunk's start.
        stop: index behind the last token, counted from the chunk's start.
        continues_document: True if the document begins before the chunk, so that it starts from the
            chunk's start states.
    """

    rows: tuple[int, ...]
    start: int
    stop: int
    continues_document: bool


@dataclasses.dataclass(eq=False)
class PackedRows:
    """Boundaries of the documents in packed rows, read from position_ids.

    Attributes:
        ends: a tuple per row: 0, and then the position behind each document's last token. The final
            position is the row's length.
    """

    ends: tuple[tuple[int, ...], ...]
    _documents: dict[tuple[str, ...], Documents] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """Return the positions where no chunk may end: one token before a document's end.

        The next chunk would have a single token of the document. Modules with recurrent states use
        decode kernels for a single token, and these kernels have no backward.
        """
        barriers: list[Barrier] = []
        for row in self.ends:
            ends = set(row)
            for end in row[1:]:
                if end - 1 not in ends:
                    barriers.append(Barrier(end - 1, end - 1))
        return merge_barriers(barriers)

    @property
    def number(self) -> int:
        """Return the number of documents in all rows, for the report of `streambp.describe` and for
        error messages."""
        return sum(len(row) - 1 for row in self.ends)

    def to_documents(self, names: tuple[str, ...], device: torch.device) -> Documents:
        """Return these boundaries in the form of kernel arguments. The result is cached for these
        `names`, because all layers use the same boundaries.

        Args:
            names: names of the arguments: "seq_idx", "cu_seq_lens_q" or both.
            device: device of the arguments.
        """
        if names not in self._documents:
            length = self.ends[0][-1]
            ids = torch.zeros(len(self.ends), length, dtype=torch.int32, device="cpu")  # [B, T]
            for row, ends in enumerate(self.ends):
                ids[row, list(ends[1:-1])] = 1
            of_tokens: Tensor | None = ids.cumsum(-1, dtype=torch.int32).to(device)
            if DOCUMENT_IDS not in names:
                of_tokens = None
            ends_of_row: tuple[int, ...] | None = None
            of_row: Tensor | None = None
            if DOCUMENT_ENDS in names:
                ends_of_row = self.ends[0]
                of_row = torch.tensor(ends_of_row, dtype=torch.int32, device=device)
            self._documents[names] = Documents(of_tokens, of_row, ends_of_row)
        return self._documents[names]

    def segments(self, chunk: Chunk) -> list[DocumentSegment]:
        """Return the chunk's tokens split by document, as one `DocumentSegment` for each range of
        tokens. Rows whose documents have the same boundaries in the chunk share a
        `DocumentSegment`."""
        rows_by_range: dict[tuple[int, int, bool], list[int]] = {}
        for row, ends in enumerate(self.ends):
            first = bisect.bisect_left(ends, chunk.start)
            stop_index = bisect.bisect_left(ends, chunk.stop)
            starts = ends[first] == chunk.start
            edges = (chunk.start, *ends[first + starts : stop_index], chunk.stop)
            for start, stop in itertools.pairwise(edges):
                goes_on = start == chunk.start and not starts
                rows_by_range.setdefault(
                    (start - chunk.start, stop - chunk.start, goes_on), []
                ).append(row)
        return [DocumentSegment(tuple(rows), *where) for where, rows in rows_by_range.items()]


def packed_rows(position_ids: Tensor, rows: int) -> PackedRows | None:
    """Return the boundaries of packed documents, read from position_ids [1 or rows, T]; None if
    each row is one document. Synchronizes with the device.

    A document starts at every token with a position id that is not the previous id plus one, as in
    transformers' attention mask.
    """
    breaks = (position_ids.diff(dim=-1) != 1).cpu()  # [1 or rows, T - 1]
    if not bool(breaks.any()):
        return None
    length = position_ids.shape[-1]
    ends = tuple((0, *(row.nonzero().flatten() + 1).tolist(), length) for row in breaks)
    return PackedRows(ends * (rows // len(ends)))


def join_documents(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return replacements for a layer's document arguments, by name, with which each row is one
    document: seq_idx [B, T], cu_seq_lens_q [2]. Missing arguments are left out.

    A layer's first call uses these arguments in test runs, which decide if the layer can run in
    chunks.

    Args:
        arguments: the layer's arguments by name.
    """
    replacements = {}
    if arguments.get(DOCUMENT_IDS) is not None:
        replacements[DOCUMENT_IDS] = torch.zeros_like(arguments[DOCUMENT_IDS])
    if arguments.get(DOCUMENT_ENDS) is not None:
        replacements[DOCUMENT_ENDS] = arguments[DOCUMENT_ENDS][[0, -1]]
    return replacements


def split_documents(arguments: Mapping[str, Any], length: int) -> dict[str, Tensor]:
    """Return replacements for a layer's document arguments, by name, with which each row has
    several short documents: seq_idx [B, T], cu_seq_lens_q [documents + 1]. Every second row of
    seq_idx has other boundaries. Missing arguments are left out.

    A layer's first call uses these arguments in test runs, which decide if the layer can run in
    chunks.

    Args:
        arguments: the layer's arguments by name.
        length: number of tokens of the test run.
    """
    replacements = {}
    inner_ends = [end for end in TRIAL_DOCUMENT_ENDS if end < length]
    if arguments.get(DOCUMENT_IDS) is not None:
        ids = arguments[DOCUMENT_IDS]  # [B, T]
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None] % 2
        tokens = torch.arange(ids.shape[-1], device=ids.device) + rows
        ends = torch.tensor(inner_ends, device=ids.device, dtype=tokens.dtype)
        replacements[DOCUMENT_IDS] = torch.bucketize(tokens, ends, right=True).to(ids.dtype)
    if arguments.get(DOCUMENT_ENDS) is not None:
        replacements[DOCUMENT_ENDS] = arguments[DOCUMENT_ENDS].new_tensor([0, *inner_ends, length])
    return replacements


def trial_rows(rows: int, length: int) -> PackedRows:
    """Return boundaries of several short documents for `rows` rows of `length` tokens. Every second
    row has other boundaries. A layer's first call uses these boundaries in test runs, which decide
    if the layer can run in chunks."""
    ends: list[tuple[int, ...]] = []
    for row in range(rows):
        inner_ends = [end - row % 2 for end in TRIAL_DOCUMENT_ENDS if end < length]
        ends.append((0, *inner_ends, length))
    return PackedRows(tuple(ends))


KernelFunction = Callable[..., Any]


def document_readers(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return pairs (module, name) for each function in a layer that accepts document boundaries: a
    convolution, a state-space scan or a delta rule. The module's forward calls the function through
    the global `name`. `wrap_kernel` makes a replacement of the function for each chunk."""
    readers = []
    for module in layer.modules():
        forward = written_forward(module)
        for name in forward.__code__.co_names if hasattr(forward, "__code__") else ():
            if kind_of(forward.__globals__.get(name)) is not None:
                readers.append((module, name))
    return readers


def wrap_kernel(function: KernelFunction, documents: Documents, chunk: Chunk) -> KernelFunction:
    """Return a wrapper of a kernel, which passes the document boundaries of this chunk's tokens to
    every call. The wrapper replaces the kernel while the layer runs on the chunk, because the layer
    itself would pass the boundaries of the full sequence.

    Args:
        function: the kernel: a convolution, a state-space scan or a delta rule.
        documents: the document boundaries of the full sequence.
        chunk: the chunk's range of positions.
    """
    tell = {"rule": _tell_rule, "scan": _tell_scan, "conv": _tell_convolution}[
        kind_of(function) or ""
    ]
    return functools.partial(tell, function, documents, chunk)


def parameters_of(function: Any) -> set[str]:
    """Return the names of the parameters of a function, or of a module's forward. Kernels that
    accept document boundaries are recognized by these names. The set is empty for other objects."""
    if isinstance(function, nn.Module):
        function = function.forward
    if not callable(function) or isinstance(function, type):
        return set()
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def kind_of(function: Any) -> str | None:
    """Return "rule" for a delta rule, "scan" for a state-space scan or "conv" for a convolution, if
    `function` accepts document boundaries. The names of its parameters show this. Return None for
    any other function."""
    parameters = parameters_of(function)
    if parameters >= DELTA_RULE:
        return "rule"
    if parameters >= STATE_SCAN:
        return "scan"
    if parameters >= CONVOLUTION and CONVOLUTION_STATE not in parameters:
        return "conv"
    return None


def _tell_convolution(
    real: KernelFunction,
    documents: Documents,
    chunk: Chunk,
    /,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the convolution `real` on x [B, D, k + C], the chunk and k tokens before it, and return
    its result. A call with seq_idx gets the document of each of these tokens as seq_idx.

    Args:
        real: the original function.
        documents: the document boundaries of the full sequence.
        chunk: the chunk's range of positions.
        x: the function's first argument.
        args, kwargs: further arguments of the function.
    """
    if kwargs.get(DOCUMENT_IDS) is not None and documents.ids is not None:
        kwargs[DOCUMENT_IDS] = documents.ids[
            :, chunk.stop - x.shape[-1] : chunk.stop
        ].contiguous()  # [B, k + C]
    return real(x, *args, **kwargs)


def _tell_scan(
    real: KernelFunction, documents: Documents, chunk: Chunk, /, *args: Any, **kwargs: Any
) -> Any:
    """Call the scan `real` with the document of each of the chunk's tokens, seq_idx [B, C]. A scan
    applies its start state to document 0, so documents are numbered from the document of the token
    before the chunk.

    Args:
        real: the original function.
        documents: the document boundaries of the full sequence.
        chunk: the chunk's range of positions.
        args, kwargs: arguments of the function.
    """
    if kwargs.get(DOCUMENT_IDS) is not None and documents.ids is not None and chunk.start:
        ids = documents.ids[:, chunk.start : chunk.stop]
        id_before = documents.ids[:, chunk.start - 1 : chunk.start]
        kwargs[DOCUMENT_IDS] = ids - id_before  # [B, C]
    return real(*args, **kwargs)


def _tell_rule(
    real: KernelFunction, documents: Documents, chunk: Chunk, /, *args: Any, **kwargs: Any
) -> Any:
    """Call the delta rule `real` with one start state for each of the chunk's N documents, [N, H,
    K, V]. Return its output, and the end state of the last document, [1, H, K, V].

    The chunk's start state is for a first document that began before the chunk; all other documents
    start from zeros.

    Args:
        real: the original function.
        documents: the document boundaries of the full sequence.
        chunk: the chunk's range of positions.
        args, kwargs: arguments of the function.
    """
    # [N + 1], [1, H, K, V]
    ends = kwargs.get("cu_seqlens")
    state = kwargs.get("initial_state")
    if ends is None:
        return real(*args, **kwargs)
    if state is not None:
        zero_states = state.new_zeros((len(ends) - 2, *state.shape[1:]))  # [N - 1, H, K, V]
        kwargs["initial_state"] = None
        if documents.continues_document(chunk):
            kwargs["initial_state"] = torch.cat((state, zero_states))
    out, end = real(*args, **kwargs)
    if end is not None:
        end = end[-1:]
    return out, end
