"""What passes from one chunk of a layer call to the next.

    keys, values   every later chunk's queries read them: the `Prefix`      in attention
    states         the next chunk goes on from them: `States`               in recurrences and convolutions

A chunk reaches both through arguments of the layer's own forward; which ones the layer's carriers know.
[Note: carriers]
"""

from __future__ import annotations

import functools

import torch

from streambp.attention.carriers import Layout
from streambp.attention.kv import PrefixMemory
from streambp.attention.prefix import Prefix
from streambp.chunks import ChunkPlan
from streambp.layer.site import LayerSite
from streambp.layer.store import Offloader, SavedTensors
from streambp.recurrent.states import States


class Carried:
    """What the chunks of one layer call hand on to each other.

    Args:
        layout: what the queries of the whole sequence may read, and where no chunk may end.
        length: positions of the whole sequence.

    states: what the chunk computed last ended with. upstream: in backward, the gradients of what the chunk before the one
    computed last ended with.
    """

    def __init__(self, site: LayerSite, layout: Layout, length: int) -> None:
        self.in_tiles = site.kind.attention.in_tiles
        self.layout = layout
        self.prefix = Prefix(layout.spans, length, site.config.attention)
        self.states: States = {}
        self.upstream: States = {}

    def limit(self, plan: ChunkPlan, offloader: Offloader, device: torch.device, saved: SavedTensors | None) -> None:
        """Of keys, values and their gradients no more is on the device than the offloader allows, if they may be in tiles.

        Args:
            saved: the store that keeps keys and values for backward; None: none does.
        """
        if self.in_tiles:
            scratch = functools.partial(offloader.scratch, device)
            self.prefix.memory = PrefixMemory(plan, offloader.prefix_memory, scratch, saved)

    def drop(self) -> None:
        """Let go of it: the pass over the chunks is over."""
        self.prefix.drop_buffers()
        self.states, self.upstream = {}, {}
