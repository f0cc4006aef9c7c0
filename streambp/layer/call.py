"""One call of one decoder layer over one batch, chunk by chunk: what forward keeps and how a chunk is computed again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from streambp.attention.interface import routed
from streambp.attention.keys import CallSite, PrefixMemory
from streambp.attention.masks import DenseMask, LazyMask, resolve
from streambp.attention.prefix import Attended, AttentionPoint, ChunkMask, Prefix, RefillDone, Stage
from streambp.attention.spans import Spans
from streambp.chunks import Chunk, plan_chunks
from streambp.config import SAVES, StreamConfig
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.layer.arguments import Arguments
from streambp.layer.cached import check_chunk_ends, chunk_arguments
from streambp.layer.cost import Cost, Product, Watch
from streambp.layer.engines import engine_hooks_silenced
from streambp.layer.outputs import ChunkOutput, Place, collect, recorded_keys, recording
from streambp.layer.products import UnreadInHalves, UnreadProducts, captured, known, matching, plain_linears, trace_unread
from streambp.layer.recompute import Autocast, RandomState
from streambp.layer.store import Access, InMemory, Offloader, SavedTensors

PROBE_TOKENS = 2


@dataclasses.dataclass
class LayerSite:
    """A streamed layer: the module, how it streams, and what was found out about it.

    Args:
        attends: it hands attention_mask to transformers' attention interface.
        counts_positions: it asks its cache how many tokens came before.
        cache: the argument that takes its cache, if it attends by itself over what that returns.
        whole_because: why it runs whole, checkpointed, instead of in chunks; None if it streams.
        mask_because: the same, of the last call's attention mask alone.
        offloader: where saved tensors go; None: they stay. index: the layer's place among those of its model.
        chunk_rule: chunk size from index, rows, positions and device; None: what the config says.
    """

    layer: nn.Module
    config: StreamConfig
    attends: bool = True
    counts_positions: bool = False
    cache: str | None = None
    whole_because: str | None = None
    mask_because: str | None = None
    offloader: Offloader | None = None
    index: int = 0
    chunk_rule: Callable[[int, int, int, torch.device], int] | None = None
    probed: bool = False
    unread: dict[tuple[Any, ...], UnreadProducts] = dataclasses.field(default_factory=dict)
    unread_in_halves: dict[tuple[Any, ...], UnreadInHalves] = dataclasses.field(default_factory=dict)

    @property
    def because(self) -> str | None:
        """Why its last call ran whole; None if it streamed."""
        return self.whole_because or self.mask_because

    @property
    def forward(self) -> Callable[..., Any]:
        """The class's forward, which takes the layer first."""
        return type(self.layer).forward


