"""Kernels for one block of attention: forward to (o, lse), backward from the *merged* (o, lse).

A block is a rectangle of the attention matrix (`spans.Block`). Forward returns the output and the
logsumexp of the block's own softmax. Backward receives each query's output and logsumexp over all
its keys, merged over all blocks. Every kernel recomputes the weights as exp(score - lse), so the
parts that it returns add up to the exact gradient (DESIGN.md section 2, "Block attention").

Shapes: q [B, H, Tq, D]; k [B, H_kv, Tk, D]; v [B, H_kv, Tk, D_v]; o, do [B, H, Tq, D_v]; lse [B, H,
Tq] in float32, float64 for float64 inputs. A query that reads nothing has o = 0 and lse = -inf.

[Note: one layout] torch caches cuDNN's graphs by the sizes and strides of q, k and v. The strides
of o, dO and the logsumexp are part of a graph but not of its key. So for one key these strides must
always be the same, or a later call reads the tensors wrongly. Therefore `block_views` makes q, o,
dO, K and V from contiguous [B, T, H, D] tensors. Sizes and strides of a block's q and v then fix
the strides of its o and dO, which have D_v columns. The strides of a block with one row do not
depend on T, so other lengths find the same graphs.

[Note: padded values] FlashAttention has one head size for q, k and v. If D_v < D, v and dO get
columns of zeros behind. The scores, their logsumexp and the weights P do not contain v: only o = P
v, dP = dO v^T and dv = P^T dO change. o and dv get columns of zeros, which are dropped, and dP sums
more zeros. So dq and dk are the same, too. The columns must be zeros, because uninitialized memory
may hold NaN.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from streambp.attention.mask_scan import reads
from streambp.attention.position_biases import add_block_gradient, pair_bias
from streambp.attention.spans import Block, BlockKind, Tiling
from streambp.device import has_data

aten = torch.ops.aten
K_BLOCK = 16384
# Shorter blocks do not fill a device; below 64 cuDNN refuses blocks or computes wrong numbers.
CUDNN_MIN_TOKENS = 256


class Task(NamedTuple):
    """Arguments of an attention kernel's forward and backward other than q, k and v, for one
    rectangle of queries and keys. Only the kernel of plain matrix products reads `tile`, `bias` and
    `bias_gradient`.

    Attributes:
        block: the rectangle.
        scale: factor of q @ k^T.
        tile: [B or 1, H or 1, Tq, Tk], the mask of a block that a mask tensor describes (kind
            MASK); None: another kind.
        ends: cu_seqlens of the queries and of the keys, [documents + 1] each in int32, of a block
            with packed documents (kind VARLEN); None: another kind, or the kernel creates the
            tensors.
        dropout: probability to drop a weight.
        seed: seed of the dropout mask.
        softcap: limit of the scores; None: no limit.
        bias: [H, 2 T - 1], T5's bias for each distance of two positions; None: no bias.
        bias_gradient: [H, 2 T - 1], to which backward adds the gradient of `bias`; None: not
            needed.
    """

    block: Block
    scale: float
    tile: Tensor | None = None
    ends: tuple[Tensor, Tensor] | None = None
    dropout: float = 0.0
    seed: int = 0
    softcap: float | None = None
    bias: Tensor | None = None
    bias_gradient: Tensor | None = None


class Kernel(Protocol):
    """Interface of an attention kernel, which computes one block: a rectangle of queries and keys.
    Kernels are stateless. Shapes have B rows, H query heads, H_kv key heads, Tq queries and Tk
    keys. D is the head size of q and k, and D_v that of v.

    Attributes:
        name: name of the kernel.
        kinds: rules for pairs of a query and a key (CAUSAL, FULL, WINDOW and so on) that the kernel
            supports.
        tiling: block sizes that the kernel prefers.
    """

    name: str
    kinds: frozenset[BlockKind]
    tiling: Tiling

    def takes(self, block: Block) -> bool:
        """True if the kernel supports a block's kind, such as CAUSAL, and the numbers of its
        queries and keys. A CAUSAL block is supported if it is a square: its keys are the positions
        of its queries. Some kernels also support CAUSAL blocks with more keys than queries."""
        kind = block.kind
        tiling = self.tiling
        if kind not in self.kinds:
            return False
        is_square = (block.q0, block.q1) == (block.k0, block.k1)
        if kind is BlockKind.CAUSAL and not tiling.bottom_right and not is_square:
            return False
        if tiling.min_tokens is None:
            return True
        return tiling.takes(block.q1 - block.q0) and tiling.takes(block.k1 - block.k0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """Return o [B, H, Tq, D_v] in q's dtype or wider, and lse [B, H, Tq]: attention output and
        logsumexp over this block's keys alone.

        Args:
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D_v], the block's values.
            task: the block, and scale, softcap, dropout and seed of the attention call.
        """
        ...

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, task: Task
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [B, H, Tq, D], dk [B, H_kv, Tk, D] and dv [B, H_kv, Tk, D_v] of this block.

        Args:
            do: [B, H, Tq, D_v], the gradient of the attention output over all keys.
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D_v], the block's values.
            o: [B, H, Tq, D_v], the attention output over all keys, not this block's alone.
            lse: [B, H, Tq], the logsumexp of the scores over all keys.
            task: the block and the settings of forward, with the same seed, so that the same
                weights are dropped.
        """
        ...


