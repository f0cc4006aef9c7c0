"""One call of one decoder layer on this rank's shard of the tokens: its plans, what it keeps, what its halves leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streambp.admission.trials import confirmed, few_tokens, gradients_of, same_gradients
from streambp.attention.attend import Params
from streambp.attention.carriers import Layout, attention_mask_of
from streambp.attention.prefix import Prefix
from streambp.attention.spans import Spans
from streambp.chunks import Chunk, ChunkPlan
from streambp.config import StreamConfig
from streambp.device import has_data, is_out_of_memory
from streambp.errors import StreamBPError, UnsupportedMaskError, UnsupportedModelError
from streambp.known_names import DOCUMENT_ENDS
from streambp.layer.arguments import Arguments
from streambp.layer.call import TRIED, LayerCall
from streambp.layer.carried import Carried
from streambp.layer.data_flow import trace
from streambp.layer.products import Labels, UnreadInHalves, computed, left_out
from streambp.layer.recompute import Autocast, RandomState
from streambp.layer.saved import Kept, linear_of
from streambp.layer.shadows import Parameters
from streambp.layer.site import LayerSite
from streambp.offload.manager import Access
from streambp.sharded.halves import AfterAttention, BeforeAttention
from streambp.sharded.masks import resolve_whole
from streambp.sharded.shards import Keys, Piece, Shards


def keeps(config: StreamConfig, name: str) -> bool:
    """Whether "kv" or "attn_out" is saved for certain, which spares exchanges: never where some of it may go missing on one
    rank only. [Note: equal exchanges]"""
    certain = config.offload == "none" or (config.offload == "cpu" and config.on_host_full != "recompute")
    return certain and name in config.named_saves


class ShardedKept(Kept):
    """What the two halves of a shard's chunks keep, and the attention of whole sequences.

    products_before, products_after: the kept Linears that are called before attention and after it.
    """

    def __init__(
        self,
        site: LayerSite,
        plan: ChunkPlan,
        carried: Carried,
        device: torch.device,
        autocast: Autocast,
        pieces: list[Piece],
        gathers: bool,
    ) -> None:
        super().__init__(site, plan, carried, device, autocast)
        self.pieces, self.gathers = pieces, gathers
        self.products_before: list[str] = []
        self.products_after: list[str] = []

    lends_attended = False
    chosen_here = False  # what a rank would choose by its own memory differs. [Note: equal exchanges]

    @property
    def keeps_kv(self) -> bool:
        """Whether K and V of whole sequences are saved: where they are gathered, only while a layer attends.
        [Note: equal exchanges]"""
        return keeps(self.site.config, "kv") and not self.gathers

    @property
    def spares_keys(self) -> bool:
        """Whether attention's results are saved for certain, so that no keys are gathered to attend again."""
        return keeps(self.site.config, "attn_out") and self.gathers

    def accesses(self) -> tuple[list[Access], int]:
        """As in `Kept`, for the two halves and the attention between them.

        In order: inputs of the shard's chunks; K and V, if kept, and attention's results of the whole sequences' chunks;
        what the half after attention reads; what the half before it reads. Both halves go from the last chunk to the first.
        """
        chunks, whole = range(len(self.plan)), range(len(self.pieces))
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
    """One call of a layer on this rank's shard; `plan` cuts the shard, `pieces` what it attends."""

    kept: ShardedKept

    def __init__(self, site: LayerSite, arguments: Arguments, shards: Shards) -> None:
        self.shards = shards
        super().__init__(site, arguments)
        self.gradients_of_a_parameter *= 2  # one from each half
        self.params: Params | None = None
        self.heads: tuple[int, int] = (0, 0)  # of queries, and of keys and values
        self.value_size = 0  # D_v
        self.sinks: Tensor | None = None  # [H'] of this rank's queries
        self.keys: Keys | None = None  # of whole sequences, if saved on the device
        self.backward_bytes = 0  # of the attention's tensors in backward, on this device
        self.unread = UnreadInHalves()

    def _carry(self) -> Carried:
        length = self.plan.length
        if length != self.shards.length:
            raise StreamBPError(
                f"A layer was given {length} tokens, this rank's shard has {self.shards.length}. Pass all of the shard's "
                "tokens through every layer."
            )
        layout = Layout(self._layout())
        prefix = Prefix(layout.spans, self.shards.whole_length, self.site.config.attention)
        return Carried(layout, prefix, self.site.kind.attention.in_tiles)

    def _keep(self) -> ShardedKept:
        self.pieces = self.shards.pieces(self.rows, self.plan.size)
        return ShardedKept(
            self.site, self.plan, self.carried, self.device, self.autocast, self.pieces, self.shards.gathers_keys
        )

    def _layout(self) -> Spans:
        named = self.arguments.named
        if named.get(DOCUMENT_ENDS) is not None:
            raise UnsupportedMaskError(
                "cu_seq_lens cannot be split over ranks. Mark packed documents by position_ids that restart, and leave "
                "cu_seq_lens out."
            )
        mask = attention_mask_of(named)
        shards, device = self.shards, self.hidden_states.device
        return resolve_whole(mask, shards.spans, shards.length, shards.positions, device, shards.everyones)

    def look_into_halves(self) -> None:
        """Find out which products each half leaves out; traced once for each situation. Called while streaming.

        Raises:
            UnsupportedModelError: the layer overwrites its input. What it computed of it before, unpatched, is then
                differentiated at the new values, which a half before attention does not see.
        """
        if self.site.overwritten.inputs:
            raise UnsupportedModelError(
                f"{type(self.layer).__name__} overwrites its hidden_states through a kernel that autograd does not see (a "
                "fused residual add?), which streambp does not support where sequences are split over ranks. Use a kernel "
                "that returns a tensor of its own, or train this model without splitting sequences."
            )
        linears = self.site.linears
        autocast = tuple(enabled for _, enabled, _ in self.autocast.states)
        key = (self.arguments.kind, tuple(linears), autocast, min(TRIED, self.plan.length))
        if linears and key not in self.site.unread_in_halves:
            parameters = Parameters(self.layer, self.device)
            with torch.enable_grad(), RandomState.capture(self.device).replayed(), parameters.shadowed():
                self.site.unread_in_halves[key] = self._trace(linears)
        self.unread = self.site.unread_in_halves.get(key, UnreadInHalves())

    def _trace(self, linears: dict[str, Any]) -> UnreadInHalves:
        chunk = Chunk(0, 0, min(TRIED, self.plan.length))
        with few_tokens(self, self.hidden_states.detach(), chunk.stop, self.site.turns) as x:
            return _Halves(self, linears, x, chunk, RandomState.capture(self.device)).unread()


