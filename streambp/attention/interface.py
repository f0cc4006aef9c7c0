"""Register streambp in transformers' attention interface, and route a model's attention to it."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from streambp.attention.masks import LazyMask, resolve
from streambp.attention.prefix import (
    AttentionCall,
    ChunkAttention,
    Prefix,
    PrefixChunkAttention,
    Stage,
)
from streambp.chunks import Chunk
from streambp.device import autocast_dtype, without_autocast
from streambp.errors import UnsupportedModelError
from streambp.known_names import (
    DOCUMENT_ENDS,
    EAGER_FORWARD,
    FOREIGN_ARGUMENTS,
    IMPLEMENTATION,
    PICKS,
    SINKS,
)

NAME = "streambp"
NOTHING_CAST = contextlib.nullcontext()
OURS = (ChunkAttention, LazyMask)  # types of masks in streamed models
UNUSUAL = frozenset({*FOREIGN_ARGUMENTS, *SINKS, PICKS})


# Breaks the graph of compiled code around it, because each chunk has other blocks.
@torch.compiler.disable
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
    """Compute attention as a function of transformers' attention interface: query [B, H, C, D], key
    and value [B, H_kv, C, D] -> [B, C, H, D_v].

    `attention_mask` is a `ChunkAttention` in a layer that is computed chunk by chunk. This object
    has K and V of earlier chunks and the keys that each query may read, so a `sliding_window`
    argument is already included. Any other layer passes the model's own mask: a `LazyMask`, a 4-D
    tensor, or None for causal. The sequence is then attended as one chunk. Keys from another
    sequence (cross-attention to an image) are attended by the model's sdpa.

    Raises:
        UnsupportedModelError: the module attends in a way that streambp does not support, such as
            is_causal=False.
    """
    ours = isinstance(attention_mask, OURS)
    if not ours:
        function = _own_function(module)
        if function is not None:
            # the module expects us to mask the keys that were not picked
            if kwargs.get(PICKS) is not None:
                attention_mask = _only_picked(attention_mask, kwargs[PICKS], key.shape[2])
            if softcap is not None:
                kwargs["softcap"] = softcap
            kwargs.update(dropout=dropout, scaling=scaling)
            found: tuple[Tensor, None] = function(
                module, query, key, value, attention_mask, **kwargs
            )
            return found
    foreign = list[str]()
    sink = None
    picks = None
    if not kwargs.keys().isdisjoint(UNUSUAL):
        foreign, sink, picks = _unusual(attention_mask, kwargs)
    is_causal = kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False
    elsewhere = not ours and (
        not is_causal
        or getattr(module, "is_cross_attention", False)
        or key.shape[2] != query.shape[2]
    )
    if elsewhere:
        foreign += [name for name in SINKS if kwargs.get(name) is not None]
        if softcap is not None:
            foreign.append("softcap")
        # Without a mask, sdpa would be causal from the first key on, for every chunk.
        if attention_mask is None and is_causal:
            foreign.append("no mask over keys from elsewhere")
    elif not is_causal:
        foreign.append("is_causal=False")
    if foreign:
        raise _unsupported(module, foreign)
    # Queries are independent of each other, so the model's own sdpa is right for a chunk of them.
    if elsewhere:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    if not isinstance(attention_mask, ChunkAttention):
        attention_mask = _whole_sequence(query, key, attention_mask, kwargs)
    dtype = autocast_dtype(query.device.type)
    # rotary embeddings leave q and k in float32 and v in half; sdpa casts all three, so do we
    if dtype is not None:
        query, key, value = (
            t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value)
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # [Note: scores under autocast]
    with NOTHING_CAST if dtype is None else without_autocast(query.device.type):
        return attention_mask.attend(
            AttentionCall(query, key, value, scale, dropout, softcap, sink, picks)
        ), None


def _own_function(module: nn.Module) -> Any:
    """Return the attention function of the model's own implementation, "sdpa" for example. None if
    the current thread must use `stream_attention` for this module. [Note: routed configs]"""
    own = _met_by_chance(getattr(module, "config", None))
    if own is None:
        return None
    eager = getattr(sys.modules[type(module).__module__], EAGER_FORWARD, None)
    return AttentionInterface().get(own, eager)


def _unsupported(module: nn.Module, foreign: list[str]) -> UnsupportedModelError:
    """Return the error for an attention module with arguments or properties that are not supported.

    Args:
        module: the attention module.
        foreign: names of these arguments or properties.
    """
    return UnsupportedModelError(
        f"{type(module).__name__} attends with {foreign}, which streambp does not support; "
        "ignoring it would give wrong numbers. Use gradient checkpointing for this model "
        "(streambp.unpatch(model))."
    )


def _only_picked(mask: Any, picks: Tensor, length: int) -> Tensor:
    """Return a 4-D attention mask [B, 1, S, T], bool or additive, in which each query reads only
    the keys that an indexer picked for it.

    Args:
        mask: the model's mask.
        picks: [B, S, k], indices of the picked keys.
        length: T.
    """
    if not isinstance(mask, Tensor):
        raise UnsupportedModelError(
            f"Attention is given keys that an indexer picked, and {type(mask).__name__} in place "
            "of a 4-D mask. Pass attention_mask [B, T], or run this model unpatched "
            "(streambp.unpatch(model))."
        )
    picked = torch.zeros(*picks.shape[:2], length, dtype=torch.bool, device=picks.device)
    picked = picked.scatter_(-1, picks.long(), True)[:, None]  # [B, 1, S, T]
    if mask.dtype == torch.bool:
        return mask & picked
    return mask.masked_fill(~picked, torch.finfo(mask.dtype).min)


def _unusual(
    mask: Any, kwargs: Mapping[str, Any]
) -> tuple[list[str], Tensor | None, Tensor | None]:
    """Return what is special about an attention call: the names of refused arguments, the logits
    [H] of an attention sink, and the keys [B, S, k] that an indexer picked."""
    given = {name for name, value in kwargs.items() if value is not None}
    foreign = [name for name in FOREIGN_ARGUMENTS if name in given]
    picks = kwargs.get(PICKS)
    if picks is not None and not (isinstance(mask, ChunkAttention) and mask.takes_picks):
        foreign.append(PICKS)
    return foreign, next((kwargs[name] for name in SINKS if name in given), None), picks


def stream_mask(config: PreTrainedConfig | None = None, **description: Any) -> Any:
    """Return a `LazyMask` with the arguments of transformers' mask functions. If the current thread
    does not use `stream_attention` for the config, return its own implementation's mask."""
    own = _met_by_chance(config)
    function = LazyMask if own is None else AttentionMaskInterface().get(own, LazyMask)
    return function(config=config, **description)