def block_views(bounds: tuple[int, int, int, int], *tensors: Tensor) -> list[Tensor]:
    """Return rows [b0, b1) and tokens [t0, t1) of contiguous tensors [B, T, H, D], as views [b, H,
    t, D]. [Note: one layout]

    Args:
        bounds: the four indices b0, b1, t0 and t1.
        tensors: the tensors.
    """
    b0, b1, t0, t1 = bounds
    rows = b1 - b0
    tokens = t1 - t0
    parts = list[Tensor]()
    for x in tensors:
        _, length, heads, size = x.shape
        token = heads * size
        start = x.storage_offset() + (b0 * length + t0) * token
        strides = token * (length if rows > 1 else tokens), size, token, 1
        parts.append(x.as_strided((rows, heads, tokens, size), strides, start))
    return parts


def pad_columns(x: Tensor, width: int) -> Tensor:
    """Pad x [..., D] with zeros to [..., width], for a kernel with one head size; return x itself
    if D is `width`. [Note: padded values]"""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def cut_columns(x: Tensor, size: int) -> Tensor:
    """Return the first `size` columns of x [..., width], as a view: the reverse of `pad_columns`.
    [Note: padded values]"""
    return x if x.shape[-1] == size else x[..., :size]


class MathKernel(Kernel):
    """Attention kernel of plain matrix products in promote_types(dtype, float32), with dropout,
    softcap and any head size. Supports every kind of block except WINDOW (a sliding window) and
    VARLEN (packed documents)."""

    name = "math"
    kinds = frozenset(BlockKind) - {BlockKind.VARLEN, BlockKind.WINDOW}
    tiling = Tiling(q_block=512, k_block=2048, k_forward=2048)

    def takes(self, block: Block) -> bool:
        """True if the kernel supports the block's kind, such as CAUSAL or MASK. Any numbers of
        queries and keys are supported."""
        return block.kind in self.kinds

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """Return the output o [B, H, Tq, D_v] and the logsumexp lse [B, H, Tq] of attention over
        one block's keys alone, both in promote_types(dtype, float32).

        Args:
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D_v], the block's values.
            task: the block (a rectangle of queries and keys), and scale, softcap, dropout and seed.
        """
        # [B, H_kv, G, Tq, Tk]
        scores = self._masked(self._scores(q, k, task), q, k, task)
        v = _widen(v)
        # exp(score - lse) would have the rounding of lse, which is large if the scores are
        largest = scores.amax(-1, keepdim=True)  # [B, H_kv, G, Tq, 1]
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = scores.sub_(largest).exp_()  # [B, H_kv, G, Tq, Tk]
        total = weights.sum(-1, keepdim=True)
        lse = (largest + total.log()).squeeze(-1)  # [B, H_kv, G, Tq]
        total = total.masked_fill(total == 0.0, 1.0)  # a query that reads nothing
        keep = _dropout_mask(weights, task)
        if keep is not None:
            weights = weights * keep
        o = weights.flatten(2, 3) @ v  # [B, H_kv, G * Tq, D_v]
        o = o.unflatten(2, weights.shape[2:4]) / total
        return o.flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, task: Task
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [B, H, Tq, D], dk [B, H_kv, Tk, D] and dv [B, H_kv, Tk, D_v] of one block in
        promote_types(dtype, float32). The dropout mask is drawn again from the seed in `task`.

        Args:
            do: [B, H, Tq, D_v], the gradient of the attention output over all keys.
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D_v], the block's values.
            o: [B, H, Tq, D_v], the attention output over all keys, not this block's alone.
            lse: [B, H, Tq], the logsumexp of the scores over all keys.
            task: the block, and the settings of forward.
        """
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        scores = self._scores(q, k, task)
        # The derivative of softcap * tanh(x / softcap), from its value.
        slope = 1.0 if task.softcap is None else 1.0 - (scores / task.softcap) ** 2
        weights = _weights(self._masked(scores, q, k, task), lse.unflatten(1, groups))
        do, o, q, k, v = (_widen(t) for t in (do, o, q, k, v))
        delta = (do * o).sum(-1).unflatten(1, groups)  # [B, H_kv, G, Tq]
        do = do.unflatten(1, groups).flatten(2, 3)  # [B, H_kv, G * Tq, D_v]
        dweights = (do @ v.mT).view_as(weights)  # [B, H_kv, G, Tq, Tk]
        keep = _dropout_mask(weights, task)
        dropped = weights
        if keep is not None:
            dropped = weights * keep
            dweights = dweights * keep
        dv = dropped.flatten(2, 3).mT @ do  # [B, H_kv, Tk, D_v]
        dscores = weights * (dweights - delta[..., None])  # [B, H_kv, G, Tq, Tk]
        if task.bias_gradient is not None:
            add_block_gradient(task.bias_gradient, dscores.flatten(1, 2).sum(0), task.block)
        dscores = (dscores * (slope * task.scale)).flatten(2, 3)
        dq = (dscores @ k).unflatten(2, weights.shape[2:4]).flatten(1, 2)  # [B, H, Tq, D]
        dk = dscores.mT @ q.unflatten(1, groups).flatten(2, 3)  # [B, H_kv, Tk, D]
        return dq, dk, dv

    def _scores(self, q: Tensor, k: Tensor, task: Task) -> Tensor:
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        scores = _widen(q).unflatten(1, groups).flatten(2, 3) @ _widen(k).mT
        scores = (scores * task.scale).unflatten(2, (groups[1], q.shape[2]))  # [B, H_kv, G, Tq, Tk]
        if task.softcap is None:
            return scores
        return task.softcap * torch.tanh(scores / task.softcap)

    def _masked(self, scores: Tensor, q: Tensor, k: Tensor, task: Task) -> Tensor:
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        if task.bias is not None:
            block = task.block
            bias = pair_bias(task.bias, block.q0, block.q1, block.k0, block.k1)  # [H, Tq, Tk]
            scores = scores + bias.unflatten(0, groups).to(scores.dtype)
        tile = _tile(task, q.device)
        if tile is None:
            return scores
        if tile.dim() == 4:  # [B or 1, H or 1, Tq, Tk]
            tile = tile.unflatten(1, groups) if tile.shape[1] == q.shape[1] else tile[:, :, None]
        if tile.dtype != torch.bool:
            scores = scores + tile.to(scores.dtype)
        return scores.masked_fill(~reads(tile), -torch.inf)


class CpuFlashKernel(Kernel):
    """torch's fused attention kernel for CPUs (online softmax, grouped queries), without dropout.
    D_v must equal D."""

    name = "cpu flash"
    kinds = frozenset({BlockKind.FULL, BlockKind.CAUSAL})
    tiling = Tiling(k_block=K_BLOCK)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """Return the output o [B, H, Tq, D] in q's dtype and the logsumexp lse [B, H, Tq] of
        attention over one block's keys alone.

        Args:
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D], the block's values.
            task: the block (a rectangle of queries and keys), and the scale.
        """
        causal = task.block.kind is BlockKind.CAUSAL
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=task.scale
        )
        return o, lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, task: Task
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [B, H, Tq, D], dk and dv [B, H_kv, Tk, D] of one block in q's dtype.

        Args:
            do: [B, H, Tq, D], the gradient of the attention output over all keys.
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D], the block's values.
            o: [B, H, Tq, D], the attention output over all keys, not this block's alone.
            lse: [B, H, Tq], the logsumexp of the scores over all keys.
            task: the block (a rectangle of queries and keys), and the scale.
        """
        causal = task.block.kind is BlockKind.CAUSAL
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, causal, scale=task.scale
        )


