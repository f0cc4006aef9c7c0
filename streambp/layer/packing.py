"""Packed documents in one call of a layer with states: passed to its kernels, or its mixers called
for each document.
"""

from __future__ import annotations

import contextlib
from typing import Any

from streambp.chunks import Barrier, Chunk
from streambp.known_names import DOCUMENT_ENDS, DOCUMENT_IDS
from streambp.layer.arguments import Arguments
from streambp.layer.layer_state import LayerState
from streambp.recurrent.documents import PackedRows, document_readers
from streambp.recurrent.scans import scans_of, use_start_states
from streambp.recurrent.segments import mixers_of, run_by_segment
from streambp.recurrent.states import StateCache


class Packing:
    """Document boundaries of packed rows in one call of a decoder layer. Layers with recurrent
    states need the boundaries, because states must start anew with each document.

    Attributes:
        arguments: the layer's arguments (`Arguments`). None for a layer without recurrent states,
            whose attention mask alone separates the documents; the other attributes are then empty.
        document_arguments: names of the layer's arguments with document boundaries, for example
            "seq_idx". The layer's kernels read these arguments. (): the layer has no such argument.
        rows: start and end of each document in each row (`PackedRows`), read from position_ids.
            Modules with recurrent states run once for each document if their kernels do not get the
            boundaries. None: position_ids mark no documents, or the layer has no recurrent states.
            [Note: segments]
        marks_documents: True if `document_arguments` or `rows` has document boundaries.
    """

    def __init__(
        self, layer_state: LayerState | None = None, arguments: Arguments | None = None
    ) -> None:
        self.arguments = arguments
        self.document_arguments: tuple[str, ...] = ()
        self.rows: PackedRows | None = None
        if layer_state is not None and arguments is not None:
            self.document_arguments = (
                () if arguments.documents is None else tuple(arguments.documents.arguments)
            )
            self.rows = arguments.packed_rows
            self._scans = scans_of(layer_state.layer)
            self._functions = document_readers(layer_state.layer) if self.document_arguments else []
            self._mixers = [] if self.rows is None else mixers_of(layer_state.layer)
        self.marks_documents = bool(self.document_arguments) or self.rows is not None

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Return the ranges of positions where a chunk may not end because of packed documents; ()
        if modules need not run once for each document. The ranges are read from the arguments each
        time, because a test of the layer replaces the arguments. [Note: chunk ends]"""
        rows = None if self.arguments is None else self.arguments.packed_rows
        return () if rows is None else rows.barriers

    def prepare_chunk(
        self, chunk_arguments: dict[str, Any], chunk: Chunk, cache: StateCache | None
    ) -> tuple[dict[str, Any], contextlib.AbstractContextManager[None]]:
        """Return a chunk's arguments, and a context manager for the layer's forward. Inside the
        context, convolutions and recurrences start from the states in `cache`, and from zeros at
        each document start. The returned arguments contain the document boundaries of the chunk if
        kernels read them.

        Args:
            chunk_arguments: the chunk's arguments, by name; not changed.
            chunk: the chunk's range of positions.
            cache: contains the states that the chunk starts from, and collects its end states;
                None: the layer gets no cache, and starts without states.
        """
        assert self.arguments is not None
        rows = self.arguments.packed_rows
        if rows is not None and (cache is None or not self.arguments.tells):
            chunk_arguments = {
                name: value
                for name, value in chunk_arguments.items()
                if name not in (DOCUMENT_IDS, DOCUMENT_ENDS)
            }
            return chunk_arguments, run_by_segment(self._mixers, rows.segments(chunk), cache)
        if cache is None:
            return chunk_arguments, contextlib.nullcontext()
        documents = self.arguments.documents if self.document_arguments else None
        if documents is None:
            return chunk_arguments, use_start_states(self._scans, cache)
        return {**chunk_arguments, **documents.kernel_arguments(chunk)}, use_start_states(
            self._scans, cache, (self._functions, documents, chunk)
        )


ONE_DOCUMENT = Packing()
