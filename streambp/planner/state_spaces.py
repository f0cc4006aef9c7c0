"""Make the allocations of kernels of state-space models, when memory is counted on tensors without
data.

Each function here makes the allocations of its kernel's source, in the same order and with the same
lifetime. Only products with weights are computed, which the fused forms contain as well. Sources:
mamba_ssm 2.3.2.post1 (`ops/selective_scan_interface.py` and `csrc/selective_scan` for Mamba 1;
`ops/triton/ssd_*.py` and `layernorm_gated.py` for Mamba 2), without its deterministic mode.

Mamba 1: u, dt, z [B, D, T], A [D, N], B, C [B, N, T], state [B, D, N]. Mamba 2: x [B, T, H, P], dt
[B, T, H], B, C [B, T, G, N], state [B, H, P, N], in NB blocks of Q tokens. Running states are
float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from streambp.planner.count import KernelReplay, add_flops

SCAN_BLOCK = 2048  # tokens for each saved state of Mamba 1's scan
# multiprocessors of the GPU (an H100's and H200's), over which Mamba 2's backward distributes the
# heads of a group
GPU_PROCESSORS = 132
BACKWARD_BLOCK_ROWS = 32  # rows of a block with separate sums in Mamba 2's backward
STATE_TILE = 64  # elements of a state with separate sums in Mamba 2's backward
ACCUMULATION_DTYPE = torch.float32


def _rows(x: Tensor) -> Tensor:
    """Return x [...] if its last dimension is contiguous, otherwise a contiguous copy. The kernel
    whose memory is counted makes this copy, too."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def _selective_scan(
    ctx: Any, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Allocate the tensors of mamba_ssm's selective scan (Mamba 1) without computing them, to count
    memory. Return y [B, D, T] and the end state [B, D, N], both without values.

    The arguments are those of mamba_ssm's kernel, for D channels with states of N numbers. Shapes:
    u, dt, z [B, D, T], a [D, N], b, c [B, N, T], d and bias [D]; z, d and bias may be None.
    """
    u, dt, b, c = (_rows(x) for x in (u, dt, b, c))
    z = None if z is None else _rows(z)
    if z is None:
        gated = None
    else:
        gated = torch.empty_like(z)
    out = torch.empty_like(dt)
    # [B, D, blocks, 2 N]
    states = u.new_empty(
        *u.shape[:2], -(-u.shape[2] // SCAN_BLOCK), 2 * a.shape[-1], dtype=ACCUMULATION_DTYPE
    )
    ctx.save_for_backward(u, dt, a, b, c, d, z, bias, states, None if z is None else out)
    return out if gated is None else gated, states[:, :, -1, 1::2]


def _selective_scan_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate the tensors of the backward of mamba_ssm's selective scan without computing them, to
    count memory. `grad` [B, D, T] is the gradient of the scan's output. Return the gradients of the
    arguments of `_selective_scan` in their order, those of b and c in float32."""
    u, dt, a, b, c, d, z, bias, _, _ = ctx.saved_tensors
    grad = _rows(grad)
    if z is None:
        dz = None
    else:
        dz = torch.empty_like(z)
    du = torch.empty_like(u)
    d_dt = torch.empty_like(dt)
    da = torch.empty_like(a)
    db = torch.empty_like(b, dtype=ACCUMULATION_DTYPE)
    dc = torch.empty_like(c, dtype=ACCUMULATION_DTYPE)
    return du, d_dt, da, db, dc, _like(d), dz, _like(bias)


# mamba_ssm's selective_scan_fn: y [B, D, T] and the end state [B, D, N].
selective_scan = functools.partial(KernelReplay.apply, _selective_scan, _selective_scan_backward)


def _like(x: Tensor | None) -> Tensor | None:
    """Return an uninitialized tensor like x [...], in place of x's gradient. Return None if x is
    None."""
    if x is None:
        return None
    return torch.empty_like(x)


