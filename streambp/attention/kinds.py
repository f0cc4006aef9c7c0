"""Adapters between decoder layers and chunked attention, for layers with other attention than
causal attention by transformers' interface.

`admission/stacks.py` chooses a layer's adapter. [Note: carriers]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function

from streambp.attention.interface import (
    InterfaceAttention,
    NoAttention,
    ReadKeys,
    attention_configs,
    own_implementation,
    use_implementations,
)
from streambp.attention.mask_scan import find_empty, reads
from streambp.attention.masks import (
    LazyMask,
    attention_mask_of,
    find_flash_documents,
    replace_masks,
)
from streambp.attention.position_biases import is_distance_bias, pair_bias
from streambp.attention.prefix import ChunkAttention, FullSequenceKeys, PrefixChunkAttention
from streambp.attention.self_attending import (
    OwnMask,
    biases_positions,
    own_mask,
    why_picked_blocks_stay_whole,
)
from streambp.cache import ChunkCache
from streambp.chunks import Barrier, Chunk
from streambp.device import has_data
from streambp.errors import UnsupportedModelError
from streambp.known_names import (
    CROSS_BIAS,
    DOCUMENT_ENDS,
    EAGER,
    FLASH,
    KEY_ARGUMENTS,
    POSITION_BIAS,
)


def _with_own_masks(
    configs: list[PreTrainedConfig], args: Any, kwargs: Any
) -> tuple[contextlib.AbstractContextManager[None], Any, Any]:
    """Return a context manager in which a layer attends with the model's own attention, and the
    layer's positional and keyword arguments. The returned arguments have the model's own masks. A
    `LazyMask`, which streambp passes in place of a mask, is replaced.

    Args:
        configs: the configs of the layer's attention modules.
        args: the layer's positional arguments.
        kwargs: the layer's keyword arguments.
    """
    implementations = [own_implementation(config) or EAGER for config in configs]

    def mask(lazy: LazyMask) -> Any:
        return AttentionMaskInterface()[implementations[0]](**lazy.description)

    arguments: dict[str, Any] = {}
    for name, value in kwargs.items():
        arguments[name] = replace_masks(value, mask)
    return (
        use_implementations(configs, implementations),
        [replace_masks(value, mask) for value in args],
        arguments,
    )


def _why_empty_queries(mask: Tensor) -> str | None:
    """Return the reason why a bidirectional layer cannot be chunked with a mask that is added to
    the scores: some query reads no key. Eager attention returns the mean over all keys for this
    query. None if every query reads a key, or if the mask is bool.

    Args:
        mask: [B or 1, H or 1, T, T].
    """
    length = mask.shape[-1]
    if not mask.is_floating_point() or mask.shape[-2] != length or mask.is_meta:
        return None
    empty, _ = find_empty(
        lambda q0, q1, k0, k1: reads(mask[:, :, q0:q1, k0:k1]), length, mask.device
    )
    if empty is None:
        return None
    return EMPTY_QUERY_REASON


class BidirectionalAttention(InterfaceAttention):
    """Adapter for a layer with bidirectional attention modules (is_causal=False): a layer of an
    encoder, or of a decoder whose mask is bidirectional within a prefix (a prefix LM)."""

    reads_ahead = True
    why_not_split = "its attention is bidirectional, and sequences are split for causal models"

    def take_mask(
        self, layer: nn.Module, arguments: dict[str, Any], x: Tensor, documents: int | None
    ) -> str | None:
        """Return the reason why the layer cannot be chunked with its attention_mask; None if it
        can. Accepted are a `LazyMask` and a tensor [B or 1, H or 1, T or 1, T].

        The modules have is_causal=False, so the mask alone decides which keys are read.
        Transformers may pass None to sdpa in place of a causal mask, and sdpa then reads all keys.
        Under sdpa a layer with a causal mask is therefore not chunked. Eager attention always gets
        the mask.

        Args:
            layer: the decoder layer.
            arguments: the layer's arguments by name. A mask with one row of keys for all queries
                gets T rows, as a view.
            x: hidden_states [..., B, T, h].
            documents: number of documents that position_ids mark; not read here.
        """
        reason = super().take_mask(layer, arguments, x, documents)
        if reason is not None:
            return reason
        mask = attention_mask_of(arguments)
        if isinstance(mask, Tensor):
            if mask.shape[-2] == 1:
                mask = arguments["attention_mask"] = mask.expand(-1, -1, x.shape[-2], -1)
            return _why_empty_queries(mask)
        if mask is None:
            return "its attention is bidirectional, and has no mask that tells which keys exist"
        implementations = [str(own_implementation(config)) for config in self.configs(layer)]
        is_eager = EAGER in implementations
        if is_eager and mask.has_empty_row:
            return EMPTY_ROW_REASON
        if is_eager and mask.has_empty_window:
            return EMPTY_QUERY_REASON
        if not is_eager and mask.description.get("allow_is_causal_skip", False):
            return (
                "its attention modules are bidirectional and its mask is causal: eager attention "
                "reads the mask, and sdpa may get none and read all keys"
            )
        if any(FLASH in name for name in implementations):
            rows, length = x.shape[-3:-1]
            ends = arguments.get(DOCUMENT_ENDS)
            find_flash_documents(mask, rows, length, arguments.get("position_ids"), ends)
        return None

    def unchunked_run(
        self, configs: list[PreTrainedConfig], args: Any, kwargs: Any
    ) -> tuple[contextlib.AbstractContextManager[None], Any, Any]:
        """Return a context manager, and the layer's positional and keyword arguments, for a run of
        the layer on all tokens at once. The caller runs the layer with these arguments inside the
        context: in forward, and again in backward under torch's checkpoint.

        The context makes the layer attend by its own implementation (sdpa or eager). The returned
        arguments have transformers' own masks. A `LazyMask`, which streambp passes in place of a
        mask, is replaced.

        Args:
            configs: the configs of the layer's attention modules, from the method `configs`.
            args: the layer's positional arguments.
            kwargs: the layer's keyword arguments.
        """
        return _with_own_masks(configs, args, kwargs)


EMPTY_QUERY_REASON = "a query reads no key, for which an added mask gives the mean over all keys"
EMPTY_ROW_REASON = "a row has no tokens, of which an added mask gives a mean over all keys"


@dataclasses.dataclass(frozen=True)
class TowerAttention(BidirectionalAttention):
    """Adapter for a layer of a vision or audio encoder (a tower), whose attention modules are
    bidirectional. A call without a mask means that every query reads all keys. A text model may
    also leave out the mask because the mask is causal.

    Attributes:
        why_unchunked: reason why each call of the layer runs unchunked, as text for
            `streambp.describe`; None: the call's arguments decide.
    """

    why_unchunked: str | None = None

    needs_no_mask = True

    def take_mask(
        self, layer: nn.Module, arguments: dict[str, Any], x: Tensor, documents: int | None
    ) -> str | None:
        """Return the reason why the layer cannot be chunked with its attention_mask; None if it
        can. Accepted are None for all keys, a `LazyMask`, and a tensor [B or 1, H or 1, T or 1, T].

        Args:
            layer: the tower's layer.
            arguments: the layer's arguments by name. None in place of a mask is replaced by a
                `LazyMask` of all keys.
            x: hidden_states [..., B, T, h].
            documents: number of documents that position_ids mark; not read here.
        """
        if self.why_unchunked is not None:
            return self.why_unchunked
        if x.dim() < 3:
            return "its hidden states have no batch dimension"
        if attention_mask_of(arguments) is None:
            rows, length = x.shape[-3:-1]
            arguments["attention_mask"] = LazyMask(
                mask_function=bidirectional_mask_function,
                batch_size=rows,
                q_length=length,
                kv_length=length,
                dtype=x.dtype,
            )
        return super().take_mask(layer, arguments, x, documents)


@dataclasses.dataclass(frozen=True)
class ForeignAttention(NoAttention):
    """Adapter for a decoder layer whose attention forward was replaced by other code, Unsloth's for
    example. The layer runs unchunked, with the model's own masks.

    Attributes:
        by: name of the function that replaces the forward.
    """

    by: str

    ours = False

    @property
    def why_not_split(self) -> str:  # type: ignore[override]
        """Return the reason why the tokens cannot be sharded over ranks: the replaced forward would
        attend to this rank's part of the sequence alone."""
        return f"{self.by} attends in its place, to this rank's shard"

    def take_mask(
        self, layer: nn.Module, arguments: dict[str, Any], x: Tensor, documents: int | None
    ) -> str:
        """Return the reason, as text for `streambp.describe`, why the layer runs unchunked: the
        forward of its attention was replaced. Other adapters check the layer's mask in this method.
        This adapter reads no argument, and returns the same reason for every call.

        Args:
            layer: the decoder layer.
            arguments: the layer's arguments by name; not changed.
            x: hidden_states [..., B, T, h].
            documents: number of documents that position_ids mark in packed rows; None: no
                documents.
        """
        return (
            f"{self.by} stands in the place of its attention's forward, and attends in its own way"
        )


