"""Compute one chunk's attention over its prefix (all tokens up to the chunk's end), block by block,
and its gradients. A block is a rectangle of queries and keys, computed by one kernel call.

[Note: prefix accumulation order] Chunks are differentiated from the last to the first. The keys of
chunk i are read by the queries of chunks i, i + 1, ... All these chunks add to the accumulators,
the buffers in which dK and dV of the sequence are summed. So once chunk i's own backward has added
its part, the accumulators' slice [s, e) of the chunk's positions is complete. Autograd then
receives the slice as the gradient of this chunk's K and V.

q, k and v arrive in autocast's dtype. Attention then disables autocast: in forward by
`interface.py`, in backward here. Autocast would round the scores of attention by plain matrix
products, and their logsumexp. Fused kernels receive the merged logsumexp and assume float32.

Blocks are combined here too: outputs by their logsumexp, gradients by their sum (DESIGN.md 2,
"Block attention").

Backward needs do . o of each query. If o is rounded to half precision, a query's score gradients no
longer add up to zero. Gradients that are sums over queries (of biases, of small projections) then
show the error. FlashAttention's and cuDNN's backward take the rounded o. Plain products take o
before rounding if it is available, as eager attention's softmax does; and a sink scales o before it
is rounded.

A chunk's first block is not added to zeros. If this block has all of the chunk's queries, the next
blocks are added to its output. A plain chunk has two blocks, and nothing is written in float32:
both outputs are read, and their sum is rounded once. If a chunk has more blocks, sums stay in
promote_types(dtype, float32) up to the last block, which writes the final dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streambp.attention.backend import Backend, BlockPlan, BlockPurpose
from streambp.attention.kernels import MATH, Task, block_views, cut_columns, pad_columns, upload
from streambp.attention.kv import KVBuffer, KVStorage
from streambp.attention.masks import DenseMask
from streambp.attention.spans import Block, BlockKind, Spans
from streambp.attention.triton_merge import fits_triton, merge_in_triton
from streambp.chunks import Chunk
from streambp.device import without_autocast


@dataclasses.dataclass
class AttentionOutput:
    """Attention output of one chunk: o [B, C, H, D_v], contiguous, and its logsumexp lse [B, H, C]
    over all keys. [Note: one layout]

    Attributes:
        wide: o in promote_types(dtype, float32), before it was rounded to the queries' dtype; None:
            not stored.
        version: o's version counter at the time when o was returned to the layer's code, to detect
            in-place writes. None: o was not returned to a layer, or is an inference tensor.
    """

    o: Tensor
    lse: Tensor
    wide: Tensor | None = None
    version: int | None = None

    @property
    def is_overwritten(self) -> bool:
        """True if the layer has written to o in place since attention returned o. Backward then
        cannot use o."""
        return self.version is not None and self.o._version != self.version


class MergedOutput:
    """Attention output and logsumexp of a chunk, merged step by step from the outputs over parts of
    the keys.

    Args:
        q: the chunk's queries, [B, C, H, D].
        value_size: D_v, the head size of the values.
        plan: the blocks (rectangles of queries and keys) that compute the chunk's attention.
        chunk: the chunk's range of positions.
        wide: dtype of the merged o. True: promote_types(q's dtype, float32), for later operations
            on the unrounded o. False: q's dtype.
    """

    def __init__(
        self, q: Tensor, value_size: int, plan: BlockPlan, chunk: Chunk, wide: bool = False
    ) -> None:
        self._plan = plan
        self._chunk = chunk
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self._dtype = self._wide if wide else q.dtype
        self._like = q
        self._shape = (*q.shape[:3], value_size)
        self._o: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, number: int, o: Tensor, lse: Tensor) -> None:
        """Merge one block's output o [b, H, t, D_v] and logsumexp lse [b, H, t] into the chunk's.
        The caller must not use both tensors afterwards, because this object may overwrite them.

        Args:
            number: index of the block in the plan.
            o: attention output over the block's keys alone.
            lse: logsumexp of the scores of the block's keys alone.
        """
        plan = self._plan
        block = self._plan.blocks[number]
        if plan.covers[number] and self._o is None:
            self._o = o.transpose(1, 2)
            self._lse = lse
            return
        last = number == len(plan.blocks) - 1
        dtype = self._dtype if plan.depth <= 2 or (last and plan.covers[number]) else self._wide
        if self._o is None:
            self._o, self._lse = self._empty(dtype)
        assert self._lse is not None
        if plan.covers[number]:
            out = self._o
            if out.dtype != dtype:
                out = out.new_empty(self._shape, dtype=dtype)
            merge(self._o, self._lse, o.transpose(1, 2), lse, out, plan.all_read)
            self._o = out
            return
        self._o = self._o.to(torch.promote_types(self._o.dtype, dtype))
        rows = slice(block.b0, block.b1)
        columns = slice(block.q0 - self._chunk.start, block.q1 - self._chunk.start)
        part = self._o[rows, columns]
        merge(part, self._lse[rows, :, columns], o.transpose(1, 2), lse, part)

    def result(self) -> AttentionOutput:
        """Return the merged o [B, C, H, D_v] and lse [B, H, C] of the chunk. The dtype of o is that
        of the queries, or promote_types(dtype, float32) if the object was created with wide=True. A
        query that is in no block has o = 0 and lse = -inf. Call this method once, after the last
        `add`."""
        if self._o is None or self._lse is None:
            self._o, self._lse = self._empty(self._dtype)
        return AttentionOutput(self._o.to(self._dtype).contiguous(), self._lse.contiguous())

    def _empty(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        batch, length, heads, _ = self._shape
        make = self._like.new_empty if self._plan.complete else self._like.new_zeros
        return make(self._shape, dtype=dtype), self._like.new_full(
            (batch, heads, length), -torch.inf, dtype=self._wide
        )


def merge(
    o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor, out: Tensor, all_read: bool = False
) -> None:
    """Merge two partial attention outputs of the same queries, each over some of the keys, into the
    output over all keys.

    Args:
        o: [b, t, H, D], not read where `lse` is -inf.
        lse: [b, H, t] in float32 or float64; replaced by the merged logsumexp.
        part_o: [b, t, H, D], not read where `part_lse` is -inf.
        part_lse: [b, H, t] in the dtype of `lse`.
        out: [b, t, H, D], receives the result; may be `o`.
        all_read: True if every query reads a key of both parts, so that no `lse` is -inf. False: a
            query may read no key.
    """
    if not o.is_cpu and fits_triton(o, part_o, out):
        merge_in_triton(o, lse, part_o, part_lse, out)
    else:
        merge_in_torch(o, lse, part_o, part_lse, out, o.is_cpu and all_read)


def merge_in_torch(
    o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor, out: Tensor, all_read: bool = False
) -> None:
    """Merge two partial attention outputs like `merge`, by torch's operators. Tests compare
    `merge_in_triton` with this function.

    Args:
        o: [b, t, H, D].
        lse: [b, H, t]; replaced by the merged logsumexp.
        part_o: [b, t, H, D].
        part_lse: [b, H, t].
        out: [b, t, H, D], receives the result; may be `o`.
        all_read: True if no logsumexp is -inf. Masking of such entries is then skipped, with the
            same result.
    """
    merged_lse = torch.logaddexp(lse, part_lse)  # [b, H, t]
    # -inf - -inf would be NaN for a query that reads no key in either part
    safe = merged_lse if all_read else merged_lse.clamp(min=torch.finfo(merged_lse.dtype).min)
    weight = (lse - safe).exp_().transpose(1, 2).unsqueeze(-1)  # [b, t, H, 1]
    part_weight = (part_lse - safe).exp_().transpose(1, 2).unsqueeze(-1)
    weighted = o * weight  # [b, t, H, D]
    if not all_read:
        weighted.masked_fill_(weight == 0.0, 0.0)
    torch.add(weighted, part_o * part_weight, out=out)
    lse.copy_(merged_lse)


class QueryGradientSum:
    """Gradient dq of a chunk's queries, summed over the blocks (rectangles of queries and keys) of
    its attention.

    Args:
        q: the chunk's queries, [B, C, H, D].
        plan: the blocks.
        chunk: the chunk's range of positions.
    """

    def __init__(self, q: Tensor, plan: BlockPlan, chunk: Chunk) -> None:
        self._q = q
        self._plan = plan
        self._chunk = chunk
        self._dtype = q.dtype if plan.depth <= 2 else torch.promote_types(q.dtype, torch.float32)
        self._sum: Tensor | None = None

    def add(self, number: int, dq: Tensor) -> None:
        """Add one block's dq [b, H, t, D] to the sum. The tensor `dq` may be overwritten.

        Args:
            number: index of the block in the plan.
            dq: the gradient of the block's queries.
        """
        block = self._plan.blocks[number]
        dq = dq.transpose(1, 2)
        if self._plan.covers[number]:
            if self._sum is None:
                self._sum = dq
            else:
                dtype = torch.promote_types(self._sum.dtype, self._dtype)
                self._sum = self._sum.to(dtype).add_(dq)
            return
        rows = slice(block.b0, block.b1)
        columns = slice(block.q0 - self._chunk.start, block.q1 - self._chunk.start)
        is_final = self._plan.depth == 1 and self._plan.complete
        if self._sum is None:
            if is_final:
                self._sum = torch.empty_like(self._q)
            else:
                self._sum = torch.zeros_like(self._q, dtype=self._dtype)
        if is_final:
            self._sum[rows, columns].copy_(dq)
        else:
            self._sum[rows, columns].add_(dq)

    def result(self) -> Tensor:
        """Return the gradient of the chunk's queries, dq [B, H, C, D] in q's dtype, summed over all
        blocks (rectangles of queries and keys)."""
        total = torch.zeros_like(self._q) if self._sum is None else self._sum
        return total.to(self._q.dtype).transpose(1, 2)


SpansOrMask = Spans | DenseMask


class AttentionParams(NamedTuple):
    """Settings of one attention call for a chunk of the sequence.

    Attributes:
        backend: the kernels that compute the attention, one rectangle of queries and keys (a block)
            at a time.
        scale: factor of q @ k^T, applied before softcap * tanh(scores / softcap).
        softcap: limit of the scores; None: no tanh.
        dropout: probability to drop a weight.
        seed: seed of the first block's dropout mask; block i uses seed + i.
        bias: [H, 2 T - 1], T5's bias for each distance of key and query, added to the scores; None:
            no bias.
        bias_gradient: [H, 2 T - 1], to which backward adds the gradient of `bias`; None: not
            needed.
    """

    backend: Backend
    scale: float
    softcap: float | None
    dropout: float
    seed: int
    bias: Tensor | None = None
    bias_gradient: Tensor | None = None

    def tasks(self, plan: BlockPlan, layout: SpansOrMask, device: torch.device) -> Iterable[Task]:
        """Return the kernel arguments (`Task`) of each block of a chunk. A block is a rectangle of
        queries and keys, computed by one kernel call.

        If tasks have mask tensors or document boundaries (cu_seqlens), they are generated one by
        one, so that few of these tensors exist at a time.

        Args:
            plan: the chunk's blocks.
            layout: keys that each query may read.
            device: device of the tasks' tensors.
        """
        if plan.by_place and self.dropout == 0.0 and self.bias is None:
            return list(
                map(functools.partial(Task, scale=self.scale, softcap=self.softcap), plan.blocks)
            )
        return (
            self._task(number, block, layout, device) for number, block in enumerate(plan.blocks)
        )

    def _task(self, number: int, block: Block, layout: SpansOrMask, device: torch.device) -> Task:
        """Return the kernel arguments of one block, a rectangle of queries and keys. A block of
        kind MASK, which a mask tensor describes, gets its part of the mask [B or 1, H or 1, q, k].
        A block of kind VARLEN, which contains packed documents, gets cu_seqlens of its queries and
        keys, [documents + 1] each in int32.

        Args:
            number: the block's index in the plan, added to the seed of dropout.
            block: the block.
            layout: the keys that each query may read.
            device: device of the tensors.
        """
        tile = ends = None
        if block.kind is BlockKind.MASK:
            assert isinstance(layout, DenseMask)
            tile = layout.tile(block.q0, block.q1, block.k0, block.k1, device)
        elif block.kind is BlockKind.VARLEN:
            # cached for all layers: an upload synchronizes the host
            key = (block.cu_q, block.cu_k, device)
            if key not in layout.caches:
                layout.caches[key] = upload(block, device)
            ends = layout.caches[key]
        return Task(
            block,
            self.scale,
            tile,
            ends,
            self.dropout,
            self.seed + number,
            self.softcap,
            self.bias,
            self.bias_gradient,
        )


def attend_blocks(
    q: Tensor,
    kv_storage: KVStorage,
    layout: SpansOrMask,
    chunk: Chunk,
    params: AttentionParams,
    sink: Tensor | None = None,
    keep_wide: bool = False,
    plan: BlockPlan | None = None,
) -> AttentionOutput:
    """Compute attention for the queries of one chunk. Keys are read block by block, and the blocks'
    outputs are merged by their logsumexp (DESIGN.md section 2).

    Args:
        q: [B, H, C, D], the queries of the chunk's C tokens.
        kv_storage: K and V of the chunk and of all earlier chunks.
        layout: keys that each query may read.
        chunk: the chunk's range of positions.
        params: the kernels, and the scale, softcap and dropout of the attention call.
        sink: [H], the attention sink: logits of one more key without a value; None: no sink.
        keep_wide: True: also return o before rounding to q's dtype, as `wide`, if plain matrix
            products compute all blocks. Backward of other kernels reads the rounded o. False:
            `wide` is None.
        plan: the blocks; None: plan them here.

    Returns:
        The output o [B, C, H, D_v] in q's dtype, and its logsumexp.
    """
    q = q.transpose(1, 2).contiguous()  # [B, C, H, D]. [Note: one layout]
    if plan is None:
        plan = params.backend.plan(
            layout,
            chunk,
            q.shape[0],
            BlockPurpose.TILED if kv_storage.streams else BlockPurpose.FORWARD,
        )
    keep_wide = keep_wide and set(plan.kernels) == {MATH}
    size = kv_storage.value_size
    output = MergedOutput(q, size, plan, chunk, wide=keep_wide or sink is not None)
    padded = size != kv_storage.width
    (all_queries,) = block_views((0, q.shape[0], 0, q.shape[1]), q)
    visits = zip(kv_storage.visit(plan.blocks), params.tasks(plan, layout, q.device), strict=True)
    for number, ((block, k, v), task) in enumerate(visits):
        q_here = all_queries
        if not plan.covers[number]:
            queries = (block.b0, block.b1, block.q0 - chunk.start, block.q1 - chunk.start)
            (q_here,) = block_views(queries, q)
        o, lse = plan.kernels[number].forward(q_here, k, v, task)
        if padded:
            o = cut_columns(o, size)
        output.add(number, o, lse)
    attended = output.result()
    if sink is not None:
        attended = add_sink(attended, sink)
    if attended.o.dtype == q.dtype:
        return attended
    return AttentionOutput(attended.o.to(q.dtype), attended.lse, attended.o if keep_wide else None)


def add_sink(attended: AttentionOutput, sink: Tensor) -> AttentionOutput:
    """Return a chunk's attention output, changed as if there were an attention sink: one more key,
    which every query reads, with logits `sink` [H] and with value zero. `attended` has the output
    without the sink.

    The kernels need no sink in backward, because they recompute the weights from the logsumexp,
    which includes the sink. The sink's own gradient is -sum over queries of exp(sink - lse) * (do .
    o).
    """
    sink = sink.detach().to(attended.lse.dtype).view(1, -1, 1)
    lse = torch.logaddexp(attended.lse, sink)  # [B, H, C]
    shrunk = attended.o * torch.exp(attended.lse - lse).transpose(1, 2)[..., None]  # [B, C, H, D_v]
    return AttentionOutput(shrunk.to(attended.o.dtype), lse)


class PrefixRead(torch.autograd.Function):
    """Autograd function for a layer that computes its own attention over its cache. The function
    receives one chunk's k and v, and returns the keys and values of all tokens up to the chunk's
    end. Keys and values of earlier tokens are read from buffers that all chunks of the layer share.

    Backward adds the gradients of all these keys and values to shared sums, and returns the
    gradients of the chunk's own k and v.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, kv_storage: KVBuffer, chunk: Chunk
    ) -> tuple[Tensor, Tensor]:
        """Return K [B, H_kv, e, D] and V of the e tokens up to the chunk's end, as views of the
        buffers.

        Args:
            k: [B, H_kv, C, D], the chunk's keys, only to connect the graph: `kv_storage` holds
                their values.
            v: the chunk's values, only to connect the graph.
            kv_storage: the buffers of K and V.
            chunk: the chunk's range of positions.
        """
        ctx.kv_storage = kv_storage
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return kv_storage.read(chunk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Add `grads`, which are dK [B, H_kv, e, D] and dV of all tokens up to the chunk's end, to
        the shared buffers. Return the gradients of the chunk's own k and v [B, H_kv, C, D], in the
        dtypes of K and V, and None for the other two inputs."""
        positions = slice(ctx.chunk.start, ctx.chunk.stop)
        parts = list[Tensor | None]()
        for total, grad, like in zip(
            ctx.kv_storage.grow_accumulators(),
            grads,
            (ctx.kv_storage.k, ctx.kv_storage.v),
            strict=True,
        ):
            if grad is not None:
                ctx.kv_storage.add_once(total[:, : ctx.chunk.stop], grad.transpose(1, 2))
            # The slice is complete. [Note: prefix accumulation order]
            parts.append(total[:, positions].transpose(1, 2).to(like.dtype))
        return *parts, None, None


class PrefixAttention(torch.autograd.Function):
    """Autograd function of one chunk's attention to all tokens up to the chunk's end. The inputs
    are q, k, v, the logits of an attention sink and T5's bias; the output is [B, C, H, D_v]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        kv_storage: KVStorage,
        layout: SpansOrMask,
        chunk: Chunk,
        params: AttentionParams,
        saved: AttentionOutput | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the chunk's attention output o [B, C, H, D_v] in q's dtype.

        Args:
            q: [B, H, C, D].
            k: [B, H_kv, C, D], only to connect the graph: `kv_storage` holds the values already.
            v: [B, H_kv, C, D_v], only to connect the graph.
            sink: [H], the attention sink: logits of one more key without a value; None: no sink.
            kv_storage: K and V of the chunk and of all earlier chunks.
            layout: keys that each query may read.
            chunk: the chunk's range of positions.
            params: the kernels, scale, softcap and dropout.
            saved: output that the forward pass saved for this chunk; None: compute attention again.
            bias: [1, H, 2 T - 1], T5's bias for each distance of key and query, only to connect the
                graph: `params` holds the values. None: no bias.
        """
        attended = saved or attend_blocks(
            q, kv_storage, layout, chunk, params, sink, keep_wide=True
        )
        o = attended.o.contiguous()
        unrounded = attended.wide
        if unrounded is None:
            unrounded = o
        ctx.save_for_backward(q, unrounded, attended.lse, sink)
        ctx.kv_storage = kv_storage
        ctx.layout = layout
        ctx.chunk = chunk
        ctx.params = params
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return dq [B, H, C, D], dk [B, H_kv, C, D] and dv in q's dtype. Also return the gradients
        of the sink [H] and of the bias [1, H, 2 T - 1], and None for the other inputs. `grad` is
        the output's gradient [B, C, H, D_v].

        dK and dV of earlier chunks are added to buffers in `kv_storage`, from which these chunks'
        backward reads them later. [Note: prefix accumulation order]
        """
        q, o, lse, sink = ctx.saved_tensors
        # [B, C, H, D]. [Note: one layout]
        q = q.transpose(1, 2).contiguous()
        do = grad.contiguous()
        kv_storage = ctx.kv_storage
        layout = ctx.layout
        chunk = ctx.chunk
        params = ctx.params
        dbias = None
        if params.bias is not None and ctx.needs_input_grad[9]:
            dbias = torch.zeros_like(params.bias, dtype=lse.dtype)
            params = params._replace(bias_gradient=dbias)
        plan: BlockPlan = params.backend.plan(
            layout,
            chunk,
            q.shape[0],
            BlockPurpose.TILED if kv_storage.streams else BlockPurpose.BACKWARD,
        )
        summed = QueryGradientSum(q, plan, chunk)
        size = kv_storage.value_size
        width = kv_storage.width
        # [B, C, H, width]. [Note: padded values]
        do_wide = do
        o_wide = o
        if size != width:
            do_wide = pad_columns(do, width)
            o_wide = pad_columns(o, width)
        do_whole, q_whole, o_whole = block_views((0, q.shape[0], 0, q.shape[1]), do_wide, q, o_wide)
        uncast = without_autocast(q.device.type)
        visits = zip(
            kv_storage.visit(plan.blocks, gradients=True),
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
                do_here, q_here, o_here = block_views(
                    (block.b0, block.b1, t0, t1), do_wide, q, o_wide
                )
                lse_here = lse[block.b0 : block.b1, :, t0:t1]
            with uncast:
                dq, dk, dv = plan.kernels[number].backward(
                    do_here, q_here, k, v, o_here, lse_here, task
                )
            summed.add(number, dq)
            if size != width:
                dv = cut_columns(dv, size)
            kv_storage.add(block, dk, dv)
        dk_own, dv_own = kv_storage.take_gradients(chunk)  # [Note: prefix accumulation order]
        dsink = None
        if ctx.needs_input_grad[3]:  # see `add_sink`
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
            None if dbias is None else dbias[None].to(params.bias.dtype),
        )
