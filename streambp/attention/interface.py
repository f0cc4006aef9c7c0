"""Our entry in transformers' attention interface, and the switch that sends a model's attention to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from streambp.attention.masks import LazyMask, lazy_mask, resolve
from streambp.attention.prefix import AttentionPoint, ChunkMask, Prefix, Stage
from streambp.chunks import Chunk
from streambp.errors import UnsupportedModelError

NAME = "streambp"

# The attention implementations that configs name while they are routed to ours, by id.
_OWN: ContextVar[Mapping[int, str | None]] = ContextVar("own attention implementations", default=MappingProxyType({}))

# Keyword arguments that change what attention computes and that this function does not implement.
FOREIGN_ARGUMENTS = ("position_bias", "indices", "block_indices")
SINKS = ("s_aux", "sinks")


def stream_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, C, D], key and value [B, H_kv, C, D] -> [B, C, H, D_v].

    In a streamed layer `attention_mask` is the `AttentionPoint` that the layer was called with; it knows the prefix and the
    spans, so a `sliding_window` passed as well is already in it. In a layer that does not stream it is the model's own
    (a `LazyMask`, a 4-D tensor, or None for causal), and the sequence is attended whole, as one chunk.
    Keys from elsewhere than the queries' sequence (cross-attention to an image) are attended as the model's sdpa does it.
    """
    foreign = [name for name in FOREIGN_ARGUMENTS if kwargs.get(name) is not None]
    is_causal = kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False
    elsewhere = not isinstance(attention_mask, AttentionPoint | LazyMask) and (
        not is_causal or getattr(module, "is_cross_attention", False) or key.shape[2] != query.shape[2]
    )
    if elsewhere:
        foreign += [name for name in SINKS if kwargs.get(name) is not None] + ["softcap"] * (softcap is not None)
        # sdpa would read that as causal from the first key on, for a chunk as for the whole.
        foreign += ["no mask over keys from elsewhere"] * (attention_mask is None and is_causal)
    elif not is_causal:
        foreign.append("is_causal=False")
    if foreign:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends with {foreign}, which streambp does not support; "
            "ignoring it would give wrong numbers. Use gradient checkpointing for this model (streambp.unpatch(model))."
        )
    if elsewhere:  # token by token, as far as queries go: the model's own sdpa is right for a chunk of them as well
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if not isinstance(attention_mask, AttentionPoint):
        attention_mask = _whole_sequence(query, key, attention_mask, kwargs)
    query, key, value = _one_dtype(query, key, value)
    sinks = [kwargs[name] for name in SINKS if kwargs.get(name) is not None]
    return attention_mask.attend(query, key, value, scaling, dropout, softcap, *sinks), None


def _whole_sequence(query: Tensor, key: Tensor, mask: Any, kwargs: Any) -> ChunkMask:
    length = query.shape[2]
    if key.shape[2] != length:
        raise UnsupportedModelError(
            f"A layer attends {length} queries to {key.shape[2]} keys while its model streams; streambp supports neither "
            "caches nor cross-attention there. Use gradient checkpointing for this model (streambp.unpatch(model))."
        )
    layout = resolve(mask, query.shape[0], length, kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"), query.device)
    stage = Stage.RECOMPUTE if torch.is_grad_enabled() else Stage.FORWARD
    return ChunkMask(Prefix(layout, length, "auto"), Chunk(0, 0, length), stage)


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
    own = {id(config): name for config, name in zip(configs, before, strict=True) if name != NAME}
    outer = _OWN.set({**_OWN.get(), **own})
    for config in configs:
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        _OWN.reset(outer)
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def own_implementation(config: PreTrainedConfig) -> str | None:
    """The attention implementation that a config names unpatched, within `routed` as well."""
    name: str | None = config._attn_implementation_internal
    return _OWN.get().get(id(config), name) if name == NAME else name


@contextlib.contextmanager
def unrouted(configs: list[PreTrainedConfig], implementations: list[str]) -> Iterator[None]:
    """Within `routed`: models with these configs attend with these implementations."""
    before = [config._attn_implementation_internal for config in configs]
    for config, name in zip(configs, implementations, strict=True):
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, before_name in zip(configs, before, strict=True):
            config._attn_implementation_internal = before_name
