"""One call of one decoder layer over one batch, and how a chunk of it is computed.

What passes from chunk to chunk is in `carried`, what backward will want is in `kept`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streambp.attention.interface import routed
from streambp.attention.keys import CallSite
from streambp.attention.merge import Attended
from streambp.attention.prefix import AttentionPoint, ChunkMask, Prefix, RefillDone, Stage
from streambp.attention.reading import move_ends
from streambp.attention.spans import Spans
from streambp.chunks import Chunk, plan_chunks
from streambp.device import has_data
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.layer.arguments import STATE, Arguments
from streambp.layer.carried import Carried, layout_of
from streambp.layer.documents import in_one, told_of
from streambp.layer.engines import engine_hooks, engine_hooks_silenced
from streambp.layer.fingerprint import Look, Seen
from streambp.layer.kept import Kept
from streambp.layer.outputs import RETURNED, ChunkOutput, Place, collect, recorded_keys, recording
from streambp.layer.products import UnreadProducts, left_out, trace_unread
from streambp.layer.recompute import Autocast, checkpointable, checkpointing_off, parametrizations_computed
from streambp.layer.scans import StartingFrom, scans_of
from streambp.layer.site import LayerSite, attention_configs
from streambp.layer.states import LEAST_TOKENS, States, leaves_of, take_returned, whole_blocks
from streambp.layer.store import Offloader

PROBE_TOKENS = 2


class LayerCall:
    """Arguments, chunk plan, what is carried and what is kept of one call of a layer. hidden_states is [..., B, T, h].

    extras: the extra outputs, in the order in which the layer's Function returns them.
    look: what the layer is made of as the call begins; seen: when its forward is over. [Note: fingerprint]
    """

    def __init__(self, site: LayerSite, arguments: Arguments) -> None:
        config = site.config
        self.site = site
        self.layer = site.layer
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
        if site.states is not None and config.chunk_size == "auto":
            self.plan = plan_chunks(length, batch_size, whole_blocks(self.plan.size))
        self.configs = [] if site.cache else site.of(attention_configs)
        self.scans = scans_of(site.layer) if site.states is not None else []
        self.packed = bool(site.told)  # the site tells of its last call, a backward may be an earlier one's
        self.told = told_of(site.layer) if self.packed else []
        self.recorded = recorded_keys()
        self.autocast = Autocast.capture(self.hidden_states.device)
        self.training = site.layer.training
        self.extras: list[Place] = []
        self.look: Look = site.fingerprint.latest(site.layer)
        self.seen: Seen | None = None
        self.carried = self._carry()
        self.plan = move_ends(self.plan, self.carried.barriers)
        if site.states is not None:
            self.plan = self.plan.with_least(LEAST_TOKENS)
        site.longest = self.plan.longest if self.plan.longest > self.plan.size else None
        self.kept = self._keep()

    def _carry(self) -> Carried:
        layout, barriers = layout_of(self.site, self.arguments.named, self.hidden_states)
        return Carried(self.site, layout, self.plan.length, barriers)

    def _keep(self) -> Kept:
        return Kept(self.site, self.plan, self.carried, self.device)

    def limit_prefix(self, offloader: Offloader) -> None:
        """Of what is carried no more is on the device than the offloader allows."""
        self.carried.limit(self.plan, offloader, self.device, self.kept.store if self.kept.moves_kv else None)

    @property
    def gradients_of_a_parameter(self) -> int:
        """How many a parameter gets in a backward pass."""
        return len(self.plan)

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """Attention goes to ours, and neither transformers' checkpointing nor an engine acts inside this layer."""
        with (
            routed(self.configs),
            checkpointing_off(self.site.of(checkpointable)),
            engine_hooks_silenced(self.site.of(engine_hooks)),
            parametrizations_computed(),
        ):
            yield

    def unwrap(self, result: Any) -> tuple[Tensor, dict[int, Tensor]]:
        """The hidden states out of what a layer returned, and the tensors [B, C, ...] behind them by their place."""
        self.returns_tuple = isinstance(result, tuple)
        hidden_states, *rest = result if self.returns_tuple else (result,)
        if isinstance(hidden_states, Tensor):
            hidden_states = self.arguments.one_dimensional(hidden_states)
        if self.site.cache is not None and any(part is not None and part.is_floating_point() for part in rest):
            rest = [None] * len(rest)  # attention weights, which nobody asked for
        found = {index: part for index, part in enumerate(rest) if part is not None}
        whole = isinstance(hidden_states, Tensor) and hidden_states.shape[-3:-1]
        if not whole or not all(isinstance(part, Tensor) and part.shape[:2] == whole for part in found.values()):
            raise UnsupportedModelError(
                f"{type(self.layer).__name__} returns more than its hidden states and tensors [B, T, ...] beside them, "
                "which streambp does not support. Use gradient checkpointing for this model."
            )
        self.width = len(rest)
        return hidden_states, found

    def wrap(self, hidden_states: Tensor, extras: dict[Place, Tensor]) -> Any:
        """The inverse of `unwrap`."""
        rest = [extras.get(Place(RETURNED, index)) for index in range(self.width)]
        hidden_states = self.arguments.as_given(hidden_states)
        return (hidden_states, *rest) if self.returns_tuple else hidden_states

    def compute(
        self,
        hidden_chunk: Tensor,
        chunk: Chunk,
        stage: Stage,
        prefix: Prefix | None = None,
        leaves: list[Tensor] | None = None,
        states: States | None = None,
    ) -> tuple[ChunkOutput | None, list[Attended]]:
        """The layer's own forward on hidden_chunk [..., B, C, h]; its output, and what its attention calls left behind.

        Args:
            prefix: another than the call's own, for a probe.
            leaves: this chunk's differentiable arguments, if they are to get gradients.
            states: those that the chunk starts from; None: the layer gets no cache, as unpatched.
        """
        saved = self.kept.attended(chunk) if stage is Stage.RECOMPUTE and prefix is None else None
        mask = ChunkMask(prefix or self.carried.prefix, chunk, stage, saved)
        return self.run(hidden_chunk, chunk, mask, leaves, states), mask.attended

    def run(
        self,
        hidden_chunk: Tensor,
        chunk: Chunk,
        point: AttentionPoint,
        leaves: list[Tensor] | None = None,
        states: States | None = None,
    ) -> ChunkOutput | None:
        """The layer's own forward on hidden_chunk, its attention as `point` says; None if that stopped it."""
        documents = self.arguments.documents if self.packed else None
        named, cache = self.carried.handed_to(self.arguments.cut(chunk, leaves), chunk, point, states, documents)
        before = {name: dict(named[name]) for name in self.arguments.mappings}
        told = None if documents is None else (self.told, documents, chunk)
        with recording(self.recorded) as recorded, StartingFrom(self.scans, cache, told):
            try:
                result = self.site.forward(self.layer, self.arguments.as_given(hidden_chunk), **named)
            except RefillDone:
                point.finish()
                return None
        point.finish()
        if self.site.states == STATE:
            result = take_returned(result, cache)
        mappings = {name: (before[name], named[name]) for name in before}
        output = collect(*self.unwrap(result), recorded, mappings)
        output.states = {} if cache is None else cache.after
        return output

    def unread_products(self, linears: dict[str, nn.Linear], needs_input: bool) -> UnreadProducts:
        """Which Linear products this layer's refill and recomputation can leave out; traced once for each situation."""
        autocast = tuple(enabled for _, enabled, _ in self.autocast.states)
        key = (self.arguments.kind, tuple(linears), needs_input, autocast)
        if key not in self.site.unread:
            traced = linears or self.site.states is not None
            # Where a document started with the trace's second chunk, nobody would seem to read its start states.
            with self.arguments.replaced(in_one(self.arguments.named)):
                self.site.unread[key] = self._find_unread(linears, needs_input) if traced else UnreadProducts()
        return self.site.unread[key]

    def _find_unread(self, linears: dict[str, nn.Linear], needs_input: bool) -> UnreadProducts:
        kv: list[tuple[Tensor, Tensor]] = []
        goes_on = False

        def probe() -> list[tuple[Tensor, Tensor]]:
            nonlocal goes_on
            found, goes_on = self._probe(needs_input, Stage.RECOMPUTE, None, None)
            kv.extend(found)
            return kv

        found = dataclasses.replace(trace_unread(linears, probe), states=goes_on)
        known = has_data(self.kept.store.peek("x", 0))
        if known and found.recompute and not self._differentiates_without(linears, found.recompute, needs_input):
            found = dataclasses.replace(found, recompute=frozenset())
        if len(kv) != 1 or not found.refill:  # of several attention calls all but the last are computed in a refill
            return found
        width = kv[0][0].shape[-1]
        try:
            with left_out(linears, found.refill, width=width):
                again, _ = self._probe(False, Stage.REFILL, len(kv), None)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the layer wants its queries whole
            return found
        return dataclasses.replace(found, width=width) if all(map(_same, kv, again)) else found

    def _differentiates_without(self, linears: dict[str, nn.Linear], names: frozenset[str], needs_input: bool) -> bool:
        """Whether gradients are finite where these products are NaN. A trace cannot see who reads them if autograd does not
        save them: a checkpoint inside the layer, a custom Function that keeps tensors by itself."""
        parameters = [parameter for parameter in self.layer.parameters() if parameter.requires_grad]
        finite: list[bool] = []
        with left_out(linears, names):
            self._probe(needs_input, Stage.RECOMPUTE, None, lambda x, y: finite.append(has_gradients(y, [x, *parameters])))
        return all(finite)

    def _probe(
        self, needs_input: bool, stage: Stage, calls: int | None, see: Callable[[Tensor, list[Tensor]], None] | None
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """The layer over its first few tokens; K and V of its attention calls, and whether its end states have a graph.

        If they have, a second chunk starts from them as leaves: it saves for backward what the first does not.

        Args:
            calls: how many attention calls there are, if known.
            see: gets the input and all outputs of both chunks.
        """
        tokens = min(PROBE_TOKENS, self.plan[0].stop)
        length = tokens if len(self.plan) == 1 else 2 * tokens
        x = self.kept.store.peek("x", 0)[..., :tokens, :]
        prefix = Prefix(Spans.causal(x.shape[-3], length), length, self.carried.prefix.attention)
        prefix.calls = calls
        goes_on = False
        outputs: list[ChunkOutput] = []
        with torch.set_grad_enabled(stage is Stage.RECOMPUTE), self.kept.random[0].replayed():
            hidden_chunk = x.detach().requires_grad_(needs_input)
            output, _ = self.compute(hidden_chunk, Chunk(0, 0, tokens), stage, prefix, states={})
            if output is not None:
                outputs.append(output)
                goes_on = any(state.requires_grad for state in output.states.values())
                if goes_on and length > tokens:
                    states = leaves_of(output.states)
                    second, _ = self.compute(hidden_chunk, Chunk(1, tokens, length), stage, prefix, states=states)
                    outputs += [] if second is None else [second]
            if see is not None:
                see(hidden_chunk, [y for o in outputs for y in (o.hidden_states, *o.extras.values(), *o.states.values())])
        kv = [(site.k[:, :tokens], site.v[:, :tokens]) for site in prefix.sites if isinstance(site, CallSite)]
        return kv, goes_on


def has_gradients(outputs: list[Tensor], leaves: list[Tensor]) -> bool:
    """Whether the outputs' sum has finite gradients by those leaves that it depends on."""
    outputs, leaves = ([x for x in found if x.requires_grad] for found in (outputs, leaves))
    if not outputs or not leaves:
        return True
    found = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs], allow_unused=True)
    return all(bool(grad.isfinite().all()) for grad in found if grad is not None)


def _same(pair: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Whether K and V are the same to the bit; without data, whether they have the same shapes."""
    if any(x.shape != y.shape for x, y in zip(pair, other, strict=True)):
        return False
    if not has_data(pair[0]):
        return True
    return all(torch.equal(x, y) for x, y in zip(pair, other, strict=True))
