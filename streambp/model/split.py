"""Determine if a batch is split over ranks, and by which library."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

from transformers import PreTrainedConfig

from streambp.attention.interface import attention_configs, own_implementation
from streambp.distributed.context_parallel import find_context_parallel
from streambp.distributed.ulysses import SplitOver, find_ulysses
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.layer.site import LayerSite
from streambp.sharded.call import keeps
from streambp.sharded.gathered import GatheredShards, room_for_keys
from streambp.sharded.shards import Shards, gather_shards

MANY = 2**16  # more than the number of layers
BOTH = (
    "DeepSpeed Ulysses and torch's context parallelism both split this batch over ranks, and "
    "streamed layers support one of them at a time."
)


def find_split(config: PreTrainedConfig, training: bool) -> SplitOver | None:
    """Return the library that splits the sequences of a model with this config now; None: sequences
    are not split.

    Args:
        training: the model's mode.

    Raises:
        UnsupportedModelError: two libraries split the batch, or information that streamed layers
            need is missing.
    """
    ulysses = find_ulysses(own_implementation(config))
    context = find_context_parallel()
    if ulysses is None or (ulysses.disable_in_eval and not training):
        return context
    if context is not None:
        raise UnsupportedModelError(
            f"{BOTH} Choose one, or run this model unpatched (streambp.unpatch(model))."
        )
    return ulysses


def refuse_lone_layer(site: LayerSite) -> None:
    """Check a layer that is called outside of its backbone's forward, and has no information about
    a split batch.

    Raises:
        UnsupportedModelError: sequences are split over ranks now.
    """
    layer = site.layer
    if any(find_split(config, layer.training) is not None for config in site.of(attention_configs)):
        raise UnsupportedModelError(
            f"{type(layer).__name__} was called directly while sequences are split over ranks. "
            "Only the model's own forward, with input_ids or inputs_embeds, tells streambp the "
            "tokens of the other ranks. Call the model, or run it unpatched "
            "(streambp.unpatch(model))."
        )


def refuse_replicas() -> NoReturn:
    """Raise when nn.DataParallel copies a module to another device.

    Raises:
        StreamBPError: always. A replica would have the original's forward and wrapper, whose
            weights are on another device.
    """
    raise StreamBPError(
        "nn.DataParallel would run replicas of a streamed model, which streambp does not support. "
        "HF Trainer uses DataParallel if a process has several GPUs. Start a process for each GPU "
        "with torchrun or accelerate launch, or show one GPU to the process "
        "(CUDA_VISIBLE_DEVICES=0)."
    )


def shards_of(
    kwargs: Mapping[str, Any],
    tokens: Any,
    config: PreTrainedConfig,
    training: bool,
    sites: list[LayerSite],
) -> Shards | None:
    """Return how the sequences of this batch are split over ranks; None if each rank has full
    sequences.

    If sequences are split, the call runs collectives, so all ranks of the group must make the call.

    Args:
        kwargs: arguments of the backbone's forward; position_ids and attention_mask are read.
        tokens: input_ids [B, T] of `kwargs`, or inputs_embeds [B, T, h].
        config: the backbone's config.
        training: the backbone's mode.
        sites: the patched decoder layers (`LayerSite`). Layers that save K and V, or attention
            outputs, exchange other tensors between ranks in backward. So all ranks must have the
            same number of such layers.

    Raises:
        StreamBPError: ranks have different shards, or different numbers of such layers.
    """
    found = find_split(config, training)
    if found is None or tokens is None:
        return None
    positions = kwargs.get("position_ids")
    mask = kwargs.get("attention_mask")
    agreed = sum(keeps(site.config, "kv") + MANY * keeps(site.config, "attn_out") for site in sites)
    if found.balanced is None:  # Ulysses
        return gather_shards(Shards, found.group, tokens, positions, mask, agreed)
    kind = functools.partial(GatheredShards, balanced=found.balanced)
    agreed += MANY * MANY * found.balanced
    return gather_shards(
        kind, found.group, tokens, positions, mask, agreed, room_for_keys(tokens.device)
    )
