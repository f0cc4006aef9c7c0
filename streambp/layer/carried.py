"""What passes from one chunk of a layer call to the next: keys and values, which every later chunk's queries read.

They live in the `Prefix`. A chunk reaches it through an argument of the layer's own forward, in one of two ways: layers
that attend through transformers' interface get an `AttentionPoint` as their attention_mask, layers that attend by
themselves a cache that returns the prefix.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from streambp.attention.keys import PrefixMemory
from streambp.attention.masks import DenseMask, LazyMask, resolve
from streambp.attention.prefix import AttentionPoint, ChunkMask, Prefix
from streambp.attention.spans import Spans
from streambp.chunks import Barrier, ChunkPlan
from streambp.layer.cached import OwnMask, chunk_arguments
from streambp.layer.site import LayerSite
from streambp.layer.store import Offloader, SavedTensors


class Carried:
    """What the chunks of one layer call hand on to each other.

    Args:
        layout: what the queries of the whole sequence may read.
        length: positions of the whole sequence.
        barriers: where no chunk may end. [Note: chunk ends]
    """

    def __init__(self, site: LayerSite, layout: Spans | DenseMask, length: int, barriers: tuple[Barrier, ...] = ()) -> None:
        self.site = site
        self.barriers = barriers
        self.prefix = Prefix(layout, length, site.config.attention)

    def limit(self, plan: ChunkPlan, offloader: Offloader, device: torch.device, saved: SavedTensors | None) -> None:
        """Of keys, values and their gradients no more is on the device than the offloader allows.

        Layers that attend by themselves read all of them at once.

        Args:
            saved: the store that keeps keys and values for backward; None: none does.
        """
        if self.site.cache is None:
            scratch = functools.partial(offloader.scratch, device)
            self.prefix.memory = PrefixMemory(plan, offloader.prefix_memory, scratch, saved)

    def handed_to(self, named: dict[str, Any], point: AttentionPoint) -> dict[str, Any]:
        """A chunk's arguments, with what it gets from the chunks before it among them."""
        if self.site.attends:
            return {**named, "attention_mask": point}
        if self.site.cache is not None:
            assert isinstance(point, ChunkMask)
            return chunk_arguments(named, self.site.cache, point)
        return named

    def drop(self) -> None:
        """Let go of it: the pass over the chunks is over."""
        self.prefix.drop_buffers()


def layout_of(
    site: LayerSite, named: dict[str, Any], hidden_states: Tensor
) -> tuple[Spans | DenseMask, tuple[Barrier, ...]]:
    """What each query of hidden_states [..., B, T, h] may read by the arguments of a call, and where no chunk may end."""
    batch_size, length = hidden_states.shape[-3:-1]
    mask = named.get("attention_mask")
    if isinstance(mask, OwnMask):
        return Spans.causal(batch_size, length), mask.barriers  # the layer itself reads the mask
    if not site.attends and not isinstance(mask, LazyMask):
        return Spans.causal(batch_size, length), ()  # nobody reads it
    positions, cu_seq_lens = named.get("position_ids"), named.get("cu_seq_lens_q")
    layout = resolve(mask, batch_size, length, positions, cu_seq_lens, hidden_states.device)
    return layout, layout.barriers if isinstance(layout, DenseMask) else ()
