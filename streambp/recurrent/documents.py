"""Where the documents of packed rows start, as layers with states are told.

transformers hands two arguments on to the kernels: seq_idx [B, T], the document of each token, to convolutions and to
Mamba 2's scan, and cu_seq_lens_q [documents + 1], where the documents of a single row end, to the delta rules. Attention
has its own way (`attention/masks.py`). In a chunk each function is told what belongs to the tokens that it gets:

    a convolution      seq_idx of the chunk and of the tokens before it that its cache has put in front
    a scan             seq_idx counted from the document of the token before the chunk: a start state is document 0's
    a delta rule       cu_seqlens of the chunk, and a start state for each document: the chunk's for the first, if that goes
                       on from before, and zero for the others; the last one's end state is the chunk's

[Note: documents] A function is told what its mixer tells it, no more. What takes neither argument mixes documents, in
chunks as unpatched, so that whether a start state is dropped where a document starts is decided here, by function, and not
where states are kept.
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

from streambp.chunks import Barrier, Chunk, merged
from streambp.known_names import CONVOLUTION, CONVOLUTION_STATE, DELTA_RULE, DOCUMENT_ENDS, DOCUMENT_IDS, STATE_SCAN
from streambp.source import written_forward

TRIED = (3, 5, 6)  # where the probe's documents end: within a chunk, with it, after one token, and over several chunks


class Documents:
    """The documents of one call.

    Args:
        ids: [B, T] int32, the document of each token, rising along a row; None: not told.
        ends: [documents + 1] int32 from 0 to T, of a batch of one row; None: not told.
        known: the values of `ends`; None: they are read, which waits for the device.
    """

    def __init__(self, ids: Tensor | None, ends: Tensor | None, known: tuple[int, ...] | None = None) -> None:
        self.ids, self._ends = ids, ends
        self.ends = () if ends is None else tuple(ends.tolist()) if known is None else known
        self._cut: dict[Chunk, Tensor] = {}

    @property
    def arguments(self) -> dict[str, Tensor]:
        """By name, for a layer that is not given them: seq_idx [B, T], cu_seq_lens_q [documents + 1]."""
        return {name: value for name, value in ((DOCUMENT_IDS, self.ids), (DOCUMENT_ENDS, self._ends)) if value is not None}

    def within(self, chunk: Chunk) -> dict[str, Tensor]:
        """Arguments that a chunk's are replaced by: where its own documents end, [documents + 1]."""
        if self._ends is None:
            return {}
        if chunk not in self._cut:  # one tensor for all passes: fla keeps what it derives from it
            inside = [end - chunk.start for end in self.ends if chunk.start < end < chunk.stop]
            ends = [0, *inside, chunk.stop - chunk.start]
            self._cut[chunk] = torch.tensor(ends, dtype=self._ends.dtype, device=self._ends.device)
        return {DOCUMENT_ENDS: self._cut[chunk]}

    def goes_on(self, chunk: Chunk) -> bool:
        """Whether the chunk starts within a document."""
        return chunk.start not in self.ends


class Segment(NamedTuple):
    """Tokens `[start, stop)` of a chunk that belong to one document in each of these rows.

    goes_on: the document starts before the chunk.
    """

    rows: tuple[int, ...]
    start: int
    stop: int
    goes_on: bool


@dataclasses.dataclass(eq=False)
class PackedRows:
    """The documents of packed rows, read off position_ids.

    ends: where documents end, of each row; rising from 0 to the row's length.
    """

    ends: tuple[tuple[int, ...], ...]
    _documents: dict[tuple[str, ...], Documents] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """Where no chunk may end: one token of a document would be left to the next chunk. For one token on top of a state
        mixers take decode kernels, which have no backward."""
        rows = [(set(row), row[1:]) for row in self.ends]
        return merged(Barrier(end - 1, end - 1) for known, ends in rows for end in ends if end - 1 not in known)

    @property
    def number(self) -> int:
        """How many documents there are."""
        return sum(len(row) - 1 for row in self.ends)

    def as_documents(self, names: tuple[str, ...], device: torch.device) -> Documents:
        """The same for kernels, by the arguments of these names; one object for all layers of a forward."""
        if names not in self._documents:
            length = self.ends[0][-1]
            ids = torch.zeros(len(self.ends), length, dtype=torch.int32, device="cpu")  # [B, T]
            for row, ends in enumerate(self.ends):
                ids[row, list(ends[1:-1])] = 1
            of_tokens = ids.cumsum(-1, dtype=torch.int32).to(device)
            known = self.ends[0] if DOCUMENT_ENDS in names else None
            of_row = None if known is None else torch.tensor(known, dtype=torch.int32, device=device)
            self._documents[names] = Documents(of_tokens if DOCUMENT_IDS in names else None, of_row, known)
        return self._documents[names]

    def segments(self, chunk: Chunk) -> list[Segment]:
        """The chunk's tokens by document, those of a row in their order."""
        found: dict[tuple[int, int, bool], list[int]] = {}
        for row, ends in enumerate(self.ends):
            before, behind = bisect.bisect_left(ends, chunk.start), bisect.bisect_left(ends, chunk.stop)
            starts = ends[before] == chunk.start
            edges = (chunk.start, *ends[before + starts : behind], chunk.stop)
            for start, stop in itertools.pairwise(edges):
                goes_on = start == chunk.start and not starts
                found.setdefault((start - chunk.start, stop - chunk.start, goes_on), []).append(row)
        return [Segment(tuple(rows), *where) for where, rows in found.items()]


