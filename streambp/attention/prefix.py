"""Causal-prefix attention: a chunk's queries against the keys and values of everything up to the chunk's end.

Life of one attention call site of one layer, for one batch:

    forward (no graph)   chunk by chunk: append K, V to the buffer, attend, keep (o, lse) if they are to be saved
    refill  (no graph)   if the buffer was not kept: append K, V again, stop the layer there
    recompute (graph)    last chunk to first: `PrefixAttention` attends, or takes the saved (o, lse)
    backward             dQ of the chunk; dK, dV of the whole prefix into accumulators; their slice [s, e) is returned

[Note: prefix accumulation order] Chunks are differentiated from the last to the first. The keys of chunk i are read by
the queries of chunks i, i + 1, ...; so when chunk i's own backward has added its part, the accumulators' slice [s, e) is
complete and can be handed to autograd as the gradient of this chunk's K and V.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch import Tensor

from streambp.attention.kernels import Backend, Task, choose_backend
from streambp.attention.keys import CallSite, PrefixMemory, Site, TiledSite, TileStore
from streambp.attention.masks import DenseMask
from streambp.attention.spans import Block, Kind, Spans, Tiling
from streambp.chunks import Chunk
from streambp.errors import StreamBPError


class Stage(enum.Enum):
    FORWARD = "forward"
    REFILL = "refill"
    RECOMPUTE = "recompute"


class RefillDone(Exception):  # noqa: N818 - control flow, never seen by users
    """Raised inside the layer's forward once K and V are in the buffer: what follows would be thrown away."""


@dataclasses.dataclass
class Attended:
    """What one chunk's attention leaves behind: o [B, H, C, D_v] and lse [B, H, C]."""

    o: Tensor
    lse: Tensor


@dataclasses.dataclass(frozen=True)
class SiteSize:
    """Bytes that one token of an attention call takes in all rows: its K and V, and the accumulators of their gradients."""

    keys: int
    sums: int
    value_size: int  # D_v

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> SiteSize:
        """k [B, H_kv, C, D], v [B, H_kv, C, D_v]."""
        wide = torch.promote_types(k.dtype, torch.float32).itemsize
        elements = (k.numel() + v.numel()) // k.shape[2]
        return cls(elements * k.element_size(), elements * wide, v.shape[3])


