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
    """The documents of packed rows in one call of a layer with recurrent states, which must start
    anew with each document.

    Attributes:
        arguments: the call's arguments; None for a layer without states, whose attention mask
            separates the documents.
        document_arguments: names of the arguments through which the layer's kernels get document
            boundaries; (): none.
        rows: the documents that position_ids mark, for modules that must run once for each
            document; None: position_ids mark none. [Note: segments]
        marks_documents: True if the call has document boundaries, in `document_arguments` or in
            `rows`.
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
        """Return the positions where a chunk may not end because of packed documents. The positions
        are read from the arguments each time, because a test of the layer replaces the arguments.
        [Note: chunk ends]"""
        rows = None if self.arguments is None else self.arguments.packed_rows
        return () if rows is None else rows.barriers

    def prepare_chunk(
        self, chunk_arguments: dict[str, Any], chunk: Chunk, cache: StateCache | None
    ) -> tuple[dict[str, Any], contextlib.AbstractContextManager[None]]:
        """Return a chunk's arguments, and a context manager for the layer's forward. Inside the
        context, convolutions and recurrences start from the states in `cache`, and from zeros at
        each document start.

        Args:
            chunk_arguments: the chunk's arguments, by name.
            chunk: the chunk.
            cache: contains the states that the chunk starts from; None: the layer gets no cache.
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
