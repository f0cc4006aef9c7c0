"""One call of one decoder layer over one batch, chunk by chunk: what forward keeps and how a chunk is computed again."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from streambp.attention.interface import routed
from streambp.attention.masks import LazyMask, resolve
from streambp.attention.prefix import Attended, ChunkMask, Prefix, RefillDone, Stage
from streambp.attention.spans import Spans
from streambp.chunks import Chunk, plan_chunks
from streambp.config import StreamConfig
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.layer.engines import engine_hooks_silenced
from streambp.layer.products import UnreadProducts, trace_unread
from streambp.layer.recompute import Autocast, RandomState
from streambp.layer.store import InMemory, SavedTensors

# Where the tokens are, by argument name; whatever is not named here is handed to every chunk whole.
TOKEN_DIMS = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1}
PROBE_TOKENS = 2


@dataclasses.dataclass
class LayerSite:
    """A streamed layer: the module, how it streams, and what was found out about it (by `_unread_key`)."""

    layer: nn.Module
    config: StreamConfig
    unread: dict[tuple[Any, ...], UnreadProducts] = dataclasses.field(default_factory=dict)
    probed: bool = False

    @property
    def forward(self) -> Callable[..., Any]:
        """The class's forward, which takes the layer first."""
        return type(self.layer).forward