class Prefix:
    """All attention calls of one layer over one batch: what their chunks share.

    `sites` are indexed by call order within the layer, which every chunk repeats. memory: how much of the device they may
    use; None: no limit.
    """

    def __init__(self, layout: Spans | DenseMask, length: int, attention: str) -> None:
        self.layout = layout
        self.length = length
        self.attention = attention
        self.sites: list[Site] = []
        self.calls: int | None = None  # attention calls of a whole layer forward
        self.filled_until = 0
        self.backends: set[str] = set()
        self.memory: PrefixMemory | None = None
        self.sizes_seen: list[SiteSize] = []
        self._scratch: TileStore | None = None

    def restore(self, index: int, chunk: Chunk, k: Tensor, v: Tensor, backward: bool = True) -> None:
        """Keep a chunk's K and V for the chunks that follow. backward: their gradients will be needed."""
        if index == len(self.sizes_seen):
            self.sizes_seen.append(SiteSize.of(k, v))
        if index == len(self.sites):
            resident = self.resident_tiles(backward)[index]
            if resident is None:
                sizes = [(t.shape[0], t.shape[1], self.length, t.shape[3]) for t in (k, v)]
                self.sites.append(CallSite(k.new_empty(sizes[0]), v.new_empty(sizes[1])))
            else:
                self.sites.append(self._tiled(index, resident, backward))
        self.sites[index].write(chunk, k, v)

    def part(self, index: int, chunk: Chunk) -> tuple[Tensor, Tensor] | None:
        """K [B, H_kv, C, D] and V of a chunk, as views of the buffers; None if they are in tiles."""
        site = self.sites[index]
        return site.part(chunk) if isinstance(site, CallSite) else None

    @property
    def backward_bytes(self) -> int:
        """What all of it takes on the device in backward."""
        return self.length * sum(size.keys + size.sums for size in self.sizes_seen)

    def flops(self, chunk: Chunk, attended: Attended) -> float:
        """Of attending a chunk once: two products for each pair of a query and a key that it reads."""
        _, heads, _, size = attended.o.shape
        pairs = sum(
            block.pairs * (block.b1 - block.b0) * (0.5 if block.kind is Kind.CAUSAL else 1.0)
            for block in self.layout.blocks(chunk.start, chunk.stop, Tiling())
        )
        return 4.0 * size * heads * pairs

    def resident_tiles(self, backward: bool) -> list[int | None]:
        """For each attention call, how many of its tiles stay on the device; None: it is one buffer."""
        if self.memory is None:
            return [None] * len(self.sizes_seen)
        return self.memory.resident_tiles([size.keys + backward * size.sums for size in self.sizes_seen])

    def find_saved(self) -> None:
        """K and V of every chunk and attention call are in the memory's store: fill the sites from there."""
        assert self.memory is not None
        assert self.memory.saved is not None
        for index, resident in enumerate(self.resident_tiles(backward=True)):
            if resident is not None:
                self.sites.append(self._tiled(index, resident, backward=True, saved=self.memory.saved))
                continue
            for chunk in self.memory.plan:
                k, v = (self.memory.saved.take(f"{part}.{index}", chunk.index) for part in "kv")
                self.restore(index, chunk, k, v)
        self.filled_until = self.length

    def _tiled(self, index: int, resident: int, backward: bool, saved: TileStore | None = None) -> TiledSite:
        assert self.memory is not None
        plan, size = self.memory.plan, self.sizes_seen[index]
        if not backward:
            saved = self.memory.saved
        if self._scratch is None:
            self._scratch = self.memory.scratch()
        # Tokens whose tiles go to the scratch store: all but the resident ones' and the last's.
        moving = plan[len(plan) - 1].start - plan[resident].start if resident < len(plan) - 1 else 0
        self._scratch.reserve(moving * (size.keys * (saved is None) + size.sums * backward))
        return TiledSite(index, plan, saved or self._scratch, self._scratch, resident, saved is not None, size.value_size)

    def drop_buffers(self) -> None:
        self.sites, self.filled_until, self._scratch = [], 0, None


class AttentionPoint:
    """Travels through the layer as `attention_mask` and says what its attention does with a chunk."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """q [B, H, C, D], k and v [B, H_kv, C, D] of this chunk, sink [H] -> [B, C, H, D_v]."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the layer's forward over the chunk."""
        raise NotImplementedError


class ChunkMask(AttentionPoint):
    """A chunk attends to its prefix, which its own keys and values become part of."""

    def __init__(self, prefix: Prefix, chunk: Chunk, stage: Stage, saved: list[Attended] | None = None) -> None:
        self.prefix = prefix
        self.chunk = chunk
        self.stage = stage
        self.saved = saved
        self.attended: list[Attended] = []
        self.call = 0

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        prefix, chunk, index = self.prefix, self.chunk, self.call
        self.call += 1
        backend = choose_backend(prefix.attention, q, v, dropout, softcap)
        prefix.backends.add(backend.name)
        seed = int(torch.randint(2**62, ())) if dropout > 0.0 else 0
        params = Params(backend, q.shape[-1] ** -0.5 if scale is None else scale, softcap, dropout, seed)
        site = self._site(index, k, v)
        if self.stage is Stage.REFILL and self.call == prefix.calls:
            raise RefillDone
        if self.stage is not Stage.RECOMPUTE:
            attended = attend_blocks(q, site, prefix.layout, chunk, params, sink)
            self.attended.append(attended)
            return attended.o.transpose(1, 2).contiguous()
        saved = self.saved[index] if self.saved else None
        out: Tensor = PrefixAttention.apply(q, k, v, sink, site, prefix.layout, chunk, params, saved)
        return out

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """This chunk's k and v [B, H_kv, C, D] -> those of everything up to its end, [B, H_kv, e, D], for layers that
        attend by themselves."""
        self.call += 1
        site = self._site(self.call - 1, k, v)
        if self.stage is Stage.REFILL and self.call == self.prefix.calls:
            raise RefillDone
        assert isinstance(site, CallSite)  # `LayerCall.limit_prefix` leaves these layers' prefixes whole
        if self.stage is not Stage.RECOMPUTE:
            return site.k[:, :, : self.chunk.stop], site.v[:, :, : self.chunk.stop]
        both: tuple[Tensor, Tensor] = PrefixRead.apply(k, v, site, self.chunk)
        return both

    def finish(self) -> None:
        """It must have attended the same number of times as ever."""
        prefix = self.prefix
        if prefix.calls is not None and self.call != prefix.calls:
            raise StreamBPError(
                f"The layer called its attention {self.call} times on chunk {self.chunk.index} and {prefix.calls} times "
                "before. A layer that does not hand attention_mask to transformers' attention interface, the same number "
                "of times for every chunk, cannot be streamed. Please report this model."
            )
        prefix.calls = self.call
        prefix.filled_until = max(prefix.filled_until, self.chunk.stop)

    def _site(self, index: int, k: Tensor, v: Tensor) -> Site:
        prefix, chunk = self.prefix, self.chunk
        if chunk.stop > prefix.filled_until:
            prefix.restore(index, chunk, k.detach(), v.detach(), backward=self.stage is not Stage.FORWARD)
        return prefix.sites[index]


