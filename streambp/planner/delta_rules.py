"""Make the allocations of kernels for delta rules and short convolutions, when memory is counted on
tensors without data.

Each function here makes the allocations of its kernel's source, in the same order and with the same
lifetime, and computes nothing. Sources: fla-core 0.6.0 (`ops/gated_delta_rule`, `ops/kda`,
`ops/common`) and causal-conv1d 1.6.1 (`causal_conv1d_interface.py`, `cpp_functions.py`). fla works
in blocks of BLOCK_TOKENS; NB is the number of blocks. fla copies non-contiguous inputs.

Shapes: q, k [B, T, H, K], v [B, T, H_v, V], beta [B, T, H_v], states [B, H_v, K, V] in float32. The
decay g determines the rule: [B, T, H_v], one for each head, is the gated delta rule; [B, T, H_v,
K], one for each channel, is Kimi's (KDA).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from streambp.planner.count import KernelReplay, add_flops

BLOCK_TOKENS = 64
SOLVED_BLOCK_TOKENS = 16  # KDA solves triangular systems in blocks of this size, in float32
MAX_INTRA_CHANNELS = 32  # maximal number of channels at a time in KDA's backward within a block
ACCUMULATION_DTYPE = torch.float32


def _causal_conv(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Allocate the tensors of a causal convolution kernel's forward without computing them, to
    count memory. Return the output [B, D, T]. Saved for backward is x [B, D, T], or a contiguous
    copy if neither its tokens nor its channels are contiguous."""
    if 1 not in x.stride()[1:]:
        x = x.contiguous()
    ctx.save_for_backward(x, weight, bias)
    return torch.empty_like(x)


