"""One call of one decoder layer on this rank's shard of the tokens: its plans, what it keeps, what its halves leave out."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from streambp.attention.attend import Params
from streambp.attention.halves import AfterAttention, BeforeAttention
from streambp.attention.masks import resolve_whole
from streambp.attention.spans import Spans
from streambp.chunks import Chunk, ChunkPlan, plan_chunks
from streambp.config import StreamConfig
from streambp.device import has_data
from streambp.distributed.shards import Shards
from streambp.errors import StreamBPError, UnsupportedMaskError
from streambp.layer.arguments import Arguments
from streambp.layer.call import PROBE_TOKENS, LayerCall, has_gradients
from streambp.layer.carried import Carried
from streambp.layer.kept import Kept, linear_of
from streambp.layer.products import UnreadInHalves, left_out, plain_linears, trace
from streambp.layer.recompute import RandomState
from streambp.layer.shadows import Parameters
from streambp.layer.site import LayerSite
from streambp.layer.store import Access, Offloader


def keeps_kv(config: StreamConfig) -> bool:
    """Whether keys and values are saved, which spares exchanges: never where some of them may go missing on one rank only.
    [Note: equal exchanges]"""
    certain = config.offload == "none" or (config.offload == "cpu" and config.on_host_full != "recompute")
    return certain and "kv" in config.named_saves


class ShardedKept(Kept):
    """What the two halves of a shard's chunks keep, and the attention of whole sequences.

    products_before, products_after: the kept Linears that are called before attention and after it.
    """

    def __init__(
        self, site: LayerSite, plan: ChunkPlan, carried: Carried, device: torch.device, attention_plan: ChunkPlan
    ) -> None:
        super().__init__(site, plan, carried, device)
        self.attention_plan = attention_plan
        self.products_before: list[str] = []
        self.products_after: list[str] = []

    @property
    def keeps_kv(self) -> bool:
        return keeps_kv(self.site.config)

    def save_to(self, offloader: Offloader) -> None:
        """What is saved is what the configuration names: what a rank would choose by its own measurements differs."""
        self.store = offloader.open(self.site.index, self.device, self.plan.length)

    def accesses(self) -> tuple[list[Access], int]:
        chunks, whole = range(len(self.plan)), range(len(self.attention_plan))
        before = [name for name in self.product_names if linear_of(name) in self.products_before]
        after = [name for name in self.product_names if linear_of(name) in self.products_after]
        order: list[Access] = [(name, chunk) for chunk in chunks for name in ("x", *before)]
        if self.keeps_kv:
            order += [(f"{part}.0", chunk) for chunk in whole for part in "kv"]
        order += [(name, chunk) for chunk in whole for name in ("attn_out.0", "lse.0")]
        for names in (after, before):
            order += [(name, chunk) for chunk in reversed(chunks) for name in ("x", *names)]
        return order, 1 + max(len(before), len(after))


class ShardedCall(LayerCall):
    """One call of a layer on this rank's shard; `plan` cuts the shard, `attention_plan` the whole sequences."""

    kept: ShardedKept

    def __init__(self, site: LayerSite, arguments: Arguments, shards: Shards) -> None:
        self.shards = shards
        super().__init__(site, arguments)
        self.params: Params | None = None
        self.heads: tuple[int, int] = (0, 0)  # of queries, and of keys and values
        self.kv: tuple[Tensor, Tensor] | None = None  # [B, H_kv / P, T, D] each, if saved on the device
        self.backward_bytes = 0  # of the attention's tensors in backward, on this device
        self.unread = UnreadInHalves()

    def _carry(self) -> Carried:
        length = self.plan.length
        if length != self.shards.length:
            raise StreamBPError(
                f"A layer was given {length} tokens, this rank's shard has {self.shards.length}. Pass all of the shard's "
                "tokens through every layer."
            )
        return Carried(self.site, self._layout(), self.shards.whole_length)

    def _keep(self) -> ShardedKept:
        self.attention_plan = plan_chunks(self.shards.whole_length, self.hidden_states.shape[-3], self.plan.size)
        return ShardedKept(self.site, self.plan, self.carried, self.device, self.attention_plan)

    def _layout(self) -> Spans:
        named = self.arguments.named
        if named.get("cu_seq_lens_q") is not None:
            raise UnsupportedMaskError(
                "cu_seq_lens cannot be split over ranks. Mark packed documents by position_ids that restart, and leave "
                "cu_seq_lens out."
            )
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        return resolve_whole(mask, self.shards.spans, self.shards.length, positions, self.hidden_states.device)

    @property
    def gradients_of_a_parameter(self) -> int:
        return 2 * len(self.plan)  # one from each half

    def look_into_halves(self) -> None:
        """Find out which products each half leaves out; traced once for each situation. Called while streaming."""
        linears = self.site.of(plain_linears)
        autocast = tuple(enabled for _, enabled, _ in self.autocast.states)
        key = (self.arguments.kind, tuple(linears), autocast)
        if linears and key not in self.site.unread_in_halves:
            parameters = Parameters(self.layer, self.device)
            with torch.enable_grad(), RandomState.capture(self.device).replayed(), parameters.shadowed():
                self.site.unread_in_halves[key] = self._trace(linears)
        self.unread = self.site.unread_in_halves.get(key, UnreadInHalves())

    def _trace(self, linears: dict[str, Any]) -> UnreadInHalves:
        chunk = Chunk(0, 0, min(PROBE_TOKENS, self.plan[0].stop))
        x = self.hidden_states.detach()[..., chunk.start : chunk.stop, :].clone().requires_grad_()
        point = BeforeAttention()

        def before() -> list[Tensor]:
            self.run(x, chunk, point)
            assert point.projected is not None
            return [point.projected.q]

        def after() -> list[Tensor]:
            assert point.projected is not None
            q, v = point.projected.q, point.projected.v
            o = q.new_zeros((*q.shape[:3], v.shape[3])).requires_grad_()  # [B, H, C, D_v]
            output = self.run(x, chunk, AfterAttention(o))
            assert output is not None
            return [output.hidden_states, *output.extras.values()]

        first, second = trace(linears, before), trace(linears, after)
        unreached = second.called - second.reached
        found = UnreadInHalves(
            first.called - first.reached, unreached, first.called - first.read, unreached | (second.called - second.read)
        )
        if not has_data(x):
            return found
        # As in `LayerCall._differentiates_without`.
        leaves = [x, *self.layer.parameters()]
        with left_out(linears, found.to_differentiate_after):
            if not has_gradients(after(), leaves):
                found = dataclasses.replace(found, to_differentiate_after=frozenset())
        with left_out(linears, found.to_differentiate_before):
            before()
            made = point.projected
            assert made is not None
            if not has_gradients([made.q, made.k, made.v], leaves):
                found = dataclasses.replace(found, to_differentiate_before=frozenset())
        return found