def _with_bias_of_pairs(arguments: dict[str, Any], length: int) -> dict[str, Any]:
    """Return arguments of a layer for its own forward without chunks. T5's bias of all pairs of
    positions, [1, H, T, T], replaces the bias of each distance.

    Args:
        arguments: arguments of the layer by name, returned unchanged if they have no bias of each
            distance.
        length: T.
    """
    bias = arguments.get(POSITION_BIAS)
    if not is_distance_bias(bias):
        return arguments
    return {**arguments, POSITION_BIAS: pair_bias(bias, 0, length, 0, length)}


@dataclasses.dataclass(frozen=True)
class BiasedAttention(InterfaceAttention):
    """Adapter for a decoder layer whose attention adds T5's bias by the distance of key and query.
    See `attention/position_biases.py`.

    Attributes:
        gets_bias: True if the first layer computes the bias, and other layers get it as an argument
            (T5). False if each layer computes its own bias (UMT5).
    """

    gets_bias: bool

    adds_bias = True
    returns_weights = True
    why_not_split = "it adds a bias by position, and this rank has a part of the positions"
    costs = (
        "plain products: no fused kernel adds a bias by distance, of which one value for each "
        "distance is kept"
    )

    def take_mask(
        self, layer: nn.Module, arguments: dict[str, Any], x: Tensor, documents: int | None
    ) -> str | None:
        """Return the reason why the layer cannot be chunked with its attention_mask and with the
        bias of its cross-attention; None if it can.

        Args:
            layer: the decoder layer.
            arguments: the layer's arguments by name.
            x: hidden_states [..., B, T, h].
            documents: number of documents that position_ids mark; not read here.
        """
        if arguments.get(CROSS_BIAS) is not None:
            return "its cross-attention gets a bias for each pair of positions"
        mask = attention_mask_of(arguments)
        # sdpa adds a mask to T5's bias as eager attention does
        if isinstance(mask, LazyMask) and mask.has_empty_row:
            return EMPTY_ROW_REASON
        return super().take_mask(layer, arguments, x, documents)

    def unchunked_run(
        self, configs: list[PreTrainedConfig], args: Any, kwargs: Any
    ) -> tuple[contextlib.AbstractContextManager[None], Any, Any]:
        """Return a context manager, and the layer's positional and keyword arguments, for a run of
        the layer on all tokens at once. The caller runs the layer with these arguments inside the
        context: in forward, and again in backward under torch's checkpoint.

        The context makes the layer attend by its own implementation (sdpa or eager). The returned
        arguments have transformers' own masks. If the layer got T5's bias of each distance, the
        arguments have the bias of all pairs of positions instead.

        Args:
            configs: the configs of the layer's attention modules, from the method `configs`.
            args: the layer's positional arguments.
            kwargs: the layer's keyword arguments.
        """
        kwargs = _with_bias_of_pairs(kwargs, args[0].shape[-2])
        return _with_own_masks(configs, args, kwargs)

    def unpatched_arguments(
        self, arguments: dict[str, Any], length: int, mask: Callable[[LazyMask], Any]
    ) -> dict[str, Any]:
        """Return the layer's arguments for a test run of the layer's own forward on the first
        `length` tokens. The arguments have the model's own masks, and T5's bias of all pairs of
        positions.

        Args:
            arguments: the layer's arguments by name.
            length: number of tokens.
            mask: function from a `LazyMask` to the mask that transformers' own mask function makes.
        """
        return _with_bias_of_pairs(super().unpatched_arguments(arguments, length, mask), length)