def _causal_conv_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate the tensors of a causal convolution kernel's backward without computing them, to
    count memory. Return gradients of x [B, D, T], and of weight [D, k] and bias [D] in float32."""
    x, weight, bias = ctx.saved_tensors
    if 1 not in grad.stride()[1:]:
        grad = grad.contiguous()
    if bias is None:
        d_bias = None
    else:
        d_bias = torch.empty_like(bias, dtype=ACCUMULATION_DTYPE)
    return torch.empty_like(x), torch.empty_like(weight, dtype=ACCUMULATION_DTYPE), d_bias


# x [B, D, T], weight [D, k], bias [D] or None -> [B, D, T] in x's layout.
causal_conv = functools.partial(KernelReplay.apply, _causal_conv, _causal_conv_backward)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    start: Tensor | None,
    returns_end: bool,
    normalises: bool,
) -> tuple[Tensor, Tensor | None]:
    """Allocate the tensors of fla's delta-rule kernel without computing them, to count memory.
    Return its output [B, T, H_v, V], and its end state [B, H_v, K, V] or None.

    Args:
        q: queries, [B, T, H, K].
        k: keys, [B, T, H, K].
        v: values, [B, T, H_v, V].
        g: the decay of each head [B, T, H_v], or of each channel [B, T, H_v, K].
        beta: strength of each state update, [B, T, H_v].
        start: the start state [B, H_v, K, V]; None: zeros.
        returns_end: True: return the end state.
        normalises: True: the kernel normalizes q and k.
    """
    out, end = chunk_delta_rule(q, k, v, g, beta, start, normalises)
    return out, end if returns_end else None


class DeltaRuleSizes:
    """Sizes of one call of fla's delta-rule kernel. The methods create empty tensors in the shapes
    that the kernel allocates, so that its memory is counted without running the kernel.

    Args:
        k: keys [B, T, H, K]; the new tensors get their dtype and device.
        v: values [B, T, H_v, V].
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.rows, self.tokens, self.heads, self.keys = k.shape
        self.value_heads, self.values = v.shape[2:]
        self.count = -(-self.tokens // BLOCK_TOKENS)
        self._k = k

    def tensor_per_token(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an empty tensor [B, T, H_v, width], with `width` numbers for each token and value
        head. `dtype` None is the dtype of the keys."""
        return self._k.new_empty(self.rows, self.tokens, self.value_heads, width, dtype=dtype)

    def states(self) -> Tensor:
        """Return an empty tensor [B, NB, H_v, K, V] for the states of the recurrence. The kernel
        divides each row into NB blocks, and stores the state at the start of each block."""
        return self._k.new_empty(self.rows, self.count, self.value_heads, self.keys, self.values)

    def state(self) -> Tensor:
        """Return an empty tensor [B, H_v, K, V] in float32, for one state of the recurrence in each
        row of the batch."""
        return self._k.new_empty(
            self.rows, self.value_heads, self.keys, self.values, dtype=ACCUMULATION_DTYPE
        )

    def sum_over_heads(self, x: Tensor) -> Tensor:
        """Allocate the result of the kernel's sum of x over the value heads that share a key head.
        The sum itself is not computed. Return the empty tensor [B, T, H, K], or x itself if the
        numbers of key heads and value heads are equal.

        Args:
            x: [B, T, H_v, K]; the values are not read.
        """
        if self.value_heads == self.heads:
            return x
        return x.new_empty(self.rows, self.tokens, self.heads, self.keys)

    def flops(self, between: int, within: int) -> None:
        """Add the FLOPs of the kernel to all active `StepCount`s, the modes that add up a step's
        costs. The FLOPs are those of matrix products, for each token and value head.

        Args:
            between: number of times that the kernel multiplies a token's vector with a state [K,
                V].
            within: number of times that the kernel multiplies a token with all tokens of its block,
                which the kernel processes together. The vectors have K or V columns; the mean of
                both is used.
        """
        pairs = 2 * between * self.keys * self.values + within * BLOCK_TOKENS * (
            self.keys + self.values
        )
        add_flops(self.rows * self.tokens * self.value_heads * pairs)


def _chunk_delta_rule(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    start: Tensor | None,
    normalises: bool,
) -> tuple[Tensor, Tensor]:
    """Allocate the tensors of the forward of fla's chunked delta rule without computing them, to
    count memory. Return the output [B, T, H_v, V] and the end state [B, H_v, K, V].

    Shapes: q, k [B, T, H, K], v [B, T, H_v, V], g [B, T, H_v] or [B, T, H_v, K], beta [B, T, H_v],
    start [B, H_v, K, V] or None. `normalises` is True if the kernel scales q and k to unit length.
    """
    # copies of q and k live until the end
    q_in, k_in, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    q = q_in
    k = k_in
    q_length = None
    k_length = None
    if normalises:
        (q, q_length), (k, k_length) = (  # one number for each row is saved for backward
            (torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1], dtype=ACCUMULATION_DTYPE))
            for x in (q_in, k_in)
        )
    sizes = DeltaRuleSizes(k, v)
    by_channel = g.dim() == 4
    decay = torch.empty_like(g, dtype=ACCUMULATION_DTYPE)
    if by_channel:
        scores = sizes.tensor_per_token(BLOCK_TOKENS)
    else:
        scores = None
    solved = sizes.tensor_per_token(BLOCK_TOKENS)  # [B, T, H_v, BLOCK_TOKENS]
    # [B, T, H_v, SOLVED_BLOCK_TOKENS]
    if by_channel:
        diagonal = sizes.tensor_per_token(SOLVED_BLOCK_TOKENS, ACCUMULATION_DTYPE)
    else:
        diagonal = None
    work = [sizes.tensor_per_token(sizes.keys), sizes.tensor_per_token(sizes.values)]
    work += [sizes.tensor_per_token(sizes.keys)] if by_channel else []
    del diagonal
    work += [sizes.states(), sizes.tensor_per_token(sizes.values)]
    end = sizes.state()
    out = torch.empty_like(v)
    del work
    ctx.normalises = normalises
    ctx.save_for_backward(
        q, q_length, k, k_length, v, decay, g if by_channel else None, beta, scores, solved, start
    )
    sizes.flops(between=4, within=5)
    return out, end


def _chunk_delta_rule_backward(ctx: Any, d_out: Tensor, d_end: Tensor) -> tuple[Tensor | None, ...]:
    """Allocate the tensors of the backward of fla's chunked delta rule without computing them, to
    count memory. The arguments are the gradients of the output [B, T, H_v, V] and of the end state
    [B, H_v, K, V]. Return the gradients of forward's q, k, v, g, beta and start, and None for
    `normalises`.

    The start state's gradient is in float32, and so is g's if each head has one decay. Other
    gradients have their tensors' dtypes.
    """
    q, _, k, _, v, decay, g, beta, _, _, start = ctx.saved_tensors
    sizes = DeltaRuleSizes(k, v)
    d_out = d_out.contiguous()
    keys = sizes.keys
    values = sizes.values
    recomputed = []
    for width in (keys, values) if g is None else (keys, values, keys, keys):
        recomputed.append(sizes.tensor_per_token(width))
    recomputed += [sizes.states(), sizes.tensor_per_token(values)]
    if g is None:
        d_scores = None
    else:
        d_scores = sizes.tensor_per_token(BLOCK_TOKENS, ACCUMULATION_DTYPE)
    dv_within = torch.empty_like(d_out)  # [B, T, H_v, V]
    d_states = sizes.states()
    if start is None:
        d_start = None
    else:
        d_start = sizes.state()
    dv_new = torch.empty_like(d_out)
    del dv_within
    if g is None:
        dq = sizes.tensor_per_token(keys)
        dk = sizes.tensor_per_token(keys)
        d_decay = torch.empty_like(decay)
        dw = sizes.tensor_per_token(keys)
        dq = sizes.sum_over_heads(dq)
        dk = sizes.sum_over_heads(dk)
        dk_within = sizes.tensor_per_token(keys)
        dv = torch.empty_like(v)
        d_decay_within = torch.empty_like(decay)
        d_beta = torch.empty_like(beta)
        dk_within = sizes.sum_over_heads(dk_within)
        d_decay = torch.empty_like(decay)
        del dv_new, dw, dk_within, d_decay_within
    else:
        dq = sizes.tensor_per_token(keys, ACCUMULATION_DTYPE)
        dk = sizes.tensor_per_token(keys, ACCUMULATION_DTYPE)
        dv = torch.empty_like(v)
        d_decay = torch.empty_like(decay)
        d_beta = torch.empty_like(beta, dtype=ACCUMULATION_DTYPE)
        d_solved = sizes.tensor_per_token(BLOCK_TOKENS, ACCUMULATION_DTYPE)
        del dv_new
        dq_sum = torch.empty_like(dq)
        dk_sum = torch.empty_like(dk)
        parts = [torch.empty_like(d_beta) for _ in range(-(-keys // MAX_INTRA_CHANNELS))]
        d_decay_sum = torch.empty_like(d_decay)
        d_beta = torch.empty_like(d_beta)
        dq, dk, d_decay = sizes.sum_over_heads(dq_sum), sizes.sum_over_heads(dk_sum), d_decay_sum
        del parts, dq_sum, dk_sum, d_decay_sum
        d_decay = torch.empty_like(decay)
        del d_solved
    del recomputed, d_states, d_scores
    if ctx.normalises:
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
    sizes.flops(between=10, within=12)
    if g is None:
        return dq, dk, dv, d_decay, d_beta, d_start, None
    return dq.to(q), dk.to(k), dv, d_decay.to(g), d_beta.to(beta), d_start, None


# fla's chunk_gated_delta_rule, or its chunk_kda for one decay in each channel. Returns output
# [B, T, H_v, V] and end state [B, H_v, K, V]. `normalises`: scale q and k to unit length.
chunk_delta_rule = functools.partial(
    KernelReplay.apply, _chunk_delta_rule, _chunk_delta_rule_backward
)
