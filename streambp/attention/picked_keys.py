"""Mask all keys but the picks of an indexer, for sparse attention.

The picks of a chunk are indices [B, C, k] of keys. They become a mask tile by tile, for one block
of queries and keys at a time. So no mask of a chunk against its prefix exists, and none of the
whole sequence. If the number of picks reaches the number of keys up to the chunk's end, every key
is picked. Then only the layer's own mask counts.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from streambp.attention.masks import DenseMask, edges
from streambp.attention.spans import Spans
from streambp.chunks import Chunk


def visible_keys(
    layout: Spans | DenseMask, q0: int, q1: int, k0: int, k1: int, device: torch.device
) -> Tensor:
    """Return the attention mask of queries [q0, q1) and keys [k0, k1) before an indexer's picks
    restrict it, [B or 1, H or 1, q, k]. The dtype is bool (True: the query reads the key), or a
    floating dtype for a mask that is added to the scores.

    Args:
        layout: the keys that each query may read.
        q0, q1: range of the queries.
        k0, k1: range of the keys.
        device: device of the mask.
    """
    if isinstance(layout, DenseMask):
        return layout.tile(q0, q1, k0, k1, device)
    key = ("edges", device)
    if key not in layout.caches:
        layout.caches[key] = edges(layout, device)
    first, last = (edge[:, q0:q1, None] for edge in layout.caches[key])  # [B, q, 1]
    keys = torch.arange(k0, k1, device=device)
    return ((keys >= first) & (keys <= last))[:, None]


@dataclasses.dataclass(frozen=True)
class PickedMask(DenseMask):
    """Attention mask of one chunk's queries, restricted to the keys that an indexer picked for each
    query.

    Attributes:
        source: [B, C, k], indices of the picked keys, of any integer dtype.
        layer_mask: the keys that the layer's own mask allows for these queries.
        start: the chunk's first position.
    """

    layer_mask: Spans | DenseMask = dataclasses.field(kw_only=True)
    start: int = dataclasses.field(kw_only=True)

    @classmethod
    def from_picks(
        cls, layer_mask: Spans | DenseMask, length: int, chunk: Chunk, picks: Tensor
    ) -> Spans | DenseMask:
        """Return the attention mask of one chunk's queries, restricted to the picked keys. Return
        `layer_mask` itself if every key up to the chunk's end is picked.

        Args:
            layer_mask: the keys that the layer's own mask allows.
            length: number of positions of the sequence.
            chunk: the chunk's range of positions.
            picks: [B, C, k], indices of the keys that an indexer picked.
        """
        if picks.shape[-1] >= chunk.stop:
            return layer_mask
        barriers = layer_mask.barriers if isinstance(layer_mask, DenseMask) else ()
        plans = layer_mask.caches.setdefault("picked", {})  # shared by all layers
        return cls(
            len(picks), length, picks, barriers, plans, layer_mask=layer_mask, start=chunk.start
        )

    def tile(self, q0: int, q1: int, k0: int, k1: int, device: torch.device) -> Tensor:
        """Return the mask of queries [q0, q1) and keys [k0, k1) on `device`, [B, H or 1, q, k]. The
        dtype is bool (True: the query reads the key), or a floating dtype for a mask that is added
        to the scores."""
        assert isinstance(self.source, Tensor)
        read = visible_keys(self.layer_mask, q0, q1, k0, k1, device)
        picks = self.source[:, q0 - self.start : q1 - self.start].long() - k0  # [B, q, k]
        spare = k1 - k0  # a column of its own, which is dropped
        picks = torch.where((picks >= 0) & (picks < spare), picks, spare)
        is_picked = torch.zeros(*picks.shape[:2], spare + 1, dtype=torch.bool, device=device)
        is_picked = is_picked.scatter_(-1, picks, True)[:, None, :, :spare]  # [B, 1, q, k]
        if read.dtype == torch.bool:
            return read & is_picked
        return read.masked_fill(~is_picked, torch.finfo(read.dtype).min)