@dataclasses.dataclass(frozen=True)
class Params:
    backend: Backend
    scale: float
    softcap: float | None
    dropout: float
    seed: int

    def task(self, number: int, block: Block, layout: Spans | DenseMask, device: torch.device) -> Task:
        tile = None
        if block.kind is Kind.MASK:
            assert isinstance(layout, DenseMask)
            tile = layout.tile(block.q0, block.q1, block.k0, block.k1, device)
        return Task(block, self.scale, tile, self.dropout, self.seed + number, self.softcap)


def attend_blocks(
    q: Tensor, site: Site, layout: Spans | DenseMask, chunk: Chunk, params: Params, sink: Tensor | None = None
) -> Attended:
    """Attend q [B, H, C, D] of `chunk` block by block and merge by logsumexp (DESIGN.md section 2)."""
    attended = _attend_spans(q, site, layout, chunk, params)
    return attended if sink is None else with_sink(attended, sink)


def with_sink(attended: Attended, sink: Tensor) -> Attended:
    """Merge one more key, read by every query, with logit sink [H] and value zero.

    [Note: sinks] The merged lse is all that the blocks' backward needs; the sink's own gradient is
    -sum over queries of exp(sink - lse) * (do . o), because each weight shrinks by its product with the sink's.
    """
    sink = sink.detach().to(attended.lse.dtype).view(1, -1, 1)
    lse = torch.logaddexp(attended.lse, sink)  # [B, H, C]
    shrunk = attended.o.to(lse.dtype) * torch.exp(attended.lse - lse)[..., None]
    return Attended(shrunk.to(attended.o.dtype), lse)


def _blocks(layout: Spans | DenseMask, chunk: Chunk, params: Params) -> list[Block]:
    """A chunk's blocks, ordered by their keys. [Note: tiles]"""
    return sorted(layout.blocks(chunk.start, chunk.stop, params.backend.tiling), key=lambda block: block.k0)