class LayerCall:
    """Arguments, chunk plan, prefix and saved tensors of one call of a layer. hidden_states is [..., B, T, h]."""

    def __init__(self, site: LayerSite, arguments: Arguments) -> None:
        config = site.config
        self.site = site
        self.layer = site.layer
        self.saves = config.named_saves
        self.watch: Watch | None = None
        self.arguments = arguments
        self.hidden_states: Tensor = arguments.hidden_states
        self.device = self.hidden_states.device
        del arguments.hidden_states
        batch_size, length = self.hidden_states.shape[-3:-1]
        if length == 0:
            raise StreamBPError("The sequence has no tokens (T = 0). Pass at least one token per row.")
        rule = site.chunk_rule
        size = config.chunk_size if rule is None else rule(site.index, batch_size, length, self.device)
        self.plan = plan_chunks(length, batch_size, size)
        self.configs = [] if site.cache else attention_configs(site.layer)
        self.recorded = recorded_keys()
        self.autocast = Autocast.capture(self.hidden_states.device)
        self.training = site.layer.training
        self.prefix = Prefix(self._layout(), length, config.attention)
        self.store: SavedTensors = InMemory()
        self.random: list[RandomState] = []
        self.linears: dict[str, nn.Linear] = {}
        self.products: list[str] = []  # the Linears whose outputs are kept
        self.product_names: list[str] = []
        self.captured: list[tuple[str, Tensor, int]] = []
        self.extras: list[Place] = []  # extra outputs, in the order in which the Function returns them

    def save_to(self, offloader: Offloader) -> None:
        """Saved tensors go there."""
        length = self.plan.length
        self.store = offloader.open(self.site.index, self.device, length)
        chosen = offloader.chosen_saves(length)
        self.saves = self.saves if chosen is None else chosen
        self.watch = offloader.watch(length, self.site.unread)

    def limit_prefix(self, offloader: Offloader) -> None:
        """Of keys, values and their gradients no more is on the device than the offloader allows.

        Layers that attend by themselves read all of them at once.
        """
        if self.site.cache is not None:
            return
        saved = self.store if self.moves_kv else None
        scratch = functools.partial(offloader.scratch, self.device)
        self.prefix.memory = PrefixMemory(self.plan, offloader.prefix_memory, scratch, saved)

    def _layout(self) -> Any:
        named = self.arguments.named
        batch_size, length = self.hidden_states.shape[-3:-1]
        mask = named.get("attention_mask")
        if self.site.cache is not None and isinstance(mask, Tensor):
            check_chunk_ends(mask, self.plan)
        if not self.site.attends and not isinstance(mask, LazyMask):
            return Spans.causal(batch_size, length)  # nobody reads it
        positions, cu_seq_lens = named.get("position_ids"), named.get("cu_seq_lens_q")
        device = self.hidden_states.device
        layout = resolve(mask, batch_size, length, positions, cu_seq_lens, device)
        if isinstance(layout, DenseMask):
            layout.check_chunk_ends(self.plan, device)
        return layout

    @property
    def gradients_of_a_parameter(self) -> int:
        """How many a parameter gets in a backward pass."""
        return len(self.plan)

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
        self.random.append(RandomState.capture(self.device))

    def unwrap(self, result: Any) -> Tensor:
        """The hidden states out of what a layer returned: a tensor, or a tuple with nothing else in it."""
        self.returns_tuple = isinstance(result, tuple)
        hidden_states, *rest = result if self.returns_tuple else (result,)
        if self.site.cache is not None:
            rest = [None] * len(rest)  # attention weights, which nobody asked for
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
        self,
        hidden_chunk: Tensor,
        chunk: Chunk,
        stage: Stage,
        prefix: Prefix | None = None,
        leaves: list[Tensor] | None = None,
    ) -> tuple[ChunkOutput | None, list[Attended]]:
        """The layer's own forward on hidden_chunk [..., B, C, h]; its output, and what its attention calls left behind.

        Args:
            prefix: another than the call's own, for a probe.
            leaves: this chunk's differentiable arguments, if they are to get gradients.
        """
        saved = self._saved_attention(chunk) if stage is Stage.RECOMPUTE and prefix is None else None
        mask = ChunkMask(prefix or self.prefix, chunk, stage, saved)
        return self.run(hidden_chunk, chunk, mask, leaves), mask.attended

    def run(
        self, hidden_chunk: Tensor, chunk: Chunk, point: AttentionPoint, leaves: list[Tensor] | None = None
    ) -> ChunkOutput | None:
        """The layer's own forward on hidden_chunk, its attention as `point` says; None if that stopped it."""
        named = self.arguments.cut(chunk, leaves)
        if self.site.attends:
            named["attention_mask"] = point
        elif self.site.cache is not None:
            assert isinstance(point, ChunkMask)
            named = chunk_arguments(named, self.site.cache, point)
        before = {name: dict(named[name]) for name in self.arguments.mappings}
        with recording(self.recorded) as recorded:
            try:
                result = self.site.forward(self.layer, hidden_chunk, **named)
            except RefillDone:
                point.finish()
                return None
        point.finish()
        mappings = {name: (before[name], named[name]) for name in before}
        return collect(self.unwrap(result), recorded, mappings)

    def keep(self, chunk: Chunk, hidden_chunk: Tensor, attended: list[Attended]) -> None:
        """Save what backward will want of this chunk."""
        self.store.put("x", chunk.index, hidden_chunk.detach())
        self.keep_products(chunk)
        for site, part in enumerate(attended):
            if "attn_out" in self.saves:
                self.store.put(f"attn_out.{site}", chunk.index, part.o)
                self.store.put(f"lse.{site}", chunk.index, part.lse)
            whole = self.prefix.part(site, chunk) if self.moves_kv else None  # tiles are in the store already
            if whole is not None:
                self.store.put(f"k.{site}", chunk.index, whole[0])
                self.store.put(f"v.{site}", chunk.index, whole[1])
        if self.watch is not None:
            self.watch.chunk_done(self._cost(chunk, hidden_chunk, attended))

    def _cost(self, chunk: Chunk, hidden_chunk: Tensor, attended: list[Attended]) -> Cost:
        tokens = hidden_chunk.numel() // hidden_chunk.shape[-1]
        products = {
            name: Product(linear.out_features * tokens * hidden_chunk.itemsize, 2.0 * linear.weight.numel() * tokens)
            for name, linear in plain_linears(self.layer).items()
        }
        return Cost(
            x=hidden_chunk.nbytes,
            attn_out=sum(part.o.nbytes + part.lse.nbytes for part in attended),
            kv=(chunk.stop - chunk.start) * sum(size.keys for size in self.prefix.sizes_seen),
            attention_flops=sum(self.prefix.flops(chunk, part) for part in attended),
            products=products,
        )

    def keep_products(self, chunk: Chunk) -> None:
        """Save what was captured since the last call."""
        for name, product, version in self.captured:
            if product._version != version:
                raise UnsupportedModelError(
                    f"The output of {name.removeprefix('product.').split('#')[0]} is changed in place inside "
                    f"{type(self.layer).__name__}, so it cannot be saved. Leave it out of StreamConfig's saves."
                )
            self.store.put(name, chunk.index, product)
        self.captured.clear()

    def find_products(self) -> None:
        """Which Linears `saves` names; within `streaming`, where no engine's hooks stand in the way."""
        globs = [name for name in self.saves if name not in SAVES]
        if globs:
            self.linears = plain_linears(self.layer)
            self.products = matching(self.linears, globs)

    @contextlib.contextmanager
    def capturing(self, names: list[str] | None = None) -> Iterator[None]:
        """Within, outputs of the Linears that `saves` names, or of those given here, are collected for `keep`."""

        def sink(name: str, product: Tensor) -> None:
            number = sum(kept.startswith(f"product.{name}#") for kept, *_ in self.captured)
            key = f"product.{name}#{number}"
            self.captured.append((key, product, product._version))
            if key not in self.product_names:
                self.product_names.append(key)

        with captured(self.linears, self.products if names is None else names, sink):
            yield

    @contextlib.contextmanager
    def knowing(self, chunk: Chunk, names: list[str] | None = None, again: bool = False) -> Iterator[None]:
        """Within, those Linears return what was kept of this chunk; again: it will be asked for once more."""
        calls: dict[str, int] = {}

        def source(name: str) -> Tensor | None:
            number = calls.get(name, 0)
            calls[name] = number + 1
            key = f"product.{name}#{number}"
            if not self.store.has(key, chunk.index):
                return None
            return self.store.peek(key, chunk.index) if again else self.store.take(key, chunk.index)

        with known(self.linears, self.products if names is None else names, source):
            yield

    @property
    def moves_kv(self) -> bool:
        """Keys and values leave with the rest; otherwise, if saved, they stay in the prefix's buffers."""
        return "kv" in self.saves and self.store.copies

    def accesses(self) -> tuple[list[Access], int]:
        """The order in which backward reads what was kept, and how many tensors of a chunk it reads at a time."""
        sites, chunks = range(self.prefix.calls or 0), range(len(self.plan))
        order: list[Access] = []
        tiled: list[Access] = []  # the first tiles; each visit of one announces the next
        if self.moves_kv:
            for site, resident in enumerate(self.prefix.resident_tiles(backward=True)):
                if resident is None:
                    order += [(f"{part}.{site}", chunk) for chunk in chunks for part in "kv"]
                else:
                    tiled += [(f"k.{site}", 0), (f"v.{site}", 0)]
        elif "kv" not in self.saves and sites:
            order += [("x", chunk) for chunk in chunks[:-1]]
        products = [name for name in self.product_names if self.store.has(name, 0)]
        attended = [f"{part}.{site}" for site in sites for part in ("attn_out", "lse")] if "attn_out" in self.saves else []
        for chunk in reversed(chunks):
            order += [(name, chunk) for name in ("x", *products, *attended)]
            order += tiled if chunk == chunks[-1] else []
        return order, 1 + len(products) + len(attended)

    def restore_kv(self) -> bool:
        """Bring keys and values back into the prefix's buffers; False if not all of them were kept."""
        sites = range(self.prefix.calls or 0)
        if not all(self.store.has(f"v.{site}", chunk.index) for chunk in self.plan for site in sites):
            return False
        self.prefix.find_saved()
        return True

    def _saved_attention(self, chunk: Chunk) -> list[Attended] | None:
        names = [(f"attn_out.{site}", f"lse.{site}") for site in range(self.prefix.calls or 0)]
        if not all(self.store.has(lse, chunk.index) and self.store.has(o, chunk.index) for o, lse in names):
            return None
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
        x = self.store.peek("x", 0)[..., :tokens, :]
        prefix = Prefix(Spans.causal(x.shape[-3], tokens), tokens, self.prefix.attention)
        with torch.enable_grad(), self.random[0].replayed():
            hidden_chunk = x.detach().requires_grad_(needs_input)
            self.compute(hidden_chunk, Chunk(0, 0, tokens), Stage.RECOMPUTE, prefix)
        return [(site.k, site.v) for site in prefix.sites if isinstance(site, CallSite)]


def attention_configs(layer: nn.Module) -> list[PreTrainedConfig]:
    """Every distinct config that the layer's modules read their attention implementation from."""
    found = {id(m.config): m.config for m in layer.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)}
    return list(found.values())
