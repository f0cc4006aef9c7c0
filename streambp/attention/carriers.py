"""How the chunks of a layer get at the keys and values of the chunks before: what stands in for its
mask and its cache.

[Note: carriers] A layer's kind is chosen once, by `admission/stacks.py`. It is two objects: an
attention carrier, here, and a state carrier (`recurrent/carriers.py`). The step asks them what it
hands to a chunk, and never what kind a layer is of.

    `NoAttention`        the layer reads no keys                                nothing stands in for anything
    `ThroughInterface`   it attends through transformers' attention interface   an `AttentionPoint` for its mask
    `Picking`            the same, over keys that an indexer picks              the point, and the indexer's forward
    `OverCache`          it attends by itself over what its cache returns       a `ChunkCache`, and its mask cut
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from streambp.attention.interface import own_implementation, routed, unrouted
from streambp.attention.masks import DenseMask, LazyMask, resolve
from streambp.attention.own import OwnMask, biases_positions, own_mask, why_picked_blocks_stay_whole
from streambp.attention.prefix import AttentionPoint, ChunkMask
from streambp.attention.spans import Spans
from streambp.cache import ChunkCache
from streambp.chunks import Barrier, Chunk
from streambp.errors import UnsupportedMaskError, UnsupportedModelError
from streambp.known_names import DOCUMENT_ENDS, EAGER, PER_KEY

Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Layout(NamedTuple):
    """What the queries of a whole sequence may read, and where no chunk may end. [Note: chunk ends]

    told: the argument that told of packed documents, and how many there are; None: none did.
    """

    spans: Spans | DenseMask
    barriers: tuple[Barrier, ...] = ()
    told: tuple[str, int] | None = None


class NoAttention:
    """A layer that reads no keys (a recurrence alone), and what the other carriers have in common.

    Attributes:
        costs: text of `describe` about the costs.
        why_not_split: reason why the tokens cannot be sharded over ranks.
        in_tiles: True if the prefix can be cut into tiles, some of which are off the device.
        reads_a_mask: True if the layer passes attention_mask to attention only.
        ours: True if a streamed layer's attention is replaced, so that a trial can hide the keys of
            other chunks from queries.
        picks_keys: True if the keys of a query are selected by the contents of the keys.
        returns_weights: True if floating tensors after the hidden states are attention weights that
            nobody requested.
    """

    costs: str | None = None
    why_not_split: str | None = None
    in_tiles = True
    reads_a_mask = False
    ours = True
    picks_keys = False
    returns_weights = False

    def configs(self, layer: nn.Module) -> list[PreTrainedConfig]:
        """The configs by which the layer's attention is sent to ours while it streams; none if it
        stays its own."""
        return attention_configs(layer) if self.ours else []

    def take_mask(
        self, layer: nn.Module, named: dict[str, Any], x: Tensor, documents: int | None
    ) -> str | None:
        """Why the layer cannot be cut with these arguments; None if it can. The mask among them may
        become another.

        Args:
            x: hidden_states [..., B, T, h].
            documents: how many of them position_ids mark in packed rows; None: they mark none.
        """
        return None

    def layout(self, named: Mapping[str, Any], x: Tensor) -> Layout:
        """What each query of hidden_states x [..., B, T, h] may read: read off the mask, whichever
        it is."""
        mask, (batch_size, length) = attention_mask_of(named), x.shape[-3:-1]
        # nobody reads it, or the layer itself does
        if not self.reads_a_mask and not isinstance(mask, LazyMask):
            return Layout(
                Spans.causal(batch_size, length), mask.barriers if isinstance(mask, OwnMask) else ()
            )
        spans = resolve(
            mask, batch_size, length, named.get("position_ids"), named.get(DOCUMENT_ENDS), x.device
        )
        barriers = spans.barriers if isinstance(spans, DenseMask) else ()
        return Layout(spans, barriers, mask.told if isinstance(mask, LazyMask) else None)

    def hand(
        self, named: dict[str, Any], point: AttentionPoint
    ) -> tuple[dict[str, Any], Read | None]:
        """A chunk's arguments with what stands in for its mask and cache, and what its cache does
        with keys and values."""
        return named, None

    def whole(
        self, configs: list[PreTrainedConfig], args: Any, kwargs: Any
    ) -> tuple[contextlib.AbstractContextManager[None], Any, Any]:
        """What the forward of a layer that is not cut runs in, and its arguments."""
        return routed(configs), args, kwargs

    def unpatched(
        self, named: dict[str, Any], length: int, mask: Callable[[LazyMask], Any]
    ) -> dict[str, Any]:
        """The arguments of the first `length` tokens with the masks that the model gives the layer
        as unpatched.

        Args:
            mask: what the model's own mask function makes of ours.
        """
        return named


class ThroughInterface(NoAttention):
    """A layer that attends through transformers' attention interface: the `AttentionPoint` travels
    as its mask."""

    reads_a_mask = True

    def take_mask(
        self, layer: nn.Module, named: dict[str, Any], x: Tensor, documents: int | None
    ) -> str | None:
        """The layer's mask has to be ours, a tensor [B or 1, H or 1, T, T], or none; x: [..., B, T,
        h].

        Raises:
            UnsupportedMaskError: eager attention would add a bool mask.
        """
        mask = attention_mask_of(named)
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype == torch.bool:
            _refuse_added_bools(self.configs(layer))
        known = (
            mask is None
            or isinstance(mask, LazyMask)
            or (isinstance(mask, Tensor) and mask.dim() == 4)
        )
        return None if known else "its attention_mask is not for attention alone"

    def hand(
        self, named: dict[str, Any], point: AttentionPoint
    ) -> tuple[dict[str, Any], Read | None]:
        """The point in place of attention's mask."""
        point.takes_picks = self.picks_keys
        found: dict[str, Any] = {}
        for name, value in named.items():
            if type(value) in PLAIN:
                continue
            if isinstance(value, LazyMask):
                found[name] = point
            elif isinstance(value, Mapping) and any(
                isinstance(part, LazyMask) for part in value.values()
            ):
                found[name] = {
                    key: point if isinstance(part, LazyMask) else part
                    for key, part in value.items()
                }
        return {**named, **(found or {"attention_mask": point})}, None

    def unpatched(
        self, named: dict[str, Any], length: int, mask: Callable[[LazyMask], Any]
    ) -> dict[str, Any]:
        """Each mask of ours becomes the model's; a layer without one is given a causal one."""
        found = {name: _own_masks(value, mask) for name, value in named.items()}
        if not isinstance(attention_mask_of(named), LazyMask):
            found["attention_mask"] = mask(LazyMask())
        return found


