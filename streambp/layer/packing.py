"""Packed documents of one call of a layer with states: told to its kernels, or its mixers called for each of them."""

from __future__ import annotations

import contextlib
from typing import Any

from streambp.chunks import Barrier, Chunk
from streambp.known_names import DOCUMENT_ENDS, DOCUMENT_IDS
from streambp.layer.arguments import Arguments
from streambp.layer.site import LayerSite
from streambp.recurrent.documents import PackedRows, document_readers
from streambp.recurrent.scans import scans_of, starting_from
from streambp.recurrent.segments import in_segments, mixers_of
from streambp.recurrent.states import StateCache


class Packing:
    """How the mixers of a layer learn, in each chunk, where they start from and where documents of packed rows start.

    arguments: None of a layer without states, whose rows need no telling apart: attention's mask knows of documents.
    told: the arguments that tell its kernels of documents; () if none does. [Note: documents], [Note: segments]
    marks_documents: rows are more than one document each, of which this layer knows.
    """

    def __init__(self, site: LayerSite | None = None, arguments: Arguments | None = None) -> None:
        self.arguments = arguments
        self.told: tuple[str, ...] = ()
        self.rows: PackedRows | None = None
        if site is not None and arguments is not None:
            self.told = () if arguments.documents is None else tuple(arguments.documents.arguments)
            self.rows = arguments.packed_rows
            self._scans = scans_of(site.layer)
            self._functions = document_readers(site.layer) if self.told else []
            self._mixers = [] if self.rows is None else mixers_of(site.layer)
        self.marks_documents = bool(self.told) or self.rows is not None

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Where no chunk may end for the sake of documents: a trial has others than its call. [Note: chunk ends]"""
        rows = None if self.arguments is None else self.arguments.packed_rows
        return () if rows is None else rows.barriers

    def entered(
        self, named: dict[str, Any], chunk: Chunk, cache: StateCache | None
    ) -> tuple[dict[str, Any], contextlib.AbstractContextManager[None]]:
        """A chunk's arguments, and within what the layer's forward runs, so that its mixers start where they should.

        Args:
            cache: with the states that the chunk starts from; None: the layer gets none.
        """
        assert self.arguments is not None
        rows = self.arguments.packed_rows
        if rows is not None and (cache is None or not self.arguments.tells):
            named = {name: value for name, value in named.items() if name not in (DOCUMENT_IDS, DOCUMENT_ENDS)}
            return named, in_segments(self._mixers, rows.segments(chunk), cache)
        if cache is None:
            return named, contextlib.nullcontext()
        documents = self.arguments.documents if self.told else None
        if documents is None:
            return named, starting_from(self._scans, cache)
        return {**named, **documents.within(chunk)}, starting_from(self._scans, cache, (self._functions, documents, chunk))


ONE_DOCUMENT = Packing()
