"""What passes from one chunk of a layer call to the next.

    keys, values   every later chunk's queries read them: the `Prefix`      in attention
    states         the next chunk goes on from them: `States`               in recurrences and convolutions

A chunk reaches both through arguments of the layer's own forward. Layers that attend through transformers' interface get
an `AttentionPoint` in place of their attention mask, layers that attend by themselves a cache that returns the prefix, and
layers with states a cache that hands them out and collects them, or the states themselves where they return them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from streambp.attention.kv import PrefixMemory
from streambp.attention.masks import DenseMask, LazyMask, resolve
from streambp.attention.own import OwnMask, chunk_arguments, reader
from streambp.attention.prefix import AttentionPoint, ChunkMask, Prefix
from streambp.attention.spans import Spans
from streambp.chunks import Barrier, Chunk, ChunkPlan
from streambp.known_names import DOCUMENT_ENDS, STATE
from streambp.layer.site import LayerSite
from streambp.layer.store import Offloader, SavedTensors
from streambp.recurrent.documents import Documents
from streambp.recurrent.states import StateCache, States


class Carried:
    """What the chunks of one layer call hand on to each other.

    Args:
        layout: what the queries of the whole sequence may read.
        length: positions of the whole sequence.
        barriers: where no chunk may end. [Note: chunk ends]

    states: what the chunk computed last ended with. upstream: in backward, the gradients of what the chunk before the one
    computed last ended with.
    """

    def __init__(self, site: LayerSite, layout: Spans | DenseMask, length: int, barriers: tuple[Barrier, ...] = ()) -> None:
        self.site = site
        self.barriers = barriers
        self.prefix = Prefix(layout, length, site.config.attention)
        self.states: States = {}
        self.upstream: States = {}

    def limit(self, plan: ChunkPlan, offloader: Offloader, device: torch.device, saved: SavedTensors | None) -> None:
        """Of keys, values and their gradients no more is on the device than the offloader allows.

        Layers that attend by themselves read all of them at once.

        Args:
            saved: the store that keeps keys and values for backward; None: none does.
        """
        if self.site.cache is None:
            scratch = functools.partial(offloader.scratch, device)
            self.prefix.memory = PrefixMemory(plan, offloader.prefix_memory, scratch, saved)

    def handed_to(
        self,
        named: dict[str, Any],
        chunk: Chunk,
        point: AttentionPoint,
        states: States | None,
        documents: Documents | None = None,
    ) -> tuple[dict[str, Any], StateCache | None]:
        """A chunk's arguments, with what it gets from the chunks before it among them; and where its states end up.

        Args:
            states: those that the chunk starts from; None: it gets no cache.
            documents: of packed rows, of which a layer with states is told.
        """
        read = None
        if self.site.attends:
            named = with_point(named, point)
        elif self.site.cache is not None:
            assert isinstance(point, ChunkMask)
            read = reader(named, point)
            named = chunk_arguments(named, self.site.cache, point)
        if self.site.states is None or (states is None and read is None):
            return named, None
        cache = StateCache(chunk.start, states or {}, read)
        given = (tuple(cache.before.values()) or None) if self.site.states == STATE else cache
        own = {} if documents is None else documents.within(chunk)
        return {**named, **own, self.site.states: given}, cache

    def drop(self) -> None:
        """Let go of it: the pass over the chunks is over."""
        self.prefix.drop_buffers()
        self.states, self.upstream = {}, {}


def attention_mask_of(named: Mapping[str, Any]) -> Any:
    """What the layer will hand to its attention as its mask.

    Some layers get a second mask, of padding, for what else mixes tokens in them, by the name of attention_mask or in one
    dictionary with attention's: attention's is the one that our mask function made.
    """
    found = [mask for value in named.values() for mask in (value.values() if isinstance(value, Mapping) else (value,))]
    return next((mask for mask in found if isinstance(mask, LazyMask)), named.get("attention_mask"))


def with_point(named: dict[str, Any], point: AttentionPoint) -> dict[str, Any]:
    """The arguments with `point` in place of attention's mask."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        if isinstance(value, LazyMask):
            found[name] = point
        elif isinstance(value, Mapping) and any(isinstance(part, LazyMask) for part in value.values()):
            found[name] = {key: point if isinstance(part, LazyMask) else part for key, part in value.items()}
    return {**named, **(found or {"attention_mask": point})}


def layout_of(
    site: LayerSite, named: dict[str, Any], hidden_states: Tensor
) -> tuple[Spans | DenseMask, tuple[Barrier, ...]]:
    """What each query of hidden_states [..., B, T, h] may read by the arguments of a call, and where no chunk may end."""
    batch_size, length = hidden_states.shape[-3:-1]
    mask = attention_mask_of(named)
    if isinstance(mask, OwnMask):
        return Spans.causal(batch_size, length), mask.barriers  # the layer itself reads the mask
    if not site.attends and not isinstance(mask, LazyMask):
        return Spans.causal(batch_size, length), ()  # nobody reads it
    positions, cu_seq_lens = named.get("position_ids"), named.get(DOCUMENT_ENDS)
    layout = resolve(mask, batch_size, length, positions, cu_seq_lens, hidden_states.device)
    site.documents = mask.told if isinstance(mask, LazyMask) else None
    return layout, layout.barriers if isinstance(layout, DenseMask) else ()