def _attend_spans(q: Tensor, site: Site, layout: Spans | DenseMask, chunk: Chunk, params: Params) -> Attended:
    blocks = _blocks(layout, chunk, params)
    if len(blocks) == 1 and _covers(blocks[0], chunk, q.shape[0]):
        task = params.task(0, blocks[0], layout, q.device)
        ((o, lse),) = [_forward(q, k, v, task, params) for _, k, v in site.visit(blocks)]
        return Attended(o.to(q.dtype), lse)
    wide = torch.promote_types(q.dtype, torch.float32)
    o = q.new_zeros((*q.shape[:3], site.value_size), dtype=wide)  # [B, H, C, D_v]
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)  # [B, H, C]
    for number, (block, k, v) in enumerate(site.visit(blocks)):
        rows, columns = slice(block.b0, block.b1), slice(block.q0 - chunk.start, block.q1 - chunk.start)
        part_o, part_lse = _forward(q[rows, :, columns], k, v, params.task(number, block, layout, q.device), params)
        o_here, lse_here = o[rows, :, columns], lse[rows, :, columns]
        merged = torch.logaddexp(lse_here, part_lse)
        safe = merged.masked_fill(merged == -torch.inf, 0.0)  # [Note: empty rows]
        o_here.mul_(torch.exp(lse_here - safe)[..., None])
        o_here.add_(part_o * torch.exp(part_lse - safe)[..., None])
        lse_here.copy_(merged)
    return Attended(o.to(q.dtype), lse)


def _forward(q: Tensor, k: Tensor, v: Tensor, task: Task, params: Params) -> tuple[Tensor, Tensor]:
    return params.backend.kernel(task.block.kind).forward(q, k, v, task)


def _covers(block: Block, chunk: Chunk, batch_size: int) -> bool:
    return (block.b0, block.b1, block.q0, block.q1) == (0, batch_size, chunk.start, chunk.stop)


class PrefixRead(torch.autograd.Function):
    """One chunk's k and v in, the prefix's out. What comes back for the prefix goes into the accumulators, as in
    `PrefixAttention`."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, site: CallSite, chunk: Chunk) -> tuple[Tensor, Tensor]:
        ctx.site, ctx.chunk = site, chunk
        ctx.set_materialize_grads(False)
        return site.k[:, :, : chunk.stop], site.v[:, :, : chunk.stop]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        own, parts = slice(ctx.chunk.start, ctx.chunk.stop), []
        for total, grad, like in zip(ctx.site.grow_accumulators(), grads, (ctx.site.k, ctx.site.v), strict=True):
            if grad is not None:
                total[:, :, : ctx.chunk.stop] += grad
            parts.append(total[:, :, own].to(like.dtype))  # complete: [Note: prefix accumulation order]
        return *parts, None, None


class PrefixAttention(torch.autograd.Function):
    """One chunk's attention over its prefix; q, k, v and a sink's logits in, [B, C, H, D_v] out."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        site: Site,
        layout: Spans | DenseMask,
        chunk: Chunk,
        params: Params,
        saved: Attended | None,
    ) -> Tensor:
        attended = saved or attend_blocks(q, site, layout, chunk, params, sink)
        ctx.save_for_backward(q, attended.o, attended.lse, sink)
        ctx.site, ctx.layout, ctx.chunk, ctx.params = site, layout, chunk, params
        return attended.o.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, o, lse, sink = ctx.saved_tensors
        site, layout, chunk, params = ctx.site, ctx.layout, ctx.chunk, ctx.params
        do = grad.transpose(1, 2)  # [B, H, C, D_v]
        dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        for number, (block, k, v) in enumerate(site.visit(_blocks(layout, chunk, params), gradients=True)):
            task = params.task(number, block, layout, q.device)
            rows, columns = slice(block.b0, block.b1), slice(block.q0 - chunk.start, block.q1 - chunk.start)
            do_here, q_here, o_here = (t[rows, :, columns] for t in (do, q, o))
            kernel = params.backend.kernel(block.kind)
            parts = kernel.backward(do_here, q_here, k, v, o_here, lse[rows, :, columns], task)
            dq[rows, :, columns] += parts[0]
            site.add(block, *parts[1:])
        dk_own, dv_own = (part.to(q.dtype) for part in site.take_gradients(chunk))  # [Note: prefix accumulation order]
        dsink = _sink_gradient(do, o, lse, sink) if ctx.needs_input_grad[3] else None
        return dq.to(q.dtype), dk_own, dv_own, dsink, None, None, None, None, None


def _sink_gradient(do: Tensor, o: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """[H]. [Note: sinks]"""
    weight = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)  # [B, H, C]
    gradient = -(weight * (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)).sum((0, 2))
    return gradient.view_as(sink).to(sink.dtype)