@dataclasses.dataclass(frozen=True)
class BidirectionalBiasedAttention(BiasedAttention, BidirectionalAttention):
    """Adapter for a layer with bidirectional attention modules that add T5's bias: a layer of T5's
    encoder."""


@dataclasses.dataclass(frozen=True)
class SparseAttention(InterfaceAttention):
    """Adapter for a decoder layer with sparse attention: an indexer module picks the keys that each
    query reads. [Note: indexers]

    Attributes:
        picks_per_query: number of keys that the layer's own indexer picks for a query; None: the
            layer uses the keys that an earlier layer's indexer picked.
    """

    picks_per_query: int | None = None

    why_not_split = "its indexer compares all keys of the sequence, of which this rank has a shard"
    picks_keys = True

    @property
    def costs(self) -> str:  # type: ignore[override]
        """Return text for `describe` about what sparse attention costs in time and memory."""
        text = (
            "sparse attention: plain products with all keys before, which are masked if they are "
            "not picked"
        )
        if self.picks_per_query is None:
            return text
        return f"{text}; its indexer's picks are kept, {4 * self.picks_per_query:,} bytes a token"

    def unchunked_run(
        self, configs: list[PreTrainedConfig], args: Any, kwargs: Any
    ) -> tuple[contextlib.AbstractContextManager[None], Any, Any]:
        """Return a context manager, and the layer's positional and keyword arguments, for a run of
        the layer on all tokens at once. The caller runs the layer with these arguments inside the
        context: in forward, and again in backward under torch's checkpoint.

        The context makes the layer attend by its own implementation (sdpa or eager), and the
        layer's own indexer picks keys. The returned arguments have transformers' own masks. A
        `LazyMask`, which streambp passes in place of a mask, is replaced.

        Args:
            configs: the configs of the layer's attention modules, from the method `configs`.
            args: the layer's positional arguments.
            kwargs: the layer's keyword arguments.
        """
        return _with_own_masks(configs, args, kwargs)


