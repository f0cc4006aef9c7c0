"""Determine if a batch is split over ranks, and by which library."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

from transformers import PreTrainedConfig

from streambp.attention.interface import attention_configs, own_implementation
from streambp.distributed.context_parallel import find_context_parallel
from streambp.distributed.ulysses import SplitGroup, find_ulysses
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.layer.layer_state import LayerState
from streambp.sharded.call import keeps
from streambp.sharded.gathered_keys import GatheredShards, key_memory_bytes
from streambp.sharded.shards import Shards, gather_shards

LAYER_NUMBER_LIMIT = 2**16  # more than the number of layers
TWO_SPLITS_ERROR = (
    "DeepSpeed Ulysses and torch's context parallelism both split this batch over ranks, and "
    "streamed layers support one of them at a time."
)


def find_split(config: PreTrainedConfig, training: bool) -> SplitGroup | None:
    """Return how another library (Ulysses or context parallelism) splits each sequence over ranks
    now; None if sequences are not split.

    Args:
        config: the model's config.
        training: True if the model is in training mode.

    Raises:
        UnsupportedModelError: two libraries split the batch, or the process group of the library
            was not found.
    """
    ulysses = find_ulysses(own_implementation(config))
    context = find_context_parallel()
    if ulysses is None or (ulysses.disable_in_eval and not training):
        return context
    if context is not None:
        raise UnsupportedModelError(
            f"{TWO_SPLITS_ERROR} Choose one, or run this model unpatched (streambp.unpatch(model))."
        )
    return ulysses


def refuse_lone_layer(layer_state: LayerState) -> None:
    """Raise if a decoder layer is called directly, and not by its backbone, while sequences are
    split over ranks. The layer's own arguments do not show which part of the sequence they contain;
    those of the backbone do.

    Args:
        layer_state: the layer's state.

    Raises:
        UnsupportedModelError: sequences are split over ranks now.
    """
    layer = layer_state.layer
    if any(
        find_split(config, layer.training) is not None
        for config in layer_state.cached_result(attention_configs)
    ):
        raise UnsupportedModelError(
            f"{type(layer).__name__} was called directly while sequences are split over ranks. "
            "Only the model's own forward, with input_ids or inputs_embeds, tells streambp the "
            "tokens of the other ranks. Call the model, or run it unpatched "
            "(streambp.unpatch(model))."
        )


def refuse_replicas() -> NoReturn:
    """Raise when nn.DataParallel copies a patched module to another device.

    Raises:
        StreamBPError: always. The copy would run the original module's replaced forward, whose
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
    layer_states: list[LayerState],
) -> Shards | None:
    """Return which part of the batch's sequences each rank holds; None if each rank has full
    sequences.

    If sequences are split, the function runs collectives, so all ranks of the group must call it.

    Args:
        kwargs: arguments of the backbone's forward; position_ids and attention_mask are read.
        tokens: input_ids [B, T] of `kwargs`, or inputs_embeds [B, T, h].
        config: the backbone's config.
        training: True if the backbone is in training mode.
        layer_states: states of the patched decoder layers. A layer that saves K and V, or attention
            outputs, may exchange fewer tensors between ranks in backward. All ranks must therefore
            save these tensors in the same number of layers.

    Raises:
        StreamBPError: ranks have different lengths, or save such tensors in different numbers of
            layers.
    """
    split = find_split(config, training)
    if split is None or tokens is None:
        return None
    positions = kwargs.get("position_ids")
    mask = kwargs.get("attention_mask")
    agreed = sum(
        keeps(layer_state.config, "kv") + LAYER_NUMBER_LIMIT * keeps(layer_state.config, "attn_out")
        for layer_state in layer_states
    )
    if split.balanced is None:  # Ulysses
        return gather_shards(Shards, split.group, tokens, positions, mask, agreed)
    kind = functools.partial(GatheredShards, balanced=split.balanced)
    agreed += LAYER_NUMBER_LIMIT * LAYER_NUMBER_LIMIT * split.balanced
    return gather_shards(
        kind, split.group, tokens, positions, mask, agreed, key_memory_bytes(tokens.device)
    )
