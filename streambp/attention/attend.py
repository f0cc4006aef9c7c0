"""Compute one chunk's attention over its prefix, block by block, and its gradients.

[Note: prefix accumulation order] Chunks are differentiated from the last to the first. The keys of
chunk i are read by the queries of chunks i, i + 1, ... So once chunk i's own backward has added its
part, the accumulators' slice [s, e) is complete. Autograd then receives the slice as the gradient
of this chunk's K and V.

[Note: scores under autocast] q, k and v arrive in autocast's dtype. Attention then disables
autocast: in forward by `interface.py`, in backward here. Autocast would round the scores of plain
products and their logsumexp. Fused kernels receive the merged logsumexp and assume float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streambp.attention.backend import Backend, BlockPlan, Use
from streambp.attention.kernels import MATH, Task, cut, narrowed, upload, widened
from streambp.attention.kv import KVBuffer, Site
from streambp.attention.masks import DenseMask
from streambp.attention.merge import Attended, MergedOutput, SummedQueries
from streambp.attention.spans import Block, Kind, Spans
from streambp.chunks import Chunk
from streambp.device import without_autocast

Layout = Spans | DenseMask


class Params(NamedTuple):
    """Settings of one attention call for a chunk of the sequence.

    Attributes:
        backend: the kernels that compute the attention, one rectangle of queries and keys (a block)
            at a time.
        scale: factor of q @ k^T, applied before softcap * tanh(scores / softcap).
        softcap: limit of the scores; None: no tanh.
        dropout: probability to drop a weight.
        seed: seed of the first block's dropout mask; block i uses seed + i.
    """

    backend: Backend
    scale: float
    softcap: float | None
    dropout: float
    seed: int

    def tasks(self, plan: BlockPlan, layout: Layout, device: torch.device) -> Iterable[Task]:
        """Return the kernel arguments (`Task`) of each block of a chunk. A block is a rectangle of
        queries and keys, computed by one kernel call.

        Tasks with mask tensors or document boundaries are generated one by one, so that few tensors
        exist at a time.

        Args:
            plan: the chunk's blocks.
            layout: keys that each query may read.
            device: device of the tasks' tensors.
        """
        if plan.by_place and self.dropout == 0.0:
            return list(
                map(functools.partial(Task, scale=self.scale, softcap=self.softcap), plan.blocks)
            )
        return (
            self._task(number, block, layout, device) for number, block in enumerate(plan.blocks)
        )

    def _task(self, number: int, block: Block, layout: Layout, device: torch.device) -> Task:
        """Return the kernel arguments of one block, a rectangle of queries and keys. A block of
        kind MASK gets its part of the mask [B or 1, H or 1, q, k]. A block of kind VARLEN gets
        cu_seqlens of its queries and keys, [documents + 1] each in int32."""
        tile = ends = None
        if block.kind is Kind.MASK:
            assert isinstance(layout, DenseMask)
            tile = layout.tile(block.q0, block.q1, block.k0, block.k1, device)
        elif block.kind is Kind.VARLEN:
            # cached for all layers: an upload synchronizes the host
            key = (block.cu_q, block.cu_k, device)
            if key not in layout.derived:
                layout.derived[key] = upload(block, device)
            ends = layout.derived[key]
        return Task(block, self.scale, tile, ends, self.dropout, self.seed + number, self.softcap)


def attend_blocks(
    q: Tensor,
    site: Site,
    layout: Layout,
    chunk: Chunk,
    params: Params,
    sink: Tensor | None = None,
    keep_wide: bool = False,
    plan: BlockPlan | None = None,
) -> Attended:
    """Compute attention for the queries of one chunk. Keys are read block by block, and the blocks'
    outputs are merged by their logsumexp (DESIGN.md section 2).

    Args:
        q: [B, H, C, D], the queries of the chunk's C tokens.
        site: K and V of the chunk and of all earlier chunks.
        layout: keys that each query may read.
        chunk: the chunk's range of positions.
        params: the kernels, and the scale, softcap and dropout of the attention call.
        sink: [H], the attention sink: logits of one more key without a value; None: no sink.
        keep_wide: also return o before rounding to q's dtype, if backward can use it. [Note:
            rounded outputs]
        plan: the blocks; None: plan them here.

    Returns:
        The output o [B, C, H, D_v] and its logsumexp.
    """
    q = q.transpose(1, 2).contiguous()  # [B, C, H, D]. [Note: one layout]
    if plan is None:
        plan = params.backend.plan(
            layout, chunk, q.shape[0], Use.STREAMED if site.streams else Use.FORWARD
        )
    keep_wide = keep_wide and set(plan.kernels) == {MATH}
    size = site.value_size
    merged = MergedOutput(q, size, plan, chunk, wide=keep_wide or sink is not None)
    padded = size != site.width
    (whole,) = cut((0, q.shape[0], 0, q.shape[1]), q)
    visits = zip(site.visit(plan.blocks), params.tasks(plan, layout, q.device), strict=True)
    for number, ((block, k, v), task) in enumerate(visits):
        q_here = whole
        if not plan.covers[number]:
            queries = (block.b0, block.b1, block.q0 - chunk.start, block.q1 - chunk.start)
            (q_here,) = cut(queries, q)
        o, lse = plan.kernels[number].forward(q_here, k, v, task)
        if padded:
            o = narrowed(o, size)
        merged.add(number, o, lse)
    attended = merged.result()
    if sink is not None:
        attended = with_sink(attended, sink)
    if attended.o.dtype == q.dtype:
        return attended
    return Attended(attended.o.to(q.dtype), attended.lse, attended.o if keep_wide else None)


def with_sink(attended: Attended, sink: Tensor) -> Attended:
    """Merge an attention sink into a chunk's attention output: one more key, read by every query,
    with logit sink [H] and value zero.

    The blocks' backward needs the merged lse alone. The sink's own gradient is -sum over queries of
    exp(sink - lse) * (do . o), because each weight shrinks by its product with the sink's weight.
    """
    sink = sink.detach().to(attended.lse.dtype).view(1, -1, 1)
    lse = torch.logaddexp(attended.lse, sink)  # [B, H, C]
    shrunk = attended.o * torch.exp(attended.lse - lse).transpose(1, 2)[..., None]  # [B, C, H, D_v]
    return Attended(shrunk.to(attended.o.dtype), lse)


class PrefixRead(torch.autograd.Function):
    """Autograd function from one chunk's k and v to the keys and values of all tokens up to the
    chunk's end. Backward adds the gradients of all these keys and values to buffers that the chunks
    share."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, site: KVBuffer, chunk: Chunk
    ) -> tuple[Tensor, Tensor]:
        """Return K [B, H_kv, e, D] and V of the e tokens up to the chunk's end, as views of the
        buffers.

        Args:
            k: [B, H_kv, C, D], the chunk's keys, only to connect the graph: `site` holds their
                values.
            v: the chunk's values, only to connect the graph.
            site: the buffers of K and V.
            chunk: the chunk's range of positions.
        """
        ctx.site = site
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return site.read(chunk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add dK [B, H_kv, e, D] and dV of all tokens up to the chunk's end to the shared buffers.
        Return the gradients of the chunk's own k and v [B, H_kv, C, D], in their dtypes."""
        own = slice(ctx.chunk.start, ctx.chunk.stop)
        parts = list[Tensor | None]()
        for total, grad, like in zip(
            ctx.site.grow_accumulators(), grads, (ctx.site.k, ctx.site.v), strict=True
        ):
            if grad is not None:
                ctx.site.add_once(total[:, : ctx.chunk.stop], grad.transpose(1, 2))
            # The slice is complete. [Note: prefix accumulation order]
            parts.append(total[:, own].transpose(1, 2).to(like.dtype))
        return *parts, None, None


class PrefixAttention(torch.autograd.Function):
    """Autograd function of one chunk's attention to all tokens up to the chunk's end. The inputs
    are q, k, v and the logits of an attention sink; the output is [B, C, H, D_v]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        site: Site,
        layout: Layout,
        chunk: Chunk,
        params: Params,
        saved: Attended | None,
    ) -> Tensor:
        """Return the chunk's attention output o [B, C, H, D_v] in q's dtype.

        Args:
            q: [B, H, C, D].
            k: [B, H_kv, C, D], only to connect the graph: `site` holds the values already.
            v: [B, H_kv, C, D_v], only to connect the graph.
            sink: [H], the attention sink: logits of one more key without a value; None: no sink.
            site: K and V of the chunk and of all earlier chunks.
            layout: keys that each query may read.
            chunk: the chunk's range of positions.
            params: the kernels, scale, softcap and dropout.
            saved: output that the forward pass saved for this chunk; None: compute attention again.
        """
        attended = saved or attend_blocks(q, site, layout, chunk, params, sink, keep_wide=True)
        o = attended.o.contiguous()
        unrounded = attended.wide
        if unrounded is None:
            unrounded = o
        ctx.save_for_backward(q, unrounded, attended.lse, sink)
        ctx.site = site
        ctx.layout = layout
        ctx.chunk = chunk
        ctx.params = params
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return dq [B, H, C, D], dk [B, H_kv, C, D] and dv in q's dtype, and the sink's gradient
        [H], from the output's gradient [B, C, H, D_v].

        dK and dV of earlier chunks are added to buffers in `site`, from which these chunks'
        backward reads them later. [Note: prefix accumulation order]
        """
        q, o, lse, sink = ctx.saved_tensors
        # [B, C, H, D]. [Note: one layout]
        q = q.transpose(1, 2).contiguous()
        do = grad.contiguous()
        site = ctx.site
        layout = ctx.layout
        chunk = ctx.chunk
        params = ctx.params
        plan: BlockPlan = params.backend.plan(
            layout, chunk, q.shape[0], Use.STREAMED if site.streams else Use.BACKWARD
        )
        summed = SummedQueries(q, plan, chunk)
        size = site.value_size
        width = site.width
        # [B, C, H, width]. [Note: padded values]
        do_wide = do
        o_wide = o
        if size != width:
            do_wide = widened(do, width)
            o_wide = widened(o, width)
        do_whole, q_whole, o_whole = cut((0, q.shape[0], 0, q.shape[1]), do_wide, q, o_wide)
        uncast = without_autocast(q.device.type)  # [Note: scores under autocast]
        visits = zip(
            site.visit(plan.blocks, gradients=True),
            params.tasks(plan, layout, q.device),
            strict=True,
        )
        for number, ((block, k, v), task) in enumerate(visits):
            do_here = do_whole
            q_here = q_whole
            o_here = o_whole
            lse_here = lse
            if not plan.covers[number]:
                t0 = block.q0 - chunk.start
                t1 = block.q1 - chunk.start
                do_here, q_here, o_here = cut((block.b0, block.b1, t0, t1), do_wide, q, o_wide)
                lse_here = lse[block.b0 : block.b1, :, t0:t1]
            with uncast:
                dq, dk, dv = plan.kernels[number].backward(
                    do_here, q_here, k, v, o_here, lse_here, task
                )
            summed.add(number, dq)
            if size != width:
                dv = narrowed(dv, size)
            site.add(block, dk, dv)
        dk_own, dv_own = site.take_gradients(chunk)  # [Note: prefix accumulation order]
        dsink = None
        if ctx.needs_input_grad[3]:  # see `with_sink`
            weight = torch.exp(sink.to(lse.dtype).view(1, -1, 1) - lse)  # [B, H, C]
            products = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)  # [B, C, H]
            dsink = -(weight.transpose(1, 2) * products).sum((0, 1)).view_as(sink).to(sink.dtype)
        return (
            summed.result(),
            dk_own.to(q.dtype),
            dv_own.to(q.dtype),
            dsink,
            None,
            None,
            None,
            None,
            None,
        )
