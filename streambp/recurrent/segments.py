"""Call a mixer once for each document of packed rows.

[Note: segments] A document starts without a state, like a row. The mixer, the module that reads
states from the cache, is therefore called with the tokens of one document at a time. The tokens mix
within the document only, for every kernel of the mixer and every argument of the kernels. The rest
of the layer (norms, MLPs, attention) gets all tokens of a chunk at once.

    a first document that began before the chunk     starts from the chunk's start states
    every other document                             starts without states
    the last document                                ends with the chunk's end states

Rows of a batch may have different documents. Rows whose documents start and end alike share a call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from streambp.errors import UnsupportedModelError
from streambp.known_names import (
    CONV_UPDATE,
    DOCUMENT_ENDS,
    DOCUMENT_IDS,
    LINEAR_CACHE,
    OWN_SCAN,
    RECURRENT_UPDATE,
    STATE_PROTOCOL,
)
from streambp.recurrent.documents import DocumentSegment, kind_of
from streambp.recurrent.scans import ReplacedFunctions, is_torch_code, scans_of, use_start_states
from streambp.recurrent.states import StateCache, States
from streambp.source import undecorate, written_forward
from streambp.tensors import rebuild

SegmentResult = tuple[
    DocumentSegment, Any, States
]  # a segment, the mixer's result for it, and the end states


def mixers_of(layer: nn.Module) -> list[nn.Module]:
    """Return the outermost modules inside a layer that mix tokens by recurrent or convolution
    states."""
    waiting = list(layer.children())
    mixers: list[nn.Module] = []
    while waiting:
        module = waiting.pop(0)
        has_scan = any(OWN_SCAN in _names(child) for child in module.children())
        if has_scan or set(STATE_PROTOCOL) & _names(module):
            mixers.append(module)
        else:
            waiting += module.children()
    return mixers


def _names(module: nn.Module) -> set[str]:
    """Return the names of all globals and attributes that the code of a module's methods mentions.
    If the names include methods of a cache or functions that scan, the module has recurrent or
    convolution states. The methods are those of its class and of the base classes below
    nn.Module."""
    names: set[str] = set()
    for klass in type(module).__mro__:
        if klass is nn.Module:
            break
        for value in vars(klass).values():
            code = getattr(undecorate(value), "__code__", None) if callable(value) else None
            if code is not None:
                names.update(code.co_names)
    return names


def document_arguments(mixers: list[nn.Module], rows: int) -> tuple[str, ...]:
    """Return the names of the arguments (seq_idx, cu_seq_lens_q) by which all kernels of these
    modules get document boundaries.

    The tuple is empty if a kernel takes no boundaries, or is replaced by transformers' own torch
    code. The modules then run once for each document.

    Args:
        mixers: modules with states, from `mixers_of`.
        rows: number of rows in the batch.
    """
    accepted: set[str] = set()
    for mixer in mixers:
        forward = written_forward(mixer)
        names = _names(mixer)
        if not hasattr(forward, "__code__") or names & {LINEAR_CACHE, OWN_SCAN}:
            return ()
        code = forward.__code__
        kinds: set[str | None] = set()
        for name in code.co_names:
            function = forward.__globals__.get(name)
            if callable(function) and not is_torch_code(function):
                kinds.add(kind_of(function))
        passes_on = bool(code.co_flags & inspect.CO_VARKEYWORDS)
        if CONV_UPDATE in names and not ("conv" in kinds and passes_on):
            return ()
        if RECURRENT_UPDATE in names:
            rule = "rule" in kinds and DOCUMENT_ENDS in code.co_consts and rows == 1
            if not rule and not ("scan" in kinds and passes_on):
                return ()
            accepted.add(DOCUMENT_ENDS if rule else DOCUMENT_IDS)
        accepted.add(DOCUMENT_IDS)
    return tuple(name for name in (DOCUMENT_IDS, DOCUMENT_ENDS) if name in accepted)


def run_by_segment(
    mixers: list[nn.Module], segments: list[DocumentSegment], cache: StateCache | None
) -> ReplacedFunctions:
    """Return a context manager in which each of these modules, called with a chunk, runs once for
    each document in the chunk. A document that begins in the chunk starts without states.

    Args:
        mixers: modules with states, from `mixers_of`.
        segments: the chunk's tokens split by document; []: nothing is replaced.
        cache: contains the chunk's start states and collects its end states; None: the layer gets
            no cache.
    """
    if not segments:
        return ReplacedFunctions([])
    by_segment: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    for module in mixers:
        forward = functools.partial(
            _run_segments, module, module.forward, scans_of(module), segments, cache
        )
        by_segment.append((module, "forward", forward))
    return ReplacedFunctions(by_segment)


def _run_segments(
    module: nn.Module,
    real: Callable[..., Any],
    scans: list[tuple[nn.Module, str]],
    segments: list[DocumentSegment],
    cache: StateCache | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the forward of a module with states on one chunk, document by document, and return the
    joined outputs [B, C, ...]. [Note: segments]

    Args:
        module: the module.
        real: the module's forward before this replacement, which takes hidden states [B, C, h].
        scans: pairs (module, name) from `scans_of`. The function `name`, which takes no start
            state, is replaced in each run by a function that starts from the document's states.
        segments: the chunk's tokens split by document.
        cache: contains the chunk's start states and collects its end states; None: the layer gets
            no cache.
    """
    layer_input = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    rows, tokens = layer_input.shape[:2]
    parts: list[SegmentResult] = []
    for segment in segments:
        segment_cache = None
        if cache is not None:
            start_states = cache.start_states if segment.continues_document else {}
            start_states = {
                key: _select_rows(state, segment.rows, rows) for key, state in start_states.items()
            }
            segment_cache = StateCache(cache.start + segment.start, start_states)
        slice_value = functools.partial(_cut, segment, rows, tokens)
        handed: list[Any] = []
        for value in (*args, *kwargs.values()):
            if value is cache and segment_cache is not None:
                handed.append(segment_cache)
            else:
                handed.append(rebuild(value, slice_value))
        wrapper = module.__dict__["forward"]
        with use_start_states(scans, segment_cache):
            current = module.__dict__["forward"]
            forward = real if current is wrapper else current
            result = forward(
                *handed[: len(args)], **dict(zip(kwargs, handed[len(args) :], strict=True))
            )
        parts.append((segment, result, {} if segment_cache is None else segment_cache.end_states))
    if cache is not None:
        cache.end_states.update(_end_states(parts, rows, tokens))
    results = [result for _, result, _ in parts]
    if all(isinstance(result, Tensor) for result in results):
        joined = _join_tokens(segments, results, rows)
        if joined is not None:
            return joined
    elif all(isinstance(result, tuple) and isinstance(result[0], Tensor) for result in results):
        # An output without a token dimension is a state, which nobody requested.
        outputs = [
            _join_tokens(segments, list(column), rows) for column in zip(*results, strict=True)
        ]
        if outputs[0] is not None:
            return tuple(outputs)
    raise UnsupportedModelError(
        f"{type(module).__name__} is called for each document of packed rows, and returns no "
        "tensors [B, T, ...] that could be joined. Pass one document per row, or set "
        "StreamConfig(documents='as_given') to carry states over, as the unpatched model does."
    )


