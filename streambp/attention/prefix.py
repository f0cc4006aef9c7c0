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
from streambp.attention.masks import DenseMask
from streambp.attention.spans import Block, Kind, Spans
from streambp.chunks import Chunk
from streambp.errors import StreamBPError


class Stage(enum.Enum):
    FORWARD = "forward"
    REFILL = "refill"
    RECOMPUTE = "recompute"


class RefillDone(Exception):  # noqa: N818 - control flow, never seen by users
    """Raised inside the layer's forward once K and V are in the buffer: what follows would be thrown away."""


@dataclasses.dataclass
class CallSite:
    """Buffers of one attention call of the layer. B rows, T tokens of the whole sequence."""

    k: Tensor  # [B, H_kv, T, D]
    v: Tensor  # [B, H_kv, T, D_v]
    dk: Tensor | None = None  # [B, H_kv, T, D] in promote_types(dtype, float32)
    dv: Tensor | None = None

    def grow_accumulators(self) -> tuple[Tensor, Tensor]:
        if self.dk is None or self.dv is None:
            dtype = torch.promote_types(self.k.dtype, torch.float32)
            self.dk, self.dv = torch.zeros_like(self.k, dtype=dtype), torch.zeros_like(self.v, dtype=dtype)
        return self.dk, self.dv


@dataclasses.dataclass
class Attended:
    """What one chunk's attention leaves behind: o [B, H, C, D_v] and lse [B, H, C]."""

    o: Tensor
    lse: Tensor


class Prefix:
    """All attention calls of one layer over one batch: what their chunks share.

    `sites` are indexed by call order within the layer, which every chunk repeats.
    """

    def __init__(self, layout: Spans | DenseMask, length: int, attention: str) -> None:
        self.layout = layout
        self.length = length
        self.attention = attention
        self.sites: list[CallSite] = []
        self.calls: int | None = None  # attention calls of a whole layer forward
        self.filled_until = 0
        self.backends: set[str] = set()

    def part(self, index: int, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """K [B, H_kv, C, D] and V of a chunk, as views of the buffers."""
        site = self.sites[index]
        return site.k[:, :, chunk.start : chunk.stop], site.v[:, :, chunk.start : chunk.stop]

    def restore(self, index: int, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Put a chunk's K and V back into the buffers, which the first chunk makes."""
        if index == len(self.sites):
            sizes = [(t.shape[0], t.shape[1], self.length, t.shape[3]) for t in (k, v)]
            self.sites.append(CallSite(k.new_empty(sizes[0]), v.new_empty(sizes[1])))
        for buffer, part in zip(self.part(index, chunk), (k, v), strict=True):
            buffer.copy_(part)

    def drop_buffers(self) -> None:
        self.sites, self.filled_until = [], 0


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

    def _site(self, index: int, k: Tensor, v: Tensor) -> CallSite:
        prefix, chunk = self.prefix, self.chunk
        if chunk.stop > prefix.filled_until:
            prefix.restore(index, chunk, k.detach(), v.detach())
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
    q: Tensor, site: CallSite, layout: Spans | DenseMask, chunk: Chunk, params: Params, sink: Tensor | None = None
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


def _attend_spans(q: Tensor, site: CallSite, layout: Spans | DenseMask, chunk: Chunk, params: Params) -> Attended:
    wide = torch.promote_types(q.dtype, torch.float32)
    shape = (*q.shape[:3], site.v.shape[3])
    blocks = list(layout.blocks(chunk.start, chunk.stop, params.backend.tiling))
    if len(blocks) == 1 and _covers(blocks[0], chunk, q.shape[0]):
        o, lse = _forward(q, site, params, params.task(0, blocks[0], layout, q.device), chunk)
        return Attended(o.to(q.dtype), lse)
    o = q.new_zeros(shape, dtype=wide)  # [B, H, C, D_v]
    lse = q.new_full(shape[:3], -torch.inf, dtype=wide)  # [B, H, C]
    for number, block in enumerate(blocks):
        part_o, part_lse = _forward(q, site, params, params.task(number, block, layout, q.device), chunk)
        rows, columns = slice(block.b0, block.b1), slice(block.q0 - chunk.start, block.q1 - chunk.start)
        o_here, lse_here = o[rows, :, columns], lse[rows, :, columns]
        merged = torch.logaddexp(lse_here, part_lse)
        safe = merged.masked_fill(merged == -torch.inf, 0.0)  # [Note: empty rows]
        o_here.mul_(torch.exp(lse_here - safe)[..., None])
        o_here.add_(part_o * torch.exp(part_lse - safe)[..., None])
        lse_here.copy_(merged)
    return Attended(o.to(q.dtype), lse)


def _covers(block: Block, chunk: Chunk, batch_size: int) -> bool:
    return (block.b0, block.b1, block.q0, block.q1) == (0, batch_size, chunk.start, chunk.stop)


def _forward(q: Tensor, site: CallSite, params: Params, task: Task, chunk: Chunk) -> tuple[Tensor, Tensor]:
    block = task.block
    rows, keys = slice(block.b0, block.b1), slice(block.k0, block.k1)
    queries = slice(block.q0 - chunk.start, block.q1 - chunk.start)
    kernel = params.backend.kernel(block.kind)
    return kernel.forward(q[rows, :, queries], site.k[rows, :, keys], site.v[rows, :, keys], task)


class PrefixAttention(torch.autograd.Function):
    """One chunk's attention over its prefix; q, k, v and a sink's logits in, [B, C, H, D_v] out."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        site: CallSite,
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
        dk, dv = site.grow_accumulators()
        do = grad.transpose(1, 2)  # [B, H, C, D_v]
        dq = torch.zeros_like(q, dtype=dk.dtype)
        for number, block in enumerate(layout.blocks(chunk.start, chunk.stop, params.backend.tiling)):
            task = params.task(number, block, layout, q.device)
            rows, keys = slice(block.b0, block.b1), slice(block.k0, block.k1)
            columns = slice(block.q0 - chunk.start, block.q1 - chunk.start)
            do_here, q_here, o_here = (t[rows, :, columns] for t in (do, q, o))
            parts = params.backend.kernel(block.kind).backward(
                do_here, q_here, site.k[rows, :, keys], site.v[rows, :, keys], o_here, lse[rows, :, columns], task
            )
            dq[rows, :, columns] += parts[0]
            dk[rows, :, keys] += parts[1]
            dv[rows, :, keys] += parts[2]
        own = slice(chunk.start, chunk.stop)  # complete: [Note: prefix accumulation order]
        dk_own, dv_own = dk[:, :, own].to(q.dtype), dv[:, :, own].to(q.dtype)
        dsink = _sink_gradient(do, o, lse, sink) if ctx.needs_input_grad[3] else None
        return dq.to(q.dtype), dk_own, dv_own, dsink, None, None, None, None, None


def _sink_gradient(do: Tensor, o: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """[H]. [Note: sinks]"""
    weight = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)  # [B, H, C]
    gradient = -(weight * (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)).sum((0, 2))
    return gradient.view_as(sink).to(sink.dtype)