class _Halves:
    """Both halves over x [..., B, C, h], each run from the same random state."""

    def __init__(self, call: ShardedCall, linears: dict[str, Any], x: Tensor, chunk: Chunk, random: RandomState) -> None:
        self.call, self.linears, self.chunk, self.random = call, linears, chunk, random
        self.x = x.clone().requires_grad_()
        with torch.no_grad():
            q, _, v = self.before()
        self.o = torch.randn_like(v[:, :1].expand(-1, q.shape[1], -1, -1)).requires_grad_()  # [B, H, C, D_v]

    def before(self) -> list[Tensor]:
        point = BeforeAttention()
        with self.random.replayed():
            self.call.run(self.x, self.chunk, point)
        made = point.projected
        assert made is not None
        return [made.q, made.k, made.v]

    def after(self) -> list[Tensor]:
        with self.random.replayed():
            output = self.call.run(self.x, self.chunk, AfterAttention(self.o))
        assert output is not None
        return [output.hidden_states, *output.extras.values()]

    def unread(self) -> UnreadInHalves:
        """What the traces propose, as far as trials confirm it. [Note: writes through pointers]"""
        try:
            first, second = trace(self.linears, lambda: self.before()[:1]), trace(self.linears, self.after)
        except Exception as error:  # as in `trials.unread_products`
            if is_out_of_memory(error):
                raise
            return UnreadInHalves()
        unreached = second.called - second.reached
        queries, before, after = first.called - first.reached, first.called - first.read, second.called - second.read
        found = UnreadInHalves(queries, unreached, before, unreached | after)
        if not has_data(self.x):
            return found
        return UnreadInHalves(
            self._unchanged(found.for_queries, lambda: self.before()[:1]),
            self._unchanged(found.for_output, self.after),
            self._differentiated(found.to_differentiate_before, self.before),
            self._differentiated(found.to_differentiate_after, self.after),
        )

    def _unchanged(self, names: Labels, run: Callable[[], list[Tensor]]) -> Labels:
        with torch.no_grad():
            expected = run()

            def holds(names: Labels) -> bool:
                with left_out(self.linears, names):
                    return all(map(torch.equal, run(), expected))

            return confirmed(names, holds)

    def _differentiated(self, names: Labels, run: Callable[[], list[Tensor]]) -> Labels:
        def gradients(names: Labels) -> list[Tensor | None]:
            others = [name for name in self.linears if name not in names]
            with self.random.replayed(), computed(self.linears, others), left_out(self.linears, names):
                return gradients_of(run(), [self.x, self.o, *self.call.layer.parameters()])

        expected = gradients(frozenset())
        return confirmed(names, lambda names: same_gradients(self.call, gradients(names), expected))
