"""Combine the results of blocks: outputs by their logsumexp, gradients by their sum (DESIGN.md 2,
"Block attention").

[Note: rounded outputs] Backward needs do . o of each query. If o is rounded to half precision, a
query's score gradients no longer add up to zero. Sums over queries (biases, small projections) then
show the error. FlashAttention's and cuDNN's backward take the rounded o. Plain products take o
before rounding if it is available, as eager attention's softmax does; and a sink scales o before it
is rounded.

A chunk's first block is not added to zeros. Its output, if it covers the whole chunk, is the tensor
to which the next blocks are added. With two blocks, as in a plain chunk, nothing is written in
float32: both outputs are read, and their sum is rounded once. With more blocks, sums stay in
promote_types(dtype, float32) up to the last block, which writes the final dtype.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from streambp.attention.backend import BlockPlan
from streambp.attention.triton_merge import fits_triton, merge_in_triton
from streambp.chunks import Chunk


@dataclasses.dataclass
class Attended:
    """Attention output of one chunk: o [B, C, H, D_v], contiguous, and its logsumexp lse [B, H, C]
    over all keys.

    [Note: one layout]

    Attributes:
        wide: o before rounding to the queries' dtype, for a backward that can use it. [Note:
            rounded outputs]
        version: o's version counter when the layer received o; None if no layer did, or if o counts
            no versions.
    """

    o: Tensor
    lse: Tensor
    wide: Tensor | None = None
    version: int | None = None

    @property
    def changed(self) -> bool:
        """True if the layer has overwritten o in place after it received o."""
        return self.version is not None and self.o._version != self.version


class MergedOutput:
    """Attention output and logsumexp of a chunk, merged step by step from the outputs over parts of
    the keys.

    Args:
        q: the chunk's queries, [B, C, H, D].
        value_size: D_v.
        plan: the blocks (rectangles of queries and keys) that compute the chunk's attention.
        chunk: the chunk's range of positions.
        wide: True if o must not be rounded to q's dtype, because later operations change it.
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
        """Merge one block's output o [b, H, t, D_v] and logsumexp lse [b, H, t]. Both tensors may
        be overwritten.

        Args:
            number: index of the block in the plan.
            o: attention output over the block's keys alone.
            lse: its logsumexp.
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
        here = self._o[rows, columns]
        merge(here, self._lse[rows, :, columns], o.transpose(1, 2), lse, here)

    def result(self) -> Attended:
        """Return the merged o [B, C, H, D_v] in q's dtype, wider if `wide`, and lse [B, H, C]. The
        object must not be used afterwards.

        A query that is in no block has o = 0 and lse = -inf.
        """
        if self._o is None or self._lse is None:
            self._o, self._lse = self._empty(self._dtype)
        return Attended(self._o.to(self._dtype).contiguous(), self._lse.contiguous())

    def _empty(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        batch, length, heads, _ = self._shape
        make = self._like.new_empty if self._plan.complete else self._like.new_zeros
        return make(self._shape, dtype=dtype), self._like.new_full(
            (batch, heads, length), -torch.inf, dtype=self._wide
        )


def merge(
    o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor, out: Tensor, all_read: bool = False
) -> None:
    """Merge two partial attention outputs, each over some of the keys, into the output over all
    keys.

    Args:
        o: [b, t, H, D], not read where `lse` is -inf. [Note: empty rows]
        lse: [b, H, t] in float32 or float64; replaced by the merged logsumexp.
        part_o: [b, t, H, D], not read where `part_lse` is -inf.
        part_lse: [b, H, t] in the dtype of `lse`.
        out: [b, t, H, D], receives the result; may be `o`.
        all_read: True if every query reads a key of both parts.
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
        all_read: True if no logsumexp is -inf: the same bits in half the time.
    """
    merged = torch.logaddexp(lse, part_lse)  # [b, H, t]
    # [Note: empty rows]
    safe = merged if all_read else merged.clamp(min=torch.finfo(merged.dtype).min)
    weight = (lse - safe).exp_().transpose(1, 2).unsqueeze(-1)  # [b, t, H, 1]
    part_weight = (part_lse - safe).exp_().transpose(1, 2).unsqueeze(-1)
    kept = o * weight  # [b, t, H, D]
    if not all_read:
        kept.masked_fill_(weight == 0.0, 0.0)
    torch.add(kept, part_o * part_weight, out=out)
    lse.copy_(merged)


class SummedQueries:
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
        """Add one block's dq [b, H, t, D], for the block with index `number` in the plan. The
        tensor may be overwritten."""
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
        alone = self._plan.depth == 1 and self._plan.complete
        if self._sum is None:
            if alone:
                self._sum = torch.empty_like(self._q)
            else:
                self._sum = torch.zeros_like(self._q, dtype=self._dtype)
        if alone:
            self._sum[rows, columns].copy_(dq)
        else:
            self._sum[rows, columns].add_(dq)

    def result(self) -> Tensor:
        """Return the sum, dq [B, H, C, D], in q's dtype."""
        total = torch.zeros_like(self._q) if self._sum is None else self._sum
        return total.to(self._q.dtype).transpose(1, 2)