@dataclasses.dataclass(frozen=True)
class Replaced(NoAttention):
    """A layer whose attention's class has another forward than it was written with: it runs whole,
    with the model's own masks.

    Args:
        by: what stands there, by name.
    """

    by: str

    ours = False

    @property
    def why_not_split(self) -> str:  # type: ignore[override]
        """It attends to this rank's shard alone."""
        return f"{self.by} attends in its place, to this rank's shard"

    def take_mask(
        self, layer: nn.Module, named: dict[str, Any], x: Tensor, documents: int | None
    ) -> str:
        """It is never cut, whatever its hidden states x [..., B, T, h]."""
        return (
            f"{self.by} stands in the place of its attention's forward, and attends in its own way"
        )


# arguments that neither are masks of ours nor hold some
PLAIN = frozenset({Tensor, tuple, list, bool, type(None)})


@dataclasses.dataclass(frozen=True)
class Picking(ThroughInterface):
    """A layer whose attention names the keys that its queries read: sparse attention with an
    indexer. [Note: indexers]

    Args:
        kept: how many keys its own indexer picks for a query; None: it reads what an earlier
            layer's has picked.
    """

    kept: int | None = None

    why_not_split = "its indexer compares all keys of the sequence, of which this rank has a shard"
    picks_keys = True

    @property
    def costs(self) -> str:  # type: ignore[override]
        """What `describe` says of it."""
        found = (
            "sparse attention: plain products with all keys before, which are masked if they are "
            "not picked"
        )
        return (
            found
            if self.kept is None
            else f"{found}; its indexer's picks are kept, {4 * self.kept:,} bytes a token"
        )

    def whole(
        self, configs: list[PreTrainedConfig], args: Any, kwargs: Any
    ) -> tuple[contextlib.AbstractContextManager[None], Any, Any]:
        """As unpatched, with the model's own masks: nothing stands in for an indexer there."""
        own = [own_implementation(config) or EAGER for config in configs]

        def mask(lazy: LazyMask) -> Any:
            return AttentionMaskInterface()[own[0]](**lazy.description)

        args = tuple(_own_masks(value, mask) for value in args)
        return (
            unrouted(configs, own),
            args,
            {name: _own_masks(value, mask) for name, value in kwargs.items()},
        )


