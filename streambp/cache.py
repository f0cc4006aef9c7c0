"""Replace a layer's KV cache while the layer computes one chunk: report the chunk's positions, and
return K and V of all tokens up to the chunk's end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ChunkCache:
    """Object that is passed to a layer in place of its KV cache, while the layer computes one chunk
    of a sequence. The object has the methods of transformers' `Cache` that layers call. Through
    these methods the layer gets the number of earlier tokens, and the keys and values of these
    tokens.

    Args:
        start: the chunk's first position, which is the number of earlier tokens.
        read: function (k, v) -> (K, V) that `update` calls. k and v are keys and values of the
            chunk. K and V are keys and values of all tokens that the chunk attends to, usually up
            to the chunk's end. None: `update` returns its arguments, because the layer gets earlier
            keys in another way.
    """

    def __init__(
        self, start: int, read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    ) -> None:
        self.start = start
        self._read = read
        self._stop = start  # end of the positions that were read

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Return the number of tokens before the chunk."""
        return self.start

    get_query_offset = get_seq_length  # the position of the chunk's first query

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H_kv, e, D] of the e tokens up to the chunk's end. Layers
        call this method with the keys and values of the chunk, as they call `Cache.update`.

        A cache without `read` returns its arguments.

        Args:
            key_states: [B, H_kv, C, D], keys of the chunk's C tokens.
            value_states: [B, H_kv, C, D], the chunk's values.
        """
        if self._read is None:
            return key_states, value_states
        k, v = self._read(key_states, value_states)
        self._stop = k.shape[-2]
        return k, v

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the number of keys up to the chunk's end, and the position of the first key (0).
        transformers' mask functions call this method."""
        return self.start + query_length, 0

    def update_indexer(self, key_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return an indexer's keys [B, e, D] of the e tokens up to the chunk's end.

        An indexer is a module of sparse attention that selects the keys of each query, by means of
        keys of its own. Layers with an indexer call this method.

        Args:
            key_states: [B, C, D], the indexer's keys of the chunk's C tokens.
        """
        return self.update(key_states[:, None], key_states[:, None, :, :0])[0][:, 0]

    @property
    def layers(self) -> Any:
        """Return a replacement for `Cache.layers` of transformers, which the indexer of GLM 5 Next
        reads. The item at each index is a `LayerKeys` object, which reports the number of keys and
        has a method `update_index`."""
        return LayerKeys(self, self._stop)


class LayerKeys:
    """Replacement for one of the `Cache.layers` of transformers. The object reports the number of
    keys in a chunk's cache, but stores no keys. Indexing the object returns the object itself, so
    that it also replaces the list.

    Args:
        cache: the chunk's cache.
        number: number of keys to report.
    """

    def __init__(self, cache: ChunkCache, number: int) -> None:
        self._cache = cache
        # [B, H, e, D] with sizes 0 for B, H and D
        self.keys = torch.empty(0, 0, number, 0, device="meta")

    def __getitem__(self, layer: int) -> LayerKeys:
        return self

    def get_seq_length(self) -> int:
        """Return the number of keys up to the chunk's end, like transformers' cache layers."""
        return self.keys.shape[-2]

    def update_index(self, key_states: Tensor) -> Tensor:
        """Return the indexer's keys [B, 1, e, D] of the e tokens up to the chunk's end. The indexer
        of MiniMax M3, a module that selects the keys of each query, calls this method.

        Args:
            key_states: [B, 1, C, D], the indexer's keys of the chunk's C tokens.
        """
        return self._cache.update(key_states, key_states[..., :0])[0]
