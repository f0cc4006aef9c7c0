"""Our entry in transformers' attention interface, and the switch that sends a model's attention to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from streambp.attention.masks import lazy_mask
from streambp.attention.prefix import ChunkMask
from streambp.errors import StreamBPError, UnsupportedModelError

NAME = "streambp"

# Keyword arguments that change what attention computes and that this function does not implement.
FOREIGN_ARGUMENTS = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")


def stream_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, C, D], key and value [B, H_kv, C, D] -> [B, C, H, D_v].

    `attention_mask` is the `ChunkMask` that the layer was called with; it knows the prefix and the spans, so a
    `sliding_window` passed as well is already in it.
    """
    if not isinstance(attention_mask, ChunkMask):
        raise StreamBPError(
            f"{type(module).__name__} was called with attention_mask={type(attention_mask).__name__} while its model "
            "streams; a layer that streambp does not know ran its attention. Please report this model."
        )
    foreign = [name for name in FOREIGN_ARGUMENTS if kwargs.get(name) is not None]
    if foreign or kwargs.get("is_causal") is False:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends with {foreign or 'is_causal=False'}, which streambp does not support yet; "
            "ignoring it would give wrong numbers. Use gradient checkpointing for this model (streambp.unpatch(model))."
        )
    query, key, value = _one_dtype(query, key, value)
    return attention_mask.attend(query, key, value, scaling, dropout), None


def _one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast rotary embeddings leave q and k in float32 and v in half; sdpa casts all three, so do we."""
    device = tensors[0].device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
    return tensors


@contextlib.contextmanager
def routed(configs: list[PreTrainedConfig]) -> Iterator[None]:
    """Within, models with these configs use `stream_attention` and `lazy_mask`. Sub-configs are left alone.

    Our name enters transformers' tables here, so that a model unpickled in a process that never called `patch` runs; no
    model outside of `routed` uses it.
    """
    AttentionInterface.register(NAME, stream_attention)
    AttentionMaskInterface.register(NAME, lazy_mask)
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
