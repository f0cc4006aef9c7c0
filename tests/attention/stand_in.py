"""Stand-ins for aten's fused attention operators, which have no kernel on the CPU."""

from __future__ import annotations

import torch

SCALE = 0.3


def softmax_attention(q, k, v, mask, scale=SCALE):
    """o and lse with plain operations; `mask` is bool or added."""
    repeats = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeats, 1).mT * scale
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return weights @ v.repeat_interleave(repeats, 1), lse


class StandIn:
    """aten's fused attention operators with their own parameter names and layouts, computed by
    plain operations."""

    def _scaled_dot_product_flash_attention(
        self, query, key, value, dropout_p, is_causal, return_debug_mask, *, scale=None
    ):
        assert query.shape[3] == value.shape[3], "one head size"
        o, lse = softmax_attention(
            query, key, value, self.bottom_right(query.shape[2], key.shape[2], is_causal), scale
        )
        return (
            o,
            lse,
            None,
            None,
            query.shape[2],
            key.shape[2],
            torch.empty(2),
            torch.empty(0),
            torch.empty(0),
        )

    def _scaled_dot_product_flash_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        philox_seed, philox_offset, *, scale=None,
    ):  # fmt: skip
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        mask = self.bottom_right(max_q, max_k, is_causal)
        return self.gradients(grad_out, query, key, value, out, logsumexp, mask, scale)

    def _flash_attention_forward(
        self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert query.shape[-1] == value.shape[-1], "one head size"
        mask = self.flash_mask(
            query, key, cum_seq_q, cum_seq_k, is_causal, window_size_left, window_size_right
        )
        packed = cum_seq_q is not None
        o, lse = softmax_attention(
            *(self.head_major(x, packed) for x in (query, key, value)), mask, scale
        )
        o = o[0].transpose(0, 1) if packed else o.transpose(1, 2)
        return o, lse[0] if packed else lse, torch.empty(2), torch.empty(0), torch.empty(0)

    def _flash_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        mask = self.flash_mask(
            query, key, cum_seq_q, cum_seq_k, is_causal, window_size_left, window_size_right
        )
        packed = cum_seq_q is not None
        tensors = [self.head_major(x, packed) for x in (grad_out, query, key, value, out)]
        grads = self.gradients(*tensors, logsumexp[None] if packed else logsumexp, mask, scale)
        return tuple(g[0].transpose(0, 1) if packed else g.transpose(1, 2) for g in grads)

    def _scaled_dot_product_cudnn_attention(
        self,
        query,
        key,
        value,
        attn_bias,
        compute_log_sumexp,
        dropout_p,
        is_causal,
        return_debug_mask,
        *,
        scale=None,
    ):
        assert compute_log_sumexp
        assert not is_causal or query.shape[2] == key.shape[2]
        o, lse = softmax_attention(
            query, key, value, self.bottom_right(query.shape[2], key.shape[2], is_causal), scale
        )
        return (
            o,
            lse[..., None],
            None,
            None,
            query.shape[2],
            key.shape[2],
            torch.empty(()),
            torch.empty(()),
            None,
        )

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
        max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        assert logsumexp.shape == (*out.shape[:3], 1)
        mask = self.bottom_right(max_q, max_k, is_causal)
        return self.gradients(grad_out, query, key, value, out, logsumexp[..., 0], mask, scale)

    def _scaled_dot_product_efficient_attention(
        self, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
    ):  # fmt: skip
        assert compute_log_sumexp
        assert query.shape[1] == key.shape[1] == value.shape[1], "no grouped queries"
        o, lse = softmax_attention(query, key, value, self.top_left(query, key, is_causal), scale)
        return (
            o,
            torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf),
            torch.empty(()),
            torch.empty(()),
        )

    def _scaled_dot_product_efficient_attention_backward(
        self, grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
        grad_input_mask, is_causal=False, *, scale=None,
    ):  # fmt: skip
        assert grad_input_mask == [True, True, True, False]
        assert logsumexp.shape[2] == -(-query.shape[2] // 32) * 32
        assert bool((logsumexp[..., query.shape[2] :] == torch.inf).all())
        lse, mask = logsumexp[..., : query.shape[2]], self.top_left(query, key, is_causal)
        return *self.gradients(grad_out_, query, key, value, out, lse, mask, scale), None

    def top_left(self, query, key, causal):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        return mask.tril() if causal else mask

    def bottom_right(self, queries, keys, causal):
        mask = torch.ones(queries, keys, dtype=torch.bool)
        return mask.tril(keys - queries) if causal else mask

    def flash_mask(self, query, key, cu_q, cu_k, causal, window_left, window_right):
        if cu_q is None:
            cu_q, cu_k = [0, query.shape[1]], [0, key.shape[1]]
            mask = torch.zeros(query.shape[1], key.shape[1], dtype=torch.bool)
        else:
            assert cu_q.dtype == cu_k.dtype == torch.int32
            mask = torch.zeros(query.shape[0], key.shape[0], dtype=torch.bool)
        for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
            part = self.bottom_right(int(q1 - q0), int(k1 - k0), causal)
            offset = int((k1 - k0) - (q1 - q0))
            distance = torch.arange(part.shape[0])[:, None] + offset - torch.arange(part.shape[1])
            if window_left is not None:
                part = part & (distance <= window_left) & (distance >= -window_right)
            mask[int(q0) : int(q1), int(k0) : int(k1)] = part
        return mask

    def head_major(self, x, packed):
        return x.transpose(0, 1)[None] if packed else x.transpose(1, 2)

    def gradients(self, grad_out, query, key, value, out, lse, mask, scale):
        repeats = query.shape[1] // key.shape[1]
        wide_key, wide_value = (
            key.repeat_interleave(repeats, 1),
            value.repeat_interleave(repeats, 1),
        )
        scores = (query @ wide_key.mT * scale).masked_fill(~mask, -torch.inf)
        weights = torch.exp(scores - lse[..., None])
        ds = weights * (grad_out @ wide_value.mT - (grad_out * out).sum(-1, keepdim=True)) * scale
        fold = lambda x: x.unflatten(1, (-1, repeats)).sum(2)  # noqa: E731
        return ds @ wide_key, fold(ds.mT @ query), fold(weights.mT @ grad_out)


class Squares(StandIn):
    """FlashAttention on ROCm: causal blocks are squares, and neither windows nor packed rows are
    sent."""

    def __init__(self):
        self.calls = 0

    def _scaled_dot_product_flash_attention(
        self, query, key, value, dropout_p, is_causal, *args, **kwargs
    ):
        assert not is_causal or query.shape[2] == key.shape[2], "no square"
        self.calls += 1
        return super()._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, *args, **kwargs
        )

    def _flash_attention_forward(self, *args, **kwargs):
        raise AssertionError("other conventions")