def packed_rows(position_ids: Tensor, rows: int) -> PackedRows | None:
    """The documents that position_ids [1 or rows, T] mark where they do not grow by one, transformers' own rule for
    attention's mask; None if each row is one document. Waits for the device."""
    breaks = (position_ids.diff(dim=-1) != 1).cpu()  # [1 or rows, T - 1]
    if not bool(breaks.any()):
        return None
    length = position_ids.shape[-1]
    ends = tuple((0, *(row.nonzero().flatten() + 1).tolist(), length) for row in breaks)
    return PackedRows(ends * (rows // len(ends)))


def in_one(named: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments of a layer that tell of documents, for rows of one document each: seq_idx [B, T], cu_seq_lens_q [2]."""
    changed = {}
    if named.get(DOCUMENT_IDS) is not None:
        changed[DOCUMENT_IDS] = torch.zeros_like(named[DOCUMENT_IDS])
    if named.get(DOCUMENT_ENDS) is not None:
        changed[DOCUMENT_ENDS] = named[DOCUMENT_ENDS][[0, -1]]
    return changed


def in_several(named: Mapping[str, Any], length: int) -> dict[str, Tensor]:
    """Those arguments for rows whose first `length` tokens are several documents, other ones in every second row:
    seq_idx [B, T], cu_seq_lens_q [documents + 1]."""
    changed = {}
    inside = [end for end in TRIED if end < length]
    if named.get(DOCUMENT_IDS) is not None:
        ids = named[DOCUMENT_IDS]  # [B, T]
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None] % 2
        tokens = torch.arange(ids.shape[-1], device=ids.device) + rows
        ends = torch.tensor(inside, device=ids.device, dtype=tokens.dtype)
        changed[DOCUMENT_IDS] = torch.bucketize(tokens, ends, right=True).to(ids.dtype)
    if named.get(DOCUMENT_ENDS) is not None:
        changed[DOCUMENT_ENDS] = named[DOCUMENT_ENDS].new_tensor([0, *inside, length])
    return changed


def tried_rows(rows: int, length: int) -> PackedRows:
    """The same for the probe's rows of `length` tokens: several documents, other ones in every second row."""
    return PackedRows(tuple((0, *(end - row % 2 for end in TRIED if end < length), length) for row in range(rows)))


Function = Callable[..., Any]


def document_readers(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules of a layer whose forward calls functions that can be told of documents, each with the global's name."""
    found = []
    for module in layer.modules():
        forward = written_forward(module)
        for name in forward.__code__.co_names if hasattr(forward, "__code__") else ():
            if kind_of(forward.__globals__.get(name)) is not None:
                found.append((module, name))
    return found


def telling(function: Function, documents: Documents, chunk: Chunk) -> Function:
    """The function as a chunk calls it. [Note: documents]"""
    tell = {"rule": _tell_rule, "scan": _tell_scan, "conv": _tell_convolution}[kind_of(function) or ""]
    return functools.partial(tell, function, documents, chunk)


def parameters_of(function: Any) -> set[str]:
    """A function's parameters; {} of anything else. With the kernels package functions are modules."""
    function = function.forward if isinstance(function, nn.Module) else function
    if not callable(function) or isinstance(function, type):
        return set()
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def kind_of(function: Any) -> str | None:
    """Which of a mixer's work across tokens a function does that can be told of documents, known by its parameters."""
    parameters = parameters_of(function)
    if parameters >= DELTA_RULE:
        return "rule"
    if parameters >= STATE_SCAN:
        return "scan"
    return "conv" if parameters >= CONVOLUTION and CONVOLUTION_STATE not in parameters else None


def _tell_convolution(real: Function, documents: Documents, chunk: Chunk, /, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """x [B, D, k + C]"""
    if kwargs.get(DOCUMENT_IDS) is not None and documents.ids is not None:
        kwargs[DOCUMENT_IDS] = documents.ids[:, chunk.stop - x.shape[-1] : chunk.stop].contiguous()  # [B, k + C]
    return real(x, *args, **kwargs)


def _tell_scan(real: Function, documents: Documents, chunk: Chunk, /, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get(DOCUMENT_IDS) is not None and documents.ids is not None and chunk.start:
        own, before = documents.ids[:, chunk.start : chunk.stop], documents.ids[:, chunk.start - 1 : chunk.start]
        kwargs[DOCUMENT_IDS] = own - before  # [B, C]
    return real(*args, **kwargs)


def _tell_rule(real: Function, documents: Documents, chunk: Chunk, /, *args: Any, **kwargs: Any) -> Any:
    ends, state = kwargs.get("cu_seqlens"), kwargs.get("initial_state")  # [N + 1], [1, H, K, V]
    if ends is None:
        return real(*args, **kwargs)
    if state is not None:
        others = state.new_zeros((len(ends) - 2, *state.shape[1:]))  # [N - 1, H, K, V]
        kwargs["initial_state"] = torch.cat((state, others)) if documents.goes_on(chunk) else None
    out, end = real(*args, **kwargs)
    return out, None if end is None else end[-1:]