def _fused_mamba(
    ctx: Any, xz: Tensor, conv: Tensor, conv_bias: Tensor | None, x_proj: Tensor, dt_proj: Tensor, out_proj: Tensor,
    out_bias: Tensor | None, a: Tensor, d: Tensor | None, dt_bias: Tensor | None, norm: Tensor | None,
) -> Tensor:  # fmt: skip
    """Allocate the tensors of mamba_ssm's fused Mamba layer without computing them, to count
    memory. Return the output [B, T, h] for xz [B, 2 D, T], the layer's D channels and their gates.
    Only products with weights run, so that their FLOPs are counted.

    Shapes: x_proj [R + 2 N, D], dt_proj [D, R], out_proj [h, D], a [D, N]. N is the size of a
    state, and R the rank of the projection to the step size dt. `conv` is the convolution's weight.
    d and biases may be None. `norm` is the weight of a norm of the step size; None: no norm.
    """
    xz = _rows(xz)
    x = xz[:, : xz.shape[1] // 2]
    convolved = torch.empty_like(x)
    small = convolved.mT.flatten(0, 1) @ x_proj.mT  # [B T, R + 2 N]
    dt = _mamba_step(small, dt_proj, norm is not None)  # [D, B T]
    size = a.shape[-1]
    b, c = (small.new_empty(xz.shape[0], 1, size, xz.shape[2]) for _ in range(2))
    gated, out = torch.empty_like(x), torch.empty_like(x)  # [B, D, T]
    # [B, D, blocks, 2 N]
    states = x.new_empty(
        *x.shape[:2], -(-x.shape[2] // SCAN_BLOCK), 2 * size, dtype=ACCUMULATION_DTYPE
    )
    del dt, convolved
    ctx.has_norm = norm is not None
    weights = (conv, conv_bias, x_proj, dt_proj, out_proj, out_bias, d, dt_bias)
    ctx.save_for_backward(*weights, xz, small, a, b, c, states, out)
    return F.linear(gated.mT, out_proj, out_bias)


def _mamba_step(small: Tensor, dt_proj: Tensor, has_norm: bool) -> Tensor:
    """Allocate the tensors of the computation of a Mamba layer's step size dt, on meta or fake
    tensors, to count memory. Return dt [D, B T], for D channels.

    A norm of dt allocates three tensors: a copy of the norm's input, the output, and a copy of the
    output.

    Args:
        small: [B T, R + 2 N], the output of the projection x_proj, whose first R columns become dt.
        dt_proj: [D, R], the weight of the projection to the step size.
        has_norm: True if the layer norms the step size.
    """
    dt = dt_proj @ small[:, : dt_proj.shape[1]].mT
    for _ in range(3 * has_norm):
        dt = torch.empty_like(dt)
    return dt


def _fused_mamba_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate the tensors of the backward of mamba_ssm's fused Mamba layer without computing them,
    to count memory. `grad` [B, T, h] is the gradient of the layer's output. Return the gradients of
    the arguments of `_fused_mamba` in their order; that of conv is in float32, that of norm is
    None."""
    conv, conv_bias, x_proj, dt_proj, out_proj, out_bias, d, dt_bias, xz, small, a, b, c, _, _ = (
        ctx.saved_tensors
    )
    grad = _rows(grad)
    x = xz[:, : xz.shape[1] // 2]
    convolved = torch.empty_like(x)
    dt = _mamba_step(small, dt_proj, ctx.has_norm)
    d_xz = torch.empty_like(xz)
    flat = grad.flatten(0, 1).mT  # [h, B T]
    d_y = out_proj.mT @ flat  # [D, B T]
    gated = torch.empty_like(x)
    d_convolved = torch.empty_like(x)
    d_dt = torch.empty_like(dt)
    d_a = torch.empty_like(a)
    d_b = torch.empty_like(b, dtype=ACCUMULATION_DTYPE)
    d_c = torch.empty_like(c, dtype=ACCUMULATION_DTYPE)
    d_out = flat @ gated.mT.flatten(0, 1)  # [h, D]
    d_small = torch.empty_like(small)
    d_dt_proj = d_dt @ small[:, : dt_proj.shape[1]]  # [D, R]
    d_dt.mT @ dt_proj
    d_x_proj = d_small.mT @ convolved.mT.flatten(0, 1)  # [R + 2 N, D]
    x_proj.mT @ d_small.mT
    del d_y, d_b, d_c, d_convolved, gated
    d_conv = torch.empty_like(conv, dtype=ACCUMULATION_DTYPE)
    biases = (_like(conv_bias), _like(out_bias), _like(dt_bias))
    return (
        d_xz,
        d_conv,
        biases[0],
        d_x_proj,
        d_dt_proj,
        d_out,
        biases[1],
        d_a,
        _like(d),
        biases[2],
        None,
    )


# mamba_ssm's mamba_inner_fn: xz [B, 2 D, T] -> [B, T, h]; B and C depend on the input. Copies of
# their norms are not counted, because they have N columns and all other tensors D. `norm` is the
# weight of dt's norm, or None; its gradient is not counted.
fused_mamba = functools.partial(KernelReplay.apply, _fused_mamba, _fused_mamba_backward)


@dataclasses.dataclass(frozen=True)
class ScanSizes:
    """Sizes of one call of mamba_ssm's Mamba 2 scan. The methods create uninitialized tensors in
    the shapes that the kernel allocates, so that its memory is counted without running the kernel.

    Attributes:
        like: tensor with the dtype and device of the call.
        block: Q, tokens of a block, the part of a row that the scan computes at once.
        rows: B, rows of the batch.
        tokens: T, tokens of a row.
        heads: H, number of heads.
        width: P, columns of a head.
        groups: G, number of groups of heads; the heads of a group share B and C.
        size: N, size of a state.
    """

    like: Tensor
    block: int
    rows: int
    tokens: int
    heads: int
    width: int
    groups: int
    size: int

    @property
    def blocks(self) -> int:
        """Return NB, the number of blocks of Q tokens in a row."""
        return -(-self.tokens // self.block)

    def states(self, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor [B, NB, H, P, N] for the states of the scan: a state [P, N] for
        each of H heads and each block of a row (NB blocks)."""
        return self.like.new_empty(
            self.rows, self.blocks, self.heads, self.width, self.size, dtype=dtype
        )

    def steps(self, parts: int = 1) -> Tensor:
        """Return an empty float32 tensor [B, H, NB, parts, Q] for a quantity of each token and
        head, such as the step size dt. NB is the number of blocks, and Q the tokens of a block.
        `parts` is the number of partial sums that the kernel stores for each element."""
        return self.like.new_empty(
            self.rows, self.heads, self.blocks, parts, self.block, dtype=ACCUMULATION_DTYPE
        )

    def scores(self, splits: int = 1) -> Tensor:
        """Return an empty float32 tensor [B, NB, splits, G, Q, Q] for the products C B^T of all
        pairs of tokens in a block, or for their gradients. C and B are Mamba's projections of a
        token. `splits` is the number of partial sums that the kernel stores for each element."""
        return self.like.new_empty(
            self.rows,
            self.blocks,
            splits,
            self.groups,
            self.block,
            self.block,
            dtype=ACCUMULATION_DTYPE,
        )

    def inputs(self, splits: int = 1) -> Tensor:
        """Return an empty float32 tensor [B, T, splits, G, N] for the gradients of B or C, Mamba's
        projections of a token. `splits` is the number of partial sums that the kernel stores for
        each element."""
        return self.like.new_empty(
            self.rows, self.tokens, splits, self.groups, self.size, dtype=ACCUMULATION_DTYPE
        )

    def flops(self, times: int) -> None:
        """Add the FLOPs of a scan's matrix products to all active `StepCount`s, the modes that add
        up a step's costs.

        Args:
            times: number by which the FLOPs of one forward are multiplied: 4 for a backward.
        """
        scores = 2 * self.groups * self.block * self.size
        mixed = 2 * self.heads * self.width * (self.block + 2 * self.size)
        add_flops(times * self.rows * self.tokens * (scores + mixed))


def _scan_forward(sizes: ScanSizes, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the tensors of the forward of Mamba 2's scan without computing them, to count
    memory. Return the output [B, T, H, P], the end state [B, H, P, N], and the decay of each token
    [B, H, NB, 1, Q], which backward needs. The letters are those of `ScanSizes`: P columns of a
    head, N numbers of a state for each, NB blocks of Q tokens.

    Args:
        sizes: sizes of the call.
        x: tensor [...] with the dtype and device of the output.
    """
    decay = sizes.steps()
    steps = sizes.steps()
    block_states = sizes.states(ACCUMULATION_DTYPE)
    starts = sizes.states(x.dtype)
    end = x.new_empty(
        sizes.rows, sizes.heads, sizes.width, sizes.size, dtype=ACCUMULATION_DTYPE
    )  # [B, H, P, N]
    del block_states
    scores = sizes.scores()
    out = x.new_empty(sizes.rows, sizes.tokens, sizes.heads, sizes.width)  # [B, T, H, P]
    del steps, starts, scores
    sizes.flops(1)
    return out, end, decay


def _scan_backward(
    sizes: ScanSizes, dt: Tensor, has_start: bool, are_allocated: bool
) -> tuple[Tensor | None, ...]:
    """Allocate the tensors of the backward of Mamba 2's scan without computing them, to count
    memory. Return uninitialized gradients of x, dt, B, C and the start state; None for gradients
    that are not needed.

    Args:
        sizes: sizes of the call.
        dt: the step sizes [B, T, H].
        has_start: True if the start state needs a gradient; False: its gradient is None.
        are_allocated: True if the caller has allocated the gradients of x, dt, B and C; these are
            then None.
    """
    like = sizes.like
    ratio = sizes.heads // sizes.groups
    per_program = max(min(-(-sizes.rows * sizes.blocks * sizes.heads // GPU_PROCESSORS), ratio), 1)
    splits = -(-ratio // per_program)  # number of programs for the heads of a group
    db, dc = (
        None
        if are_allocated
        else like.new_empty(sizes.rows, sizes.tokens, sizes.groups, sizes.size)
        for _ in range(2)
    )
    if are_allocated:
        d_dt = None
    else:
        d_dt = torch.empty_like(dt)
    # another dt, decay, steps, scores
    alive = [torch.empty_like(dt), sizes.steps(), sizes.steps(), sizes.scores()]
    block_states = sizes.states(ACCUMULATION_DTYPE)
    starts = sizes.states(ACCUMULATION_DTYPE)
    del block_states
    d_starts = sizes.states(ACCUMULATION_DTYPE)
    halves = [sizes.states(like.dtype), sizes.states(like.dtype)]
    if has_start:
        d_start = like.new_empty(sizes.rows, sizes.heads, sizes.width, sizes.size)
    else:
        d_start = None
    tiles = -(-sizes.width * sizes.size // STATE_TILE)
    decays = like.new_empty(sizes.rows, sizes.heads, sizes.blocks, tiles, dtype=ACCUMULATION_DTYPE)
    del starts, d_starts, decays
    d_skip = like.new_empty(
        -(-sizes.block // BACKWARD_BLOCK_ROWS),
        sizes.rows,
        sizes.blocks,
        sizes.heads,
        dtype=ACCUMULATION_DTYPE,
    )
    if are_allocated:
        dx = None
    else:
        dx = like.new_empty(sizes.rows, sizes.tokens, sizes.heads, sizes.width)
    alive.append(sizes.steps())  # the gradient of the steps
    del d_skip
    for _ in range(2):  # gradients of B and C, with the decay's
        alive.append(sizes.steps())
        parts = sizes.inputs(splits)
        alive.append(sizes.inputs())
        del parts
    parts = sizes.scores(splits)
    d_scores = sizes.scores()
    del parts
    alive.append(sizes.steps())  # the decay's reverse sum
    parts = sizes.steps(-(-sizes.block // BACKWARD_BLOCK_ROWS))
    alive.append(sizes.steps())
    del parts, d_scores, halves, alive
    # states and scores are recomputed, and each product of forward has two in backward
    sizes.flops(4)
    return dx, d_dt, db, dc, d_start


def _mamba2_scan(
    ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, dt_bias: Tensor | None,
    start: Tensor | None, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Allocate the tensors of mamba_ssm's Mamba 2 scan without computing them, to count memory.
    Return the output [B, T, H, P] and the end state [B, H, P, N].

    Shapes: x [B, T, H, P], dt [B, T, H], a [H], b, c [B, T, G, N], start [B, H, P, N] or None; d
    and dt_bias [H] or None. H heads of P columns are in G groups, and N is the size of a state.
    `block` is the number of tokens that the scan computes at once.
    """
    x, b, c = _rows(x), _rows(b), _rows(c)
    sizes = ScanSizes(x, block, *x.shape, *b.shape[2:])
    out, end, decay = _scan_forward(sizes, x)
    ctx.block = block
    ctx.save_for_backward(out, x, dt, decay, a, b, c, d, dt_bias, start)
    return out, end


def _mamba2_scan_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate the tensors of the backward of mamba_ssm's Mamba 2 scan without computing them, to
    count memory. `grad` [B, T, H, P] is the gradient of the scan's output. Return uninitialized
    gradients of the arguments of `_mamba2_scan` in their order; None for `block`."""
    _, x, dt, _, a, b, _, d, dt_bias, start = ctx.saved_tensors
    grad = _rows(grad)
    sizes = ScanSizes(x, ctx.block, *x.shape, *b.shape[2:])
    dx, d_dt, db, dc, d_start = _scan_backward(sizes, dt, start is not None, are_allocated=False)
    return dx, d_dt, torch.empty_like(a), db, dc, _like(d), _like(dt_bias), d_start, None


# mamba_ssm's mamba_chunk_scan_combined without a gate: out [B, T, H, P], end state [B, H, P, N].
# block: Q, tokens.
mamba2_scan = functools.partial(KernelReplay.apply, _mamba2_scan, _mamba2_scan_backward)


def _fused_mamba2(
    ctx: Any, zxbcdt: Tensor, conv: Tensor, conv_bias: Tensor | None, dt_bias: Tensor, a: Tensor, d: Tensor,
    norm: Tensor | None, proj: Tensor, proj_bias: Tensor | None, width: int, groups: int, block: int,
) -> Tensor:  # fmt: skip
    """Allocate the tensors of mamba_ssm's fused Mamba 2 layer without computing them, to count
    memory. Return the output [B, T, h] for zxbcdt [B, T, 2 H P + 2 G N + H], the input projection's
    output.

    Shapes: conv [H P + 2 G N, k], dt_bias, a and d [H], norm [H P] or None, proj [h, H P]; biases
    may be None. `width` is P, the columns of each of H heads. `groups` is G, the groups of heads. N
    is the size of a state. `block` is the number of tokens that the scan computes at once.
    """
    ctx.sizes = width, groups, block
    sizes = _mamba2_sizes(zxbcdt, conv, d, *ctx.sizes)
    convolved = zxbcdt.new_empty(sizes.rows, sizes.tokens, conv.shape[0])  # [B, T, H P + 2 G N]
    out, end, decay = _scan_forward(sizes, zxbcdt)
    lengths = normed = None
    if norm is not None:
        normed = torch.empty_like(out)
        lengths = out.new_empty(
            groups * sizes.rows * sizes.tokens, dtype=ACCUMULATION_DTYPE
        )  # [G B T]
    projected = F.linear((out if normed is None else normed).flatten(2), proj, proj_bias)
    del convolved, end, decay
    ctx.save_for_backward(
        zxbcdt, conv, conv_bias, out, a, d, dt_bias, norm, lengths, proj, proj_bias
    )
    return projected


def _mamba2_sizes(
    zxbcdt: Tensor, conv: Tensor, d: Tensor, width: int, groups: int, block: int
) -> ScanSizes:
    """Return the sizes of a call of mamba_ssm's fused Mamba 2 layer, from the shapes of its
    tensors.

    Args:
        zxbcdt: [B, T, 2 H P + 2 G N + H], the output of the layer's input projection.
        conv: [H P + 2 G N, k], the convolution's weight; N is the size of a state.
        d: [H], a parameter for each of H heads.
        width: P, columns of a head.
        groups: G, number of groups of heads.
        block: Q, number of tokens that the scan computes at once.
    """
    heads = d.shape[0]
    rows, tokens = zxbcdt.shape[:2]
    size = (conv.shape[0] - heads * width) // groups // 2
    return ScanSizes(zxbcdt, block, rows, tokens, heads, width, groups, size)


def _fused_mamba2_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate the tensors of the backward of mamba_ssm's fused Mamba 2 layer without computing
    them, to count memory. `grad` [B, T, h] is the gradient of the layer's output. Return the
    gradients of the arguments of `_fused_mamba2` in their order; that of conv is in float32, and
    those of the last three are None."""
    zxbcdt, conv, conv_bias, out, a, d, dt_bias, norm, _, proj, proj_bias = ctx.saved_tensors
    sizes = _mamba2_sizes(zxbcdt, conv, d, *ctx.sizes)
    recomputed = torch.empty_like(out)
    convolved = zxbcdt.new_empty(sizes.rows, sizes.tokens, conv.shape[0])
    d_zxbcdt = torch.empty_like(zxbcdt)
    d_convolved = torch.empty_like(convolved)
    d_normed = grad @ proj  # [B, T, H P]
    if norm is None:
        d_out = None
    else:
        d_out = torch.empty_like(out)
    _scan_backward(sizes, zxbcdt[..., -sizes.heads :], has_start=False, are_allocated=True)
    d_proj = grad.flatten(0, 1).mT @ recomputed.flatten(0, 1).flatten(1)  # [h, H P]
    if proj_bias is None:
        d_proj_bias = None
    else:
        d_proj_bias = grad.sum((0, 1))
    del d_normed, d_out, recomputed, convolved, d_convolved
    gradients = [
        d_zxbcdt,
        torch.empty_like(conv, dtype=ACCUMULATION_DTYPE),
        _like(conv_bias),
        _like(dt_bias),
        _like(a),
        _like(d),
    ]
    return *gradients, _like(norm), d_proj, d_proj_bias, None, None, None


# mamba_ssm's mamba_split_conv1d_scan_combined: zxbcdt [B, T, 2 H P + 2 G N + H] -> [B, T, h], with
# norm and projection, whose weights are norm, proj and proj_bias. width, groups, block: P, G, Q.
fused_mamba2 = functools.partial(KernelReplay.apply, _fused_mamba2, _fused_mamba2_backward)