class FlashKernel(Kernel):
    """torch's FlashAttention kernel on CUDA (grouped queries).

    Args:
        bottom_right: True if causal blocks may have more keys than queries, aligned at the last
            key. False if causal blocks must be squares.
        packs: True if the kernel supports sliding windows and packed documents (cu_seqlens). False
            if another kernel must compute these blocks.
    """

    name = "flash"

    def __init__(self, bottom_right: bool = True, packs: bool = True) -> None:
        kinds = {BlockKind.FULL, BlockKind.CAUSAL}
        if packs:
            kinds |= {BlockKind.WINDOW, BlockKind.VARLEN}
        self.kinds = frozenset(kinds)
        self.tiling = Tiling(
            k_block=K_BLOCK, bottom_right=bottom_right, native_window=packs, native_varlen=packs
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """Return the output o [B, H, Tq, D] in q's dtype and the logsumexp lse [B, H, Tq] of
        attention over one block's keys alone. Blocks of packed documents (kind VARLEN) are passed
        to the operator as one packed row [T, H, D].

        Args:
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D], the block's values.
            task: the block (a rectangle of queries and keys), the scale, and cu_seqlens of
                documents.
        """
        assert q.shape[-1] == v.shape[-1], (
            "the operators need one head size; without data they do not notice"
        )
        kind = task.block.kind
        if kind in (BlockKind.FULL, BlockKind.CAUSAL):
            causal = kind is BlockKind.CAUSAL
            o, lse, *_ = aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal, False, scale=task.scale
            )
            return o, lse
        q, k, v = (_token_major(t, kind) for t in (q, k, v))
        lengths, window = _lengths_and_window(task, q.device)
        o, lse, *_ = aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, True, False, scale=task.scale, **window
        )
        # a VARLEN block's lse is [H, T]
        return _head_major(o, kind), lse if kind is BlockKind.WINDOW else lse[None]

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, task: Task
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [B, H, Tq, D], dk and dv [B, H_kv, Tk, D] of one block in q's dtype.

        Args:
            do: [B, H, Tq, D], the gradient of the attention output over all keys.
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D], the block's values.
            o: [B, H, Tq, D], the attention output over all keys, not this block's alone.
            lse: [B, H, Tq], the logsumexp of the scores over all keys.
            task: the block (a rectangle of queries and keys), the scale, and cu_seqlens of
                documents.
        """
        kind = task.block.kind
        no_dropout = (
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, device=q.device),
        )
        lse = lse.contiguous()
        if kind in (BlockKind.FULL, BlockKind.CAUSAL):
            return aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0,
                kind is BlockKind.CAUSAL, *no_dropout,
                scale=task.scale,
            )  # fmt: skip
        do, q, k, v, o = (_token_major(t, kind) for t in (do, q, k, v, o))
        lengths, window = _lengths_and_window(task, q.device)
        lse = lse if kind is BlockKind.WINDOW else lse[0]
        dq, dk, dv = aten._flash_attention_backward(
            do, q, k, v, o, lse, *lengths, 0.0, True, *no_dropout, scale=task.scale, **window
        )
        return _head_major(dq, kind), _head_major(dk, kind), _head_major(dv, kind)


class CudnnKernel(Kernel):
    """cuDNN's fused attention kernel on Hopper and later, with nearly twice FlashAttention-2's
    speed. Causal blocks must be squares, with keys at the positions of the queries."""

    name = "cudnn"
    kinds = frozenset({BlockKind.FULL, BlockKind.CAUSAL})
    tiling = Tiling(k_block=2 * K_BLOCK, k_forward=4 * K_BLOCK, min_tokens=CUDNN_MIN_TOKENS)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """Return the output o [B, H, Tq, D_v] in q's dtype and the logsumexp lse [B, H, Tq] of
        attention over one block's keys alone.

        Args:
            q: [B, H, Tq, D], the block's queries.
            k: [B, H_kv, Tk, D], the block's keys.
            v: [B, H_kv, Tk, D_v], the block's values.
            task: the block (a rectangle of queries and keys), and the scale.
        """
        causal = task.block.kind is BlockKind.CAUSAL
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=task.scale
        )
        return o, lse.squeeze(-1)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, task: Task
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [B, H, Tq, D], dk [B, H_kv, Tk, D] and dv [B, H_kv, Tk, D_v] of one block in
        q's dtype. [Note: one layout]

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
        philox = torch.empty(0, dtype=torch.uint64, device=q.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse[..., None].contiguous(), philox, philox, None, None, None, q.shape[2], k.shape[2],
            0.0, causal, scale=task.scale,
        )  # fmt: skip


MATH = MathKernel()
CPU_FLASH = CpuFlashKernel()
FLASH = FlashKernel()
CUDNN = CudnnKernel()
# ROCm's backward needs equal numbers of queries and keys. Its windows and packed rows have other
# conventions (AOTriton's logsumexp of packed rows is [B, H, longest document]).
SQUARE_FLASH = FlashKernel(bottom_right=False, packs=False)
# FlashAttention-4's operators behind torch 2.11 do not differentiate windows. Documents of packed
# rows may have windows, too.
WINDOWLESS_FLASH = FlashKernel(packs=False)


def upload(block: Block, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the document boundaries (cu_seqlens) of the queries and of the keys in a block of
    packed documents, as tensors [documents + 1] in int32 on `device`. FlashAttention's kernel for
    packed sequences takes these tensors."""
    cu_q = torch.tensor(block.cu_q, dtype=torch.int32, device=device)
    if block.cu_k == block.cu_q:
        return cu_q, cu_q
    return cu_q, torch.tensor(block.cu_k, dtype=torch.int32, device=device)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return the attention weights exp(scores - lse). The weights are 0 instead of NaN for a query
    without any key, whose lse is -inf.

    Args:
        scores: [..., Tq, Tk].
        lse: [..., Tq], the logsumexp of each query's scores over all keys.
    """
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])


def _dropout_mask(weights: Tensor, task: Task) -> Tensor | None:
    """Return the dropout factors of the weights, 0 or 1 / (1 - p), in the weights' shape; None
    without dropout. The seed in `task` alone decides them, so recomputation and backward draw the
    same factors."""
    if task.dropout == 0.0:
        return None
    generator = None
    if has_data(weights):
        generator = torch.Generator(weights.device).manual_seed(task.seed)
    draw = torch.rand(
        weights.shape, generator=generator, device=weights.device, dtype=torch.float32
    )
    return (draw >= task.dropout).to(weights.dtype) / (1.0 - task.dropout)


def _tile(task: Task, device: torch.device) -> Tensor | None:
    block = task.block
    if block.kind is BlockKind.MASK:
        return task.tile
    if block.kind is BlockKind.FULL:
        return None
    query = torch.arange(block.q0, block.q1, device=device)[:, None]
    key = torch.arange(block.k0, block.k1, device=device)
    if block.kind is BlockKind.CAUSAL:
        return key <= query
    assert block.kind is BlockKind.BAND
    assert block.window is not None
    return key > query - block.window


def _token_major(x: Tensor, kind: BlockKind) -> Tensor:
    """Rearrange x [B, H, T, D] to [B, T, H, D], or to [T, H, D] for one packed row of several
    documents (`kind` VARLEN). FlashAttention's operators require these layouts."""
    return x[0].transpose(0, 1) if kind is BlockKind.VARLEN else x.transpose(1, 2)