@dataclasses.dataclass(frozen=True)
class OverCache(NoAttention):
    """A layer that attends by itself: the cache that it gets returns the prefix. See
    `attention/own.py`.

    Args:
        argument: the name of the argument that takes the cache.
    """

    argument: str

    costs = (
        "its own attention: the model builds its [T, T] mask, and a chunk's scores against all "
        "before exist"
    )
    why_not_split = "it attends by itself, to this rank's shard"
    in_tiles = False  # all of its keys are read at once
    returns_weights = True
    ours = False

    def take_mask(
        self, layer: nn.Module, named: dict[str, Any], x: Tensor, documents: int | None
    ) -> str | None:
        """The layer's mask becomes an `OwnMask`; x: [..., B, T, h].

        Raises:
            UnsupportedModelError: its attention is not told of packed documents, and the model's
                recurrent layers are.
        """
        mask, length = attention_mask_of(named), x.shape[-2]
        by_sdpa = {config._attn_implementation for config in attention_configs(layer)} == {"sdpa"}
        causal = OwnMask(torch.empty(0, device=x.device)) if mask is None and by_sdpa else None
        found = causal or own_mask(mask, length, by_sdpa)
        if isinstance(found, str):
            return found
        if documents is not None and found.mask.dim() < 4:
            raise UnsupportedModelError(
                f"position_ids mark {documents} documents of packed rows, which the attention of "
                f"{type(layer).__name__} is not told of: its mask knows padding alone, while the "
                "model's recurrent layers would compute the documents apart. Pass one document per "
                "row, or StreamConfig(documents='as_given') to let all layers go on from one to "
                "the next, as the unpatched model does."
            )
        because = why_picked_blocks_stay_whole(
            layer, named.get("position_ids"), found, length, by_sdpa
        )
        if because is not None:
            return because
        # Which gives an empty query 0, in a chunk as in the whole; with a position bias it is given
        # another mask.
        if by_sdpa and found.mask.dtype == torch.bool and not biases_positions(layer):
            found = dataclasses.replace(found, empty=None)
        named["attention_mask"] = found
        return None

    def hand(
        self, named: dict[str, Any], point: AttentionPoint
    ) -> tuple[dict[str, Any], Read | None]:
        """A cache that returns the prefix, and the mask's part for the chunk's queries."""
        assert isinstance(point, ChunkMask)
        chunk, mask = point.chunk, named["attention_mask"]

        def read(
            k: Tensor, v: Tensor
        ) -> tuple[Tensor, Tensor]:  # [B, H_kv, C, D] -> all up to the chunk's end
            return point.read(k, mask.values(v, chunk))

        changed: dict[str, Any] = {
            self.argument: ChunkCache(chunk.start, read),
            "attention_mask": mask.cut(chunk),
        }
        changed.update(
            {
                name: named[name][..., : chunk.stop]
                for name in PER_KEY
                if isinstance(named.get(name), Tensor)
            }
        )
        return {**named, **changed}, read

    def unpatched(
        self, named: dict[str, Any], length: int, mask: Callable[[LazyMask], Any]
    ) -> dict[str, Any]:
        """The model's own mask, cut to these tokens."""
        keys = {
            name: named[name][..., :length]
            for name in PER_KEY
            if isinstance(named.get(name), Tensor)
        }
        return {**named, "attention_mask": named["attention_mask"].cut(Chunk(0, 0, length)), **keys}


def attention_configs(layer: nn.Module) -> list[PreTrainedConfig]:
    """Every distinct config that the layer's modules read their attention implementation from."""
    found = {
        id(m.config): m.config
        for m in layer.modules()
        if isinstance(getattr(m, "config", None), PreTrainedConfig)
    }
    return list(found.values())


def attention_mask_of(named: Mapping[str, Any]) -> Any:
    """What the layer will hand to its attention as its mask.

    Some layers get a second mask, of padding, for what else mixes tokens in them, by the name of
    attention_mask or in one dictionary with attention's: attention's is the one that our mask
    function made.
    """
    for value in named.values():
        if type(value) in PLAIN:
            continue
        for mask in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(mask, LazyMask):
                return mask
    return named.get("attention_mask")


def _refuse_added_bools(configs: list[PreTrainedConfig]) -> None:
    """Raise UnsupportedMaskError if the model's own attention is eager, which adds bool masks."""
    for config in configs:
        if own_implementation(config) == EAGER:
            raise UnsupportedMaskError(
                "The 4-D attention mask is of torch.bool, and the model's attention is eager: it "
                "adds the mask to the scores, True as 1, so that the unpatched model reads every "
                "key. Pass an added mask (0 where a key is read, -inf elsewhere), or set sdpa "
                "(model.set_attn_implementation('sdpa')), which reads bool masks."
            )


def _own_masks(value: Any, mask: Callable[[LazyMask], Any]) -> Any:
    if isinstance(value, Mapping) and any(isinstance(part, LazyMask) for part in value.values()):
        return {key: _own_masks(part, mask) for key, part in value.items()}
    return mask(value) if isinstance(value, LazyMask) else value
