"""What a layer is given in place of its cache: it counts positions, and hands out the keys and values of the prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ChunkCache:
    """Given in place of a cache to layers that ask it how many tokens came before: the chunk's start.

    Args:
        read: what `update` does, for layers that attend over what it returns; if None, they get back what they gave.
    """

    def __init__(self, start: int, read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None) -> None:
        self.start = start
        self._read = read
        self._stop = start  # positions up to the last one that was read

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """How many tokens came before the chunk."""
        return self.start

    get_query_offset = get_seq_length  # the position of the chunk's first query

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """K [B, H_kv, e, D] and V up to the chunk's end, for key_states [B, H_kv, C, D] and value_states of the chunk.

        A cache without `read` gives the chunk's own back.
        """
        if self._read is None:
            return key_states, value_states
        k, v = self._read(key_states, value_states)
        self._stop = k.shape[-2]
        return k, v

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        """How many keys `update` returns, and the position of the first."""
        return self.start + query_length, 0

    def update_indexer(self, key_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """key_states [B, C, D] of an indexer, which picks what the queries read -> [B, e, D]: one more prefix."""
        return self.update(key_states[:, None], key_states[:, None, :, :0])[0][:, 0]

    @property
    def layers(self) -> Any:
        """`layers[i]` says how many keys `update` has returned (GLM 5 Next's indexer asks), and has an `update_index`."""
        return LayerKeys(self, self._stop)


class LayerKeys:
    """`cache.layers[i]` of a chunk's cache: the number of keys, no keys."""

    def __init__(self, cache: ChunkCache, number: int) -> None:
        self._cache = cache
        self.keys = torch.empty(0, 0, number, 0, device="meta")  # [B, H, e, D] but for B, H and D

    def __getitem__(self, layer: int) -> LayerKeys:
        return self

    def get_seq_length(self) -> int:
        """The number of keys, as transformers' cache layers tell it."""
        return self.keys.shape[-2]

    def update_index(self, key_states: Tensor) -> Tensor:
        """key_states [B, 1, C, D] of MiniMax M3's indexer -> [B, 1, e, D]: one more prefix."""
        return self._cache.update(key_states, key_states[..., :0])[0]