@dataclasses.dataclass(frozen=True)
class CacheAttention(NoAttention):
    """Adapter for a decoder layer whose own code computes attention, without transformers'
    attention interface. The code reads the keys and values that `update` of its KV cache returns,
    so streambp passes a cache object of its own. See `attention/self_attending.py`.

    Attributes:
        argument: name of the argument that takes the cache.
    """

    argument: str

    costs = (
        "its own attention: the model builds its [T, T] mask, and a chunk's scores against all "
        "before exist"
    )
    why_not_split = "it attends by itself, to this rank's shard"
    in_tiles = False  # the layer reads all keys at once
    returns_weights = True
    ours = False

    def take_mask(
        self, layer: nn.Module, arguments: dict[str, Any], x: Tensor, documents: int | None
    ) -> str | None:
        """Check the arguments of a layer's call, and replace its mask in `arguments` by an
        `OwnMask`. Return the reason why the layer cannot be chunked, or None.

        Args:
            layer: the decoder layer.
            arguments: the layer's arguments by name.
            x: hidden_states [..., B, T, h].
            documents: number of documents that position_ids mark in packed rows; None: no
                documents.

        Raises:
            UnsupportedModelError: position_ids mark packed documents. The model's recurrent layers
                would separate the documents, but this layer's attention would not.
        """
        mask = attention_mask_of(arguments)
        length = x.shape[-2]
        by_sdpa = {config._attn_implementation for config in attention_configs(layer)} == {"sdpa"}
        layer_mask: OwnMask | str
        if mask is None and by_sdpa:
            layer_mask = OwnMask(torch.empty(0, device=x.device))
        else:
            layer_mask = own_mask(mask, length, by_sdpa)
        if isinstance(layer_mask, str):
            return layer_mask
        if documents is not None and layer_mask.mask.dim() < 4:
            raise UnsupportedModelError(
                f"position_ids mark {documents} documents of packed rows, but the attention of "
                f"{type(layer).__name__} does not separate them: its mask marks padding alone. The "
                "model's recurrent layers would separate the documents. Pass one document per "
                "row, or set StreamConfig(documents='as_given') so that no layer separates "
                "documents, as in the unpatched model."
            )
        reason = why_picked_blocks_stay_whole(
            layer, arguments.get("position_ids"), layer_mask, length, by_sdpa
        )
        if reason is not None:
            return reason
        # sdpa gives an empty query 0, in a chunk and in the sequence. A position bias gives
        # sdpa another mask.
        if by_sdpa and layer_mask.mask.dtype == torch.bool and not biases_positions(layer):
            layer_mask = dataclasses.replace(layer_mask, empty=None)
        arguments["attention_mask"] = layer_mask
        return None

    def chunk_arguments(
        self, arguments: dict[str, Any], chunk_attention: ChunkAttention
    ) -> tuple[dict[str, Any], ReadKeys | None]:
        """Return the layer's arguments for one chunk, and the function that the replaced cache
        calls on new keys and values. That function returns all keys and values up to the chunk's
        end. The mask is cut to the chunk.

        Args:
            arguments: the layer's arguments by name.
            chunk_attention: the object that stores the chunk's keys and values.
        """
        assert isinstance(chunk_attention, PrefixChunkAttention)
        chunk = chunk_attention.chunk
        mask = arguments["attention_mask"]

        def read(
            k: Tensor, v: Tensor
        ) -> tuple[Tensor, Tensor]:  # [B, H_kv, C, D] -> all up to the chunk's end
            return chunk_attention.read(k, mask.values(v, chunk))

        replacements: dict[str, Any] = {
            self.argument: ChunkCache(chunk.start, read),
            "attention_mask": mask.chunk_mask(chunk),
        }
        for name in KEY_ARGUMENTS:
            if isinstance(arguments.get(name), Tensor):
                replacements[name] = arguments[name][..., : chunk.stop]
        return {**arguments, **replacements}, read

    def unpatched_arguments(
        self, arguments: dict[str, Any], length: int, mask: Callable[[LazyMask], Any]
    ) -> dict[str, Any]:
        """Return the layer's arguments for a test run of the layer's own forward on the first
        `length` tokens, with the model's own mask.

        Args:
            arguments: the layer's arguments by name, with an `OwnMask` as attention_mask.
            length: number of tokens.
            mask: unused, because the layer has no `LazyMask`.
        """
        replacements = {
            "attention_mask": arguments["attention_mask"].chunk_mask(Chunk(0, 0, length))
        }
        for name in KEY_ARGUMENTS:
            if isinstance(arguments.get(name), Tensor):
                replacements[name] = arguments[name][..., :length]
        return {**arguments, **replacements}