def _cut(segment: DocumentSegment, rows: int, tokens: int, x: Tensor) -> Tensor:
    """Return the part of a chunk's argument x [1 or rows, tokens, ...] for one document: the
    segment's rows and tokens. An argument of another shape is returned unchanged.

    Args:
        segment: the document's range of tokens, and its rows.
        rows: batch size.
        tokens: number of the chunk's tokens.
        x: the argument.
    """
    if x.dim() < 2 or x.shape[1] != tokens or x.shape[0] not in (1, rows):
        return x
    return _select_rows(x[:, segment.start : segment.stop], segment.rows, rows)


def _select_rows(x: Tensor, selected: tuple[int, ...], rows: int) -> Tensor:
    """Return the rows with indices `selected` of x [rows, ...]. Return x itself if these are all
    rows, or if x [1, ...] has one row that serves all rows of the batch."""
    if len(selected) == rows or x.shape[0] == 1:
        return x
    return torch.cat([x[row : row + 1] for row in selected])


def _join_tokens(segments: list[DocumentSegment], parts: list[Any], rows: int) -> Tensor | None:
    """Return a module's output for a chunk, [rows, C, ...], joined from its outputs for each
    document, [rows of the document, its tokens, ...]. Return None if one of the outputs has another
    shape, or is no tensor.

    Args:
        segments: the chunk's tokens split by document.
        parts: the module's output for each segment.
        rows: batch size.
    """
    for segment, part in zip(segments, parts, strict=True):
        if not isinstance(part, Tensor) or part.shape[:2] != (
            len(segment.rows),
            segment.stop - segment.start,
        ):
            return None
    ordered = sorted(zip(segments, parts, strict=True), key=lambda part: part[0].start)
    if all(len(segment.rows) == rows for segment, _ in ordered):
        return torch.cat([part for _, part in ordered], 1)
    by_row: list[list[Tensor]] = [[] for _ in range(rows)]
    for segment, part in ordered:
        for index, row in enumerate(segment.rows):
            by_row[row].append(part[index : index + 1])
    return torch.cat([torch.cat(row, 1) for row in by_row])


def _end_states(parts: list[SegmentResult], rows: int, tokens: int) -> States:
    """Return the states [rows, ...] at the chunk's end, joined from the documents that reach the
    chunk's end in each row.

    Args:
        parts: (segment, output, end states) for each segment.
        rows: batch size.
        tokens: number of the chunk's tokens.
    """
    last = [(segment, states) for segment, _, states in parts if segment.stop == tokens]
    if len(last) == 1:
        return last[0][1]
    by_row: dict[int, tuple[States, int]] = {}
    for segment, states in last:
        for index, row in enumerate(segment.rows):
            by_row[row] = (states, index)
    end_states: States = {}
    for key in last[0][1]:
        row_states: list[Tensor] = []
        for row in range(rows):
            states, index = by_row[row]
            row_states.append(states[key][index : index + 1])
        width = max(state.shape[-1] for state in row_states)
        # A convolution reads zeros in front of a document's first tokens.
        end_states[key] = torch.cat(
            [F.pad(state, (width - state.shape[-1], 0)) for state in row_states]
        )
    return end_states