def _whole_sequence(query: Tensor, key: Tensor, mask: Any, kwargs: Any) -> PrefixChunkAttention:
    length = query.shape[2]
    if key.shape[2] != length:
        raise UnsupportedModelError(
            f"A layer attends {length} queries to {key.shape[2]} keys while its model streams; "
            "streambp supports neither caches nor cross-attention there. Use gradient "
            "checkpointing for this model (streambp.unpatch(model))."
        )
    layout = resolve(
        mask,
        query.shape[0],
        length,
        kwargs.get("position_ids"),
        kwargs.get(DOCUMENT_ENDS),
        query.device,
    )
    stage = Stage.RECOMPUTE if torch.is_grad_enabled() else Stage.FORWARD
    return PrefixChunkAttention(Prefix(layout, length, "auto"), Chunk(0, 0, length), stage)


class Routed(str):
    """Value of a config's `_attn_implementation` while layers with this config are chunked: a
    string with the name of `stream_attention`. [Note: routed configs]

    Attributes:
        own: the config's own implementation, which a copied or pickled config gets back.
        config: id() of the config.
        holders: one object for each `routed` context manager that uses the name.
    """

    own: str | None
    config: int
    holders: set[object]

    def __new__(cls, own: str | None, config: PreTrainedConfig) -> Routed:
        self = super().__new__(cls, NAME)
        self.own = own
        self.config = id(config)
        self.holders = set()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self.own), () if self.own is None else (self.own,))