@dataclasses.dataclass(frozen=True)
class BidirectionalCacheAttention(CacheAttention):
    """Adapter for a bidirectional layer that computes attention itself (an encoder of BERT's kind).
    The layer gets a cache, whose `update` returns keys and values of all tokens."""

    costs = (
        "its own attention: the model builds its [T, T] mask, and a chunk's scores against all "
        "keys exist"
    )
    reads_ahead = True

    def take_mask(
        self, layer: nn.Module, arguments: dict[str, Any], x: Tensor, documents: int | None
    ) -> str | None:
        """Check the arguments of a layer's call, and replace its mask in `arguments` by an
        `OwnMask`. Return the reason why the layer cannot be chunked, or None. Accepted is a mask [B
        or 1, H or 1, T or 1, T] that is added to the scores, or None in eager attention.

        Args:
            layer: the layer.
            arguments: the layer's arguments by name.
            x: hidden_states [..., B, T, h].
            documents: number of documents that position_ids mark; not read here.
        """
        mask = attention_mask_of(arguments)
        length = x.shape[-2]
        implementations = {config._attn_implementation for config in attention_configs(layer)}
        if mask is None and implementations <= {EAGER}:
            mask = x.new_zeros(1, 1, 1, length)  # the layer adds no mask: every key is read
        if not isinstance(mask, Tensor) or not mask.is_floating_point():
            return "its attention is bidirectional and its own, and gets no mask that it adds"
        if mask.dim() == 4 and tuple(mask.shape[-2:]) == (1, length):
            mask = arguments["attention_mask"] = mask.expand(-1, -1, length, -1)
        reason = super().take_mask(layer, arguments, x, documents)
        if reason is not None:
            return reason
        own_mask: OwnMask = arguments["attention_mask"]
        if own_mask.empty is not None:
            return "a query reads no key, for which an added mask gives the mean over all keys"
        if not has_data(own_mask.mask):  # every query reads all keys
            arguments["attention_mask"] = OwnMask(own_mask.mask, (Barrier(1, length - 1),))
        return None

    def chunk_arguments(
        self, arguments: dict[str, Any], chunk_attention: ChunkAttention
    ) -> tuple[dict[str, Any], ReadKeys | None]:
        """Return the layer's arguments for one chunk, and the function that the replaced cache
        calls on the chunk's keys and values. That function returns keys and values of all tokens if
        `chunk_attention` is a `FullSequenceKeys`. Otherwise that function returns keys and values
        up to the chunk's end.

        Args:
            arguments: the layer's arguments by name.
            chunk_attention: the object that has the keys and values. A `FullSequenceKeys` is passed
                if the layer's forward is cut in two at its attention.
        """
        if not isinstance(chunk_attention, FullSequenceKeys):
            return super().chunk_arguments(arguments, chunk_attention)
        chunk = chunk_attention.chunk
        mask = arguments["attention_mask"].mask[:, :, chunk.start : chunk.stop]
        cache = ChunkCache(chunk.start, chunk_attention.read)
        return {**arguments, self.argument: cache, "attention_mask": mask}, chunk_attention.read