class LayerCall:
    """Arguments, chunk plan, prefix and saved tensors of one call of a layer. hidden_states is [B, T, h]."""

    def __init__(self, site: LayerSite, args: Any, kwargs: Any) -> None:
        config = site.config
        self.site = site
        self.layer = site.layer
        self.saves = config.saves
        self.arguments = _bind(site.forward, site.layer, args, kwargs)
        self.hidden_states: Tensor = self.arguments.pop("hidden_states")
        batch_size, length = self.hidden_states.shape[:2]
        if length == 0:
            raise StreamBPError("The sequence has no tokens (T = 0). Pass at least one token per row.")
        self.plan = plan_chunks(length, batch_size, config.chunk_size)
        self.configs = _attention_configs(site.layer)
        self.autocast = Autocast.capture(self.hidden_states.device)
        self.training = site.layer.training
        self.prefix = Prefix(self._layout(), length, config.attention)
        self.store: SavedTensors = InMemory()
        self.random: list[RandomState] = []

    def _layout(self) -> Any:
        mask = self.arguments.get("attention_mask")
        if mask is not None and not isinstance(mask, LazyMask | Tensor):
            raise UnsupportedModelError(
                f"{type(self.layer).__name__} got attention_mask of type {type(mask).__name__}; streambp reads 2-D and 4-D "
                "tensors. Leave the attention implementation to streambp, or pass tensors."
            )
        batch_size, length = self.hidden_states.shape[:2]
        return resolve(
            mask,
            batch_size,
            length,
            self.arguments.get("position_ids"),
            self.arguments.get("cu_seq_lens_q"),
            self.hidden_states.device,
        )

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """Attention goes to ours, and transformers' checkpointing of this layer is off: its forward would be wrapped."""
        checkpointing = self.layer.__dict__.get("gradient_checkpointing")
        try:
            if checkpointing is not None:
                self.layer.gradient_checkpointing = False  # type: ignore[assignment]
            with routed(self.configs), engine_hooks_silenced(self.layer):
                yield
        finally:
            if checkpointing is not None:
                self.layer.gradient_checkpointing = checkpointing

    def snapshot(self) -> None:
        """Remember the random state that the next chunk starts from."""
        self.random.append(RandomState.capture(self.hidden_states.device))

    def unwrap(self, result: Any) -> Tensor:
        """The hidden states out of what a layer returned: a tensor, or a tuple with nothing else in it."""
        self.returns_tuple = isinstance(result, tuple)
        hidden_states, *rest = result if self.returns_tuple else (result,)
        if not isinstance(hidden_states, Tensor) or any(part is not None for part in rest):
            raise UnsupportedModelError(
                f"{type(self.layer).__name__} returns more than its hidden states, which streambp does not support yet. "
                "Use gradient checkpointing for this model."
            )
        self.width = len(rest)
        return hidden_states

    def wrap(self, hidden_states: Tensor) -> Any:
        """The inverse of `unwrap`."""
        return (hidden_states, *[None] * self.width) if self.returns_tuple else hidden_states

    def compute(
        self, hidden_chunk: Tensor, chunk: Chunk, stage: Stage, prefix: Prefix | None = None
    ) -> tuple[Any, list[Attended]]:
        """The layer's own forward on hidden_chunk [B, C, h]; its result, and what its attention calls left behind."""
        saved = self._saved_attention(chunk) if stage is Stage.RECOMPUTE and prefix is None else None
        mask = ChunkMask(prefix or self.prefix, chunk, stage, saved)
        named = {name: self._cut(name, value, chunk) for name, value in self.arguments.items()}
        named["attention_mask"] = mask
        try:
            result = self.site.forward(self.layer, hidden_chunk, **named)
        except RefillDone:
            result = None
        mask.finish()
        return result, mask.attended

    def keep(self, chunk: Chunk, hidden_chunk: Tensor, attended: list[Attended]) -> None:
        """Save what backward will want of this chunk."""
        self.store.put("x", chunk.index, hidden_chunk.detach())
        if "attn_out" in self.saves:
            for site, part in enumerate(attended):
                self.store.put(f"attn_out.{site}", chunk.index, part.o)
                self.store.put(f"lse.{site}", chunk.index, part.lse)

    def _saved_attention(self, chunk: Chunk) -> list[Attended] | None:
        if "attn_out" not in self.saves:
            return None
        names = [(f"attn_out.{site}", f"lse.{site}") for site in range(self.prefix.calls)]
        return [Attended(self.store.take(o, chunk.index), self.store.take(lse, chunk.index)) for o, lse in names]

    def unread_products(self, linears: dict[str, nn.Linear], trainable: list[str], needs_input: bool) -> UnreadProducts:
        """Which Linear products this layer's refill and recomputation can leave out; traced once for each situation."""
        autocast = tuple(enabled for _, enabled, _ in self.autocast.states)
        key = (tuple(linears), tuple(trainable), needs_input, self.training, autocast)
        if key not in self.site.unread:
            self.site.unread[key] = trace_unread(linears, lambda: self._probe(needs_input)) if linears else UnreadProducts()
        return self.site.unread[key]

    def _probe(self, needs_input: bool) -> list[tuple[Tensor, Tensor]]:
        """A graph of the layer over its first few tokens; K and V of its attention calls."""
        tokens = min(PROBE_TOKENS, self.plan[0].stop)
        x = self.store.peek("x", 0)[:, :tokens]
        prefix = Prefix(Spans.causal(x.shape[0], tokens), tokens, self.prefix.attention)
        with torch.enable_grad(), self.random[0].replayed():
            hidden_chunk = x.detach().requires_grad_(needs_input)
            self.compute(hidden_chunk, Chunk(0, 0, tokens), Stage.RECOMPUTE, prefix)
        return [(site.k, site.v) for site in prefix.sites]

    def _cut(self, name: str, value: Any, chunk: Chunk) -> Any:
        dim = TOKEN_DIMS.get(name)
        if dim is None or value is None:
            return value
        if isinstance(value, tuple | list):
            return type(value)(self._cut(name, part, chunk) for part in value)
        if value.shape[dim] != self.plan.length:
            raise StreamBPError(
                f"{name} has {value.shape[dim]} positions, the sequence has {self.plan.length}. They must be the same."
            )
        return value.narrow(dim, chunk.start, chunk.stop - chunk.start)


def _bind(forward: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The call's arguments by name, without a cache; raise if one needs a gradient that no chunk could return."""
    bound = inspect.signature(forward).bind(layer, *args, **kwargs).arguments
    names = list(bound)
    named = {name: bound[name] for name in names[1:]}
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    named.update({name: None for name in ("past_key_values", "past_key_value", "layer_past") if name in named})
    if "use_cache" in named:
        named["use_cache"] = False
    for name, value in named.items():
        if name != "hidden_states" and isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise UnsupportedModelError(
                f"{type(layer).__name__} takes {name}, which requires a gradient; streambp returns gradients for "
                "hidden_states and parameters only. Use gradient checkpointing for this model."
            )
    return named


def _attention_configs(layer: nn.Module) -> list[PreTrainedConfig]:
    """Every distinct config that the layer's modules read their attention implementation from."""
    found = {id(m.config): m.config for m in layer.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)}
    return list(found.values())
