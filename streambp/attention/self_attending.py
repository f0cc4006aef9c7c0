"""Support layers that attend by themselves over the result of their cache: the cache returns the
prefix.

Models from before transformers' attention interface (GPT-J, GPT-Neo, CodeGen, BLOOM) call
`cache.update(key, value)` and attend to its result. So a chunk's cache returns the keys and values
up to the chunk's end. The model builds the complete mask, which is cut to the chunk. The result is
exact, but the scores of one chunk against its prefix exist in memory, as does the mask.

Sparse attention that makes its own masks (MiniMax M3, GLM 5 Next) is served the same way. The layer
makes a mask over its prefix from the model's mask and an indexer's output. The indexer's keys come
from the same cache and are one more prefix. Picking has no gradient, so the gradient of these keys
is never requested. `indexers.py` serves other sparse attention.

A query that reads nothing would get the mean over the keys of its prefix here, which depends on the
chunks. Such a query reads itself alone instead, with a value of zero that no other query reads.
`attention/mask_scan.py` says what such a query gives elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from streambp.attention.mask_scan import SCAN_TILE_SIZE, find_barriers, find_empty, reads
from streambp.chunks import Barrier, Chunk
from streambp.device import has_data
from streambp.errors import UnsupportedMaskError
from streambp.known_names import DISTANCES, INDEX_UPDATE, QUERY_OFFSET
from streambp.source import written_forward


@dataclasses.dataclass(frozen=True)
class OwnMask:
    """Attention mask of a layer that computes its own attention, without transformers' interface.

    The mask is additive or bool. True in a bool mask marks keys that are read, or in some models
    (MPT) keys that are not read. The first query of a causal mask never reads the last key, so this
    entry shows the meaning of True.

    Attributes:
        mask: [B or 1, H or 1, T, T], bool or additive. Or [B, T], marking the real tokens, for a
            layer that makes its own mask from tokens and from its indexer's picks (GLM 5 Next). Or
            [0], if the call has no mask: sdpa is causal without a mask for a whole sequence, but
            needs a mask for a chunk.
        barriers: positions where no chunk may end. [Note: chunk ends]
        empty: [B or 1, T], True for queries that read no key; None: every query reads a key.
    """

    mask: Tensor
    barriers: tuple[Barrier, ...] = ()
    empty: Tensor | None = None

    def read(self, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        """Return a bool tensor [B or 1, H or 1, q, k] for queries [q0, q1) and keys [k0, k1), True
        where a query reads a key. Scans of the mask call this method."""
        tile = self.mask[:, :, q0:q1, k0:k1]
        if tile.dtype == torch.bool:
            return tile != self.mask[:, :, :1, -1:]
        return reads(tile)

    def chunk_mask(self, chunk: Chunk) -> Tensor:
        """Return the mask of a chunk, [B or 1, H or 1, C, e], for the e keys up to the chunk's end.
        A query that may read no key gets itself as its only key.

        If the mask [B, T] marks tokens, return the chunk's columns [B, C]. If the call has no mask,
        return a causal mask in bool, True where a key is read.
        """
        if self.mask.dim() == 2:
            return self.mask[:, chunk.start : chunk.stop]
        if self.mask.dim() == 1:
            size = chunk.stop - chunk.start
            return torch.ones(
                1, 1, size, chunk.stop, dtype=torch.bool, device=self.mask.device
            ).tril(chunk.start)
        part = self.mask[:, :, chunk.start : chunk.stop, : chunk.stop]
        if self.empty is None:
            return part
        part = part.clone()
        diagonal = part.diagonal(chunk.start, -2, -1)  # [B, H or 1, C]
        is_read = ~self.mask[:, :, 0, -1:] if part.dtype == torch.bool else diagonal.new_zeros(())
        diagonal.copy_(
            torch.where(self.empty[:, None, chunk.start : chunk.stop], is_read, diagonal)
        )
        return part

    def values(self, v: Tensor, chunk: Chunk) -> Tensor:
        """Return the chunk's v [B, H_kv, C, D], with zeros for tokens whose query reads no key. The
        chunk's mask lets such a query read its own key, so that its softmax is defined. The output
        is 0 because v is 0."""
        if self.empty is None:
            return v
        return v.masked_fill(self.empty[:, None, chunk.start : chunk.stop, None], 0.0)

    def causal(self, length: int) -> OwnMask:
        """Return a causal mask without padding for the first `length` tokens, of the same dtype and
        meaning of True as this mask. Used in test runs of the layer."""
        if self.mask.dim() == 2:
            return OwnMask(torch.ones_like(self.mask[:, :length]))
        if self.mask.dim() == 1:
            return self
        lower = torch.ones(length, length, dtype=torch.bool, device=self.mask.device).tril()
        if self.mask.dtype == torch.bool:
            not_read = self.mask[:, :, :1, -1:]
            plain = torch.where(lower, ~not_read, not_read)
        else:
            lowest = torch.finfo(self.mask.dtype).min
            plain = torch.where(lower, self.mask.new_zeros(()), lowest)
        return OwnMask(plain.expand(*self.mask.shape[:2], -1, -1))


def own_mask(mask: Any, length: int, by_sdpa: bool = False) -> OwnMask | str:
    """Return the mask of a layer that computes attention scores in its own code (`OwnMask`), or the
    reason why such a layer cannot be chunked with this attention mask. A mask without data (on the
    meta device) counts as causal.

    Args:
        mask: the layer's attention_mask.
        length: T.
        by_sdpa: True if transformers' sdpa attends, which returns 0 for a query that reads no key.
    """
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[-1] == length:
        # Every query reads the first token if no row starts with padding.
        if by_sdpa or mask.is_meta or isinstance(mask, FakeTensor) or bool(mask[:, 0].all()):
            return OwnMask(mask)
        return "it attends by itself, with padding whose queries read a mean over all keys"
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return "it attends by itself, without a 4-D attention mask"
    if tuple(mask.shape[-2:]) != (length, length):
        return (
            f"it attends by itself, with a mask of {mask.shape[-1]} keys for an input of {length} "
            "positions"
        )
    if mask.is_meta or isinstance(mask, FakeTensor):
        return OwnMask(mask)
    if mask.dtype == torch.bool:
        corner = mask[:, :, :1, -1:]
        ends = mask[:, :, [0, -1]]
        if bool((ends == corner).all() | (corner.any() & ~corner.all())):
            return (
                "it attends by itself, and its attention mask does not show what it means by True"
            )
    layer_mask = OwnMask(mask)
    barriers = find_barriers(layer_mask.read, length, mask.device)
    if barriers and mask.dtype == torch.bool:
        return "it attends by itself, and its attention mask is not causal"
    empty, harmless = find_empty(layer_mask.read, length, mask.device)
    if not harmless:
        return (
            "it attends by itself, and its attention mask leaves a query without keys whose own "
            "key is read"
        )
    return OwnMask(mask, barriers, empty)


def why_picked_blocks_stay_whole(
    layer: nn.Module, positions: Any, mask: OwnMask, length: int, by_sdpa: bool
) -> str | None:
    """Return the reason why a layer must run unchunked with these arguments, if the layer's indexer
    picks blocks of keys (MiniMax M3). Return None for a layer without such an indexer, for a mask
    without data, and if the layer can be chunked.

    A reason is returned if `positions` are not 0 to T - 1, or if the mask is more than causal with
    padding on the right. A query may then pick only blocks that the mask excludes, and read no key.

    Args:
        layer: the decoder layer.
        positions: the layer's argument position_ids.
        mask: the layer's mask.
        length: T.
        by_sdpa: True if transformers' sdpa attends, which returns zeros for a query that reads no
            key. Other implementations return the mean over all keys, later keys included.

    Raises:
        UnsupportedMaskError: the mask lets some query read no key (padding on the left), and
            `by_sdpa` is False. The indexer then reads means over later tokens. If `by_sdpa` is
            True, a reason is returned for this mask.
    """
    if not any(
        INDEX_UPDATE in _attribute_names(module) for module in layer.modules()
    ) or not has_data(mask.mask):
        return None
    if mask.empty is not None and not by_sdpa:
        raise UnsupportedMaskError(
            "The attention mask pads on the left. Eager attention computes for a padding token "
            "the mean over all tokens, later tokens too, and the indexer of "
            f"{type(layer).__name__} reads this mean, so chunks would pick other keys. Pad on the "
            "right, or load the model with attn_implementation='sdpa'."
        )
    if isinstance(positions, Tensor) and not bool(
        (positions == torch.arange(length, device=positions.device)).all()
    ):
        return (
            "its indexer picks blocks of keys by position_ids, which are not the places of the "
            "keys here"
        )
    if mask.mask.dim() == 1:
        return None
    last_query = mask.read(
        length - 1, length, 0, length
    )  # [B or 1, H or 1, 1, T], of the last query
    token_positions = torch.arange(length, device=last_query.device)
    tiles = ((q0, min(q0 + SCAN_TILE_SIZE, length)) for q0 in range(0, length, SCAN_TILE_SIZE))
    if not bool((last_query[..., 1:] & ~last_query[..., :-1]).any()) and all(
        torch.equal(
            mask.read(q0, q1, 0, length),
            last_query & (token_positions <= token_positions[q0:q1, None]),
        )
        for q0, q1 in tiles
    ):
        return None
    return (
        "its indexer picks blocks of keys, and its attention mask is more than causal with padding "
        "on the right"
    )


def _attribute_names(module: nn.Module) -> tuple[str, ...]:
    forward = written_forward(module)
    return forward.__code__.co_names if hasattr(forward, "__code__") else ()


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of a module's forward; () if the forward is not a Python
    function. An attention module with the argument `relative_distance` adds a bias for each pair of
    positions."""
    code = getattr(written_forward(module), "__code__", None)
    if code is None:
        return ()
    return tuple(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def biases_positions(module: nn.Module) -> bool:
    """True if an attention module inside `module` adds a bias for each pair of positions (Inkling).
    The forward's source shows this: the code names the cache's method `get_query_offset`, or has a
    parameter `relative_distance`.

    The model's sdpa then gets one finite tensor, mask plus bias. A query that may read no key
    therefore gets the mean over all keys instead of 0.
    """
    return any(
        QUERY_OFFSET in _attribute_names(part) or DISTANCES in _parameters(part)
        for part in module.modules()
    )