def _head_major(x: Tensor, kind: BlockKind) -> Tensor:
    """Rearrange x [B, T, H, D] to [B, H, T, D], the layout of tensors that attention kernels
    (`Kernel`) return. If `kind` is VARLEN, x is one packed row [T, H, D] of several documents."""
    return x.transpose(0, 1)[None] if kind is BlockKind.VARLEN else x.transpose(1, 2)


def _lengths_and_window(task: Task, device: torch.device) -> tuple[list[Any], dict[str, int]]:
    """Return arguments of torch's FlashAttention operator for a block (a rectangle of queries and
    keys): a list, and keyword arguments for the sliding window. The list has the cu_seqlens of
    queries and of keys, and the largest numbers of queries and of keys in one document. A block
    that is not packed counts as one document, and its cu_seqlens are None.

    Args:
        task: the block and the kernel's options.
        device: device of the cu_seqlens.
    """
    block = task.block
    window: dict[str, int] = {}
    if block.window is not None:
        window = {"window_size_left": block.window - 1, "window_size_right": 0}
    if block.kind is not BlockKind.VARLEN:
        return [None, None, block.q1 - block.q0, block.k1 - block.k0], window
    ends = task.ends or upload(block, device)
    longest_q = max(b - a for a, b in itertools.pairwise(block.cu_q))
    longest_k = max(b - a for a, b in itertools.pairwise(block.cu_k))
    return [*ends, longest_q, longest_k], window