class CachedGraphs(StandIn):
    """cuDNN as torch calls it: a graph is found again by q, k and v, with the strides of o, dO and
    the logsumexp of the first call with the like of them. Refuses blocks of few queries or keys."""

    def __init__(self):
        self.graphs = {}
        self.calls = 0

    def _scaled_dot_product_cudnn_attention(self, query, key, value, *args, **kwargs):
        assert min(query.shape[2], key.shape[2]) >= 64
        o, *other_results = super()._scaled_dot_product_cudnn_attention(
            query, key, value, *args, **kwargs
        )
        rows, heads, queries, size = o.shape
        return o.new_empty(rows, queries, heads, size).transpose(1, 2).copy_(
            o
        ), *other_results  # query's order, packed by D_v

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, *args, **kwargs
    ):
        assert min(query.shape[2], key.shape[2]) >= 64
        self.calls += 1
        described = (*((*x.shape, *x.stride()) for x in (query, key, value)), args[-1])
        graph = self.graphs.setdefault(described, [x.stride() for x in (grad_out, out, logsumexp)])
        grad_out, out, logsumexp = (
            read(x, stride) for x, stride in zip((grad_out, out, logsumexp), graph, strict=True)
        )
        real = super()._scaled_dot_product_cudnn_attention_backward
        return real(grad_out, query, key, value, out, logsumexp, *args, **kwargs)


def read(x, stride):
    """x with other strides; NaN where these lead out of its memory."""
    last = x.storage_offset() + sum(
        (size - 1) * step for size, step in zip(x.shape, stride, strict=True)
    )
    if last >= x.untyped_storage().nbytes() // x.itemsize:
        return torch.full_like(x, torch.nan)
    return x.as_strided(x.shape, stride)
