"""Attention kernels for head sizes that FlashAttention and cuDNN refuse. The docstring of
`attention/kernels.py` defines the shapes.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import torch
from torch import Tensor

from streambp.attention import kernels
from streambp.attention.kernels import (
    CPU_FLASH,
    FLASH,
    K_BLOCK,
    SQUARE_FLASH,
    WINDOWLESS_FLASH,
    Kernel,
    Task,
    cut_columns,
    pad_columns,
)
from streambp.attention.spans import BlockKind, Tiling

LSE_ALIGNMENT = 32  # the memory-efficient kernels' logsumexp has a multiple of this many queries


class PaddedKernel(Kernel):
    """Attention kernel that pads q, k and v with zero columns to one head size, and calls another
    kernel. [Note: padded values]

    Used if q and k must be padded, not v alone. Also used as the fallback for blocks (rectangles of
    queries and keys) that the preferred kernel refuses. If V alone must be padded for all blocks, V
    is padded once in its buffer instead, without this kernel. Each call copies k and v of its block
    to pad them, so blocks are limited to few keys.

    Args:
        inner: the kernel that is called on the padded tensors.
    """

    def __init__(self, inner: Kernel) -> None:
        self.inner = inner
        self.name = f"padded {inner.name}"
        self.kinds = inner.kinds
        self.tiling = dataclasses.replace(
            inner.tiling, k_block=K_BLOCK // 2, k_forward=K_BLOCK // 2
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """Return the output o [B, H, Tq, D_v] and the logsumexp lse [B, H, Tq] of attention over
        one block's keys alone. `o` is a view of the padded output.

        Args:
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D_v], the block's values.
            task: the block (a rectangle of queries and keys), and the kernel's options.
        """
        width = _padded_size(q, v)
        o, lse = self.inner.forward(_pad(q, width), _pad(k, width), _pad(v, width), task)
        return cut_columns(o, v.shape[-1]), lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, task: Task
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [B, H, Tq, D], dk [B, H_kv, Tk, D] and dv [B, H_kv, Tk, D_v] of one block, as
        views of padded tensors.

        Args:
            do: [B, H, Tq, D_v], the gradient of the attention output over all keys.
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D_v], the block's values.
            o: [B, H, Tq, D_v], the attention output over all keys, not this block's alone.
            lse: [B, H, Tq], the logsumexp of the scores over all keys.
            task: the block (a rectangle of queries and keys), and the kernel's options.
        """
        width = _padded_size(q, v)
        size = q.shape[-1]
        do, q, k, wide_v, o = (_pad(x, width) for x in (do, q, k, v, o))
        dq, dk, dv = self.inner.backward(do, q, k, wide_v, o, lse, task)
        return cut_columns(dq, size), cut_columns(dk, size), cut_columns(dv, v.shape[-1])


class EfficientKernel(Kernel):
    """torch's memory-efficient attention kernel on CUDA, for any D and D_v. The operator does not
    support grouped queries, so k and v are repeated for all query heads.

    The operator's backward reads o only to compute the sum of o times the gradient of o for each
    query. Backward may therefore pass o and the logsumexp over all keys of a query, instead of o
    and the logsumexp over the block's keys.
    """

    name = "efficient"
    kinds = frozenset({BlockKind.FULL, BlockKind.CAUSAL})
    # keys and values are repeated for the heads of a group
    tiling = Tiling(k_block=K_BLOCK // 2, k_forward=K_BLOCK // 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """Return the output o [B, H, Tq, D_v] in q's dtype and the logsumexp lse [B, H, Tq] of
        attention over one block's keys alone. `lse` is a view of a tensor that has more entries for
        alignment.

        Args:
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D_v], the block's values.
            task: the block (a rectangle of queries and keys), and the scale.
        """
        causal = task.block.kind is BlockKind.CAUSAL
        groups = q.shape[1] // k.shape[1]
        o, lse, *_ = kernels.aten._scaled_dot_product_efficient_attention(
            q,
            _repeat_heads(k, groups),
            _repeat_heads(v, groups),
            None,
            True,
            0.0,
            causal,
            scale=task.scale,
        )
        return o, lse[..., : q.shape[2]]

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, task: Task
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [B, H, Tq, D] in q's dtype, and dk [B, H_kv, Tk, D] and dv [B, H_kv, Tk, D_v]
        in q's dtype or wider, of one block.

        Args:
            do: [B, H, Tq, D_v], the gradient of the attention output over all keys.
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D_v], the block's values.
            o: [B, H, Tq, D_v], the attention output over all keys, not this block's alone.
            lse: [B, H, Tq], the logsumexp of the scores over all keys.
            task: the block (a rectangle of queries and keys), and the scale.
        """
        causal = task.block.kind is BlockKind.CAUSAL
        groups = q.shape[1] // k.shape[1]
        padding = -lse.shape[2] % LSE_ALIGNMENT
        if padding:
            lse = torch.nn.functional.pad(lse, (0, padding), value=torch.inf)
        else:
            lse = lse.contiguous()
        no_dropout = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = kernels.aten._scaled_dot_product_efficient_attention_backward(
            do, q, _repeat_heads(k, groups), _repeat_heads(v, groups), None, o, lse, no_dropout,
            no_dropout, 0.0,
            [True, True, True, False], causal, scale=task.scale,
        )  # fmt: skip
        return dq, _sum_heads(dk, groups), _sum_heads(dv, groups)


EFFICIENT = EfficientKernel()
PADDED_KERNELS = MappingProxyType(
    {kernel: PaddedKernel(kernel) for kernel in (FLASH, SQUARE_FLASH, WINDOWLESS_FLASH, CPU_FLASH)}
)


def _padded_size(q: Tensor, v: Tensor) -> int:
    """Return the head size to which q, k and v are padded: max(D, D_v), rounded up to a multiple of
    8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _pad(x: Tensor, width: int) -> Tensor:
    """Pad x [B, H, T, D] with zeros to [B, H, T, width], contiguous as [B, T, H, width]. [Note: one
    layout]"""
    if x.shape[-1] == width:
        return x
    return pad_columns(x.transpose(1, 2).contiguous(), width).transpose(1, 2)


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    """Return keys or values `x` with each key head repeated for its `groups` query heads, for a
    kernel without grouped queries: [B, H_kv, T, D] -> [B, H, T, D]."""
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _sum_heads(x: Tensor, groups: int) -> Tensor:
    """Return the gradient `x` summed over the `groups` query heads of each key head: [B, H, T, D]
    -> [B, H_kv, T, D], in float32 or wider. This is the backward of `_repeat_heads`."""
    if groups == 1:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.unflatten(1, (-1, groups)).sum(2, dtype=wide)