LOCK = threading.RLock()  # held while a config's name changes
# Names that `routed` holds in this thread, by id.
HERE: contextvars.ContextVar[Mapping[int, Routed]] = contextvars.ContextVar(
    "streambp_routed", default=MappingProxyType({})
)
COMPARED: contextvars.ContextVar[Mapping[int, str]] = contextvars.ContextVar(
    "streambp_unrouted", default=MappingProxyType({})
)


# faster than the config's own attribute access, and called in each layer of each pass
_plain = object.__getattribute__


def own_implementation(config: PreTrainedConfig) -> str | None:
    """Return the attention implementation of a config outside of `routed`, "sdpa" for example, even
    while `routed` has replaced it."""
    name: str | None = _plain(config, "__dict__")[IMPLEMENTATION]
    return name.own if isinstance(name, Routed) else name


def routed(configs: list[PreTrainedConfig]) -> contextlib.AbstractContextManager[None]:
    """Context manager in which models with these configs use `stream_attention` and `LazyMask`.
    Sub-configs are unchanged.

    The name of `stream_attention` is registered in transformers' tables here, so a model unpickled
    in a process without `patch` runs. No model outside of `routed` uses the name.

    [Note: routed configs] Models share config objects, and threads run models. So a config has the
    name from the first of its `routed` in any thread to the last one's end, and then its own
    implementation again. Another thread may find the name without a `routed` of its own. The calls
    of that thread go on to the implementation that the config names.
    """
    if all(map(_is_here, configs)):
        return contextlib.nullcontext()
    return _routed(configs)


@contextlib.contextmanager
def _routed(configs: list[PreTrainedConfig]) -> Iterator[None]:
    AttentionInterface.register(NAME, stream_attention)
    AttentionMaskInterface.register(NAME, stream_mask)
    here = HERE.get()
    holder = object()
    entered: list[tuple[PreTrainedConfig, Routed]] = []
    try:
        for config in configs:
            name: str | None = _plain(config, "__dict__")[IMPLEMENTATION]
            if id(name) in HERE.get():
                continue
            with LOCK:
                name = _plain(config, "__dict__")[IMPLEMENTATION]
                if not isinstance(name, Routed) or not name.holders or name.config != id(config):
                    name = Routed(own_implementation(config), config)
                entered.append((config, name))  # first: Ctrl-C may come between any two of these
                name.holders.add(holder)
                _plain(config, "__dict__")[IMPLEMENTATION] = name
            HERE.set({**HERE.get(), id(name): name})
        yield
    finally:
        if entered:
            HERE.set(here)
        for config, name in entered:
            _leave(config, name, holder)


def _leave(config: PreTrainedConfig, name: Routed, holder: object) -> None:
    with LOCK:
        name.holders.discard(holder)
        if not name.holders and _plain(config, "__dict__")[IMPLEMENTATION] is name:
            _plain(config, "__dict__")[IMPLEMENTATION] = name.own


def _is_here(config: PreTrainedConfig) -> bool:
    """True if the current thread is inside of a `routed` context manager for the config."""
    return id(_plain(config, "__dict__")[IMPLEMENTATION]) in HERE.get()


@contextlib.contextmanager
def unrouted(configs: list[PreTrainedConfig], implementations: list[str]) -> Iterator[None]:
    """Context manager inside of `routed`: models with these configs use other attention
    implementations in this thread.

    Args:
        configs: the configs.
        implementations: the implementation for each config, such as "sdpa".
    """
    before = COMPARED.set(
        {id(config): name for config, name in zip(configs, implementations, strict=True)}
    )
    try:
        yield
    finally:
        COMPARED.reset(before)


def _met_by_chance(config: object) -> str | None:
    """Return the attention implementation that the current thread must use for a config. None if
    that is `stream_attention`.

    Inside of `unrouted` the caller has named the implementation. Outside of `routed` the config
    has. [Note: routed configs]
    """
    if not isinstance(config, PreTrainedConfig):
        return None
    compared = COMPARED.get().get(id(config))
    if compared is not None or _is_here(config):
        return compared
    own = own_implementation(config)
    return None if own == NAME else own
