"""Kernels as Triton's and extension modules' are: they write through pointers, which moves no
version counter and passes no dispatch mode. Each is an autograd Function that computes in numpy on
the memory of its tensors."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def memory(x: Tensor) -> np.ndarray:
    """The values of x, to read and to write."""
    return x.detach().numpy()


def opaque_tensor(values: np.ndarray) -> Tensor:
    """A tensor of these values that no operation of torch gave them."""
    out = torch.empty(values.shape, dtype=getattr(torch, str(values.dtype)))
    memory(out)[...] = values
    return out


def write_values(x: Tensor, values: np.ndarray) -> Tensor:
    memory(x)[...] = values
    return x


def norm(x, weight, eps):
    rstd = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * rstd * weight, rstd


def norm_backward(grad, x, weight, rstd):
    normed, scaled = x * rstd, grad * weight
    d_x = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdims=True))
    return d_x, (grad * normed).reshape(-1, x.shape[-1]).sum(0)


def rotate(x, cos, sin):
    """x [..., T, D], of which the first features, as many as cos [..., T, R] has, are rotated."""
    size = cos.shape[-1]
    part = x[..., :size]
    rotated_half = np.concatenate((-part[..., size // 2 :], part[..., : size // 2]), -1)
    return np.concatenate((part * cos + rotated_half * sin, x[..., size:]), -1)


class Norm(torch.autograd.Function):
    """RMSNorm into memory of its own, with a weight of `offset` + weight; in_place: dx over dy."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset, in_place):
        y, rstd = norm(memory(x), memory(weight) + offset, eps)
        ctx.offset, ctx.in_place = offset, in_place
        ctx.save_for_backward(x, weight, opaque_tensor(rstd))
        return opaque_tensor(y.astype(memory(x).dtype))

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = map(memory, ctx.saved_tensors)
        grad = grad.contiguous()
        d_x, d_weight = norm_backward(memory(grad), x, weight + ctx.offset, rstd)
        return (
            write_values(grad, d_x) if ctx.in_place else opaque_tensor(d_x),
            opaque_tensor(d_weight),
            None,
            None,
            None,
        )


class Rotation(torch.autograd.Function):
    """Rotates q and k [B, H, T, D] where they are, forward and backward, and does not say so."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        angles = memory(cos)[:, None], memory(sin)[:, None]  # [B, 1, T, R]
        for x in (q, k):
            write_values(x, rotate(memory(x), *angles))
        return q.transpose(1, 2).transpose(1, 2), k.transpose(1, 2).transpose(1, 2)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = (memory(x)[:, None] for x in ctx.saved_tensors)
        return (
            *(
                write_values(g, rotate(memory(g), cos, -sin))
                for g in (grad.contiguous() for grad in grads)
            ),
            None,
            None,
        )


class Gate(torch.autograd.Function):
    """act(a) * b; its backward writes the gradients over a and b."""

    @staticmethod
    def forward(ctx, a, b, act):
        ctx.act = act
        ctx.save_for_backward(a, b)
        return write_values(torch.empty_like(a), act(memory(a))[0] * memory(b))

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        value, slope = ctx.act(memory(a))
        d_a, d_b = memory(grad) * memory(b) * slope, memory(grad) * value
        return write_values(a, d_a), write_values(b, d_b), None


def silu(x):
    """Its value and its slope."""
    gate = 1.0 / (1.0 + np.exp(-x))
    return x * gate, gate * (1.0 + x * (1.0 - gate))


def gelu_tanh(x):
    inner = np.sqrt(2.0 / np.pi).astype(x.dtype) * (x + 0.044715 * x**3)
    tanh = np.tanh(inner)
    slope = np.sqrt(2.0 / np.pi).astype(x.dtype) * (1.0 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh**2) * slope


class AddNorm(torch.autograd.Function):
    """residual + x and its RMSNorm. The sum is written over `residual`, over `x`, or into memory of
    its own; "clean": what is no number counts as 0."""

    @staticmethod
    def forward(ctx, residual, x, weight, eps, over):
        added = np.nan_to_num(memory(x)) if over == "clean" else memory(x)
        total = memory(residual) + added
        y, rstd = norm(total, memory(weight), eps)
        sum_tensor = (
            write_values({"residual": residual, "x": x}[over], total)
            if over in ("residual", "x")
            else opaque_tensor(total)
        )
        ctx.save_for_backward(sum_tensor, weight, opaque_tensor(rstd))
        return opaque_tensor(y), sum_tensor.view_as(sum_tensor)

    @staticmethod
    def backward(ctx, d_y, d_total):
        total, weight, rstd = map(memory, ctx.saved_tensors)
        d_x, d_weight = norm_backward(memory(d_y.contiguous()), total, weight, rstd)
        d_x = d_x + memory(d_total.contiguous())
        return opaque_tensor(d_x), opaque_tensor(d_x), opaque_tensor(d_weight), None, None


class QueriesKeysValues(torch.autograd.Function):
    """Products q, k, v [B, T, H * D] -> [B, H, T, D], q and k normed (if there are weights) and
    rotated, all at once."""

    @staticmethod
    def forward(ctx, q, k, v, q_weight, k_weight, cos, sin, size, eps):
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.size, ctx.eps = size, eps
        angles = memory(cos)[:, None], memory(sin)[:, None]
        outputs = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            heads = split(memory(x), size)
            outputs.append(
                opaque_tensor(
                    rotate(
                        heads if weight is None else norm(heads, memory(weight), eps)[0], *angles
                    )
                )
            )
        return *outputs, opaque_tensor(split(memory(v), size))

    @staticmethod
    def backward(ctx, d_q, d_k, d_v):
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        cos, sin = memory(cos)[:, None], memory(sin)[:, None]
        products, weights = [], []
        for x, weight, grad in ((q, q_weight, d_q), (k, k_weight, d_k)):
            grad, d_weight = rotate(memory(grad.contiguous()), cos, -sin), None
            if weight is not None:
                heads = split(memory(x), ctx.size)
                rstd = norm(heads, memory(weight), ctx.eps)[1]
                grad, d_weight = norm_backward(grad, heads, memory(weight), rstd)
            products.append(opaque_tensor(joined(grad)))
            weights.append(None if d_weight is None else opaque_tensor(d_weight))
        return (
            *products,
            opaque_tensor(joined(memory(d_v.contiguous()))),
            *weights,
            None,
            None,
            None,
            None,
        )


class Halved(torch.autograd.Function):
    """x / 2, over x."""

    @staticmethod
    def forward(ctx, x):
        return write_values(x, 0.5 * memory(x)).view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return opaque_tensor(0.5 * memory(grad.contiguous()))


def split(x, size):
    return x.reshape(*x.shape[:2], -1, size).swapaxes(1, 2)


def joined(x):
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(x.shape[0], x.shape[2], -1)


def norm_forward(offset, in_place):
    def forward(self, x):
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return Norm.apply(x, self.weight, eps, offset, in_place)

    return forward


def mlp_forward(act):
    return lambda self, x: self.down_proj(Gate.apply(self.gate_proj(x), self.up_proj(x), act))


def rotation(q, k, cos, sin, *args, **kwargs):
    return Rotation.apply(q, k, cos, sin)


def attention_forward(
    self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs
):
    eager = sys.modules[type(self).__module__].eager_attention_forward
    norms = [getattr(self, name, None) for name in ("q_norm", "k_norm")]
    weights = [None if part is None else part.weight for part in norms]
    eps = None if norms[0] is None else norms[0].variance_epsilon
    products = (linear(hidden_states) for linear in (self.q_proj, self.k_proj, self.v_proj))
    q, k, v = QueriesKeysValues.apply(*products, *weights, *position_embeddings, self.head_dim, eps)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    out, _ = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
    out = out.reshape(*hidden_states.shape[:-1], -1)
    return self.o_proj(Halved.apply(out) if self.halves else out), None


def layer_forward(over):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        x = self.input_layernorm(hidden_states)
        x, _ = self.self_attn(
            hidden_states=x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        norm_after = self.post_attention_layernorm
        x, residual = AddNorm.apply(
            hidden_states, x, norm_after.weight, norm_after.variance_epsilon, over
        )
        return residual + self.mlp(x)

    return forward


RESIDUAL_KERNELS = {
    "add": None,
    "add over x": "x",
    "add over residual": "residual",
    "add what is finite": "clean",
}


def install(monkeypatch, model, *kernels):
    """Replace what a model's classes compute, for every model of them, patched or not: "norm",
    "rotation", "gate", "qkv", "qkv and halves" (of attention's output, in place), one of
    `RESIDUAL_KERNELS`."""
    module = sys.modules[type(model).__module__]
    gemma = "gemma" in module.__name__
    for name, member in list(vars(module).items()):
        if "norm" in kernels and name.endswith("RMSNorm"):
            monkeypatch.setattr(
                member,
                "forward",
                norm_forward(float(gemma or "next" in module.__name__), not gemma),
            )
        if "gate" in kernels and name.endswith("MLP"):
            monkeypatch.setattr(member, "forward", mlp_forward(gelu_tanh if gemma else silu))
        if name.endswith("Attention") and {"qkv", "qkv and halves"} & set(kernels):
            monkeypatch.setattr(member, "forward", attention_forward)
            monkeypatch.setattr(member, "halves", "qkv and halves" in kernels, raising=False)
        for kernel, over in RESIDUAL_KERNELS.items():
            if kernel in kernels and name.endswith("DecoderLayer"):
                monkeypatch.setattr(member, "forward", layer_forward(over))
    if "rotation" in kernels:
        monkeypatch.setattr(module, "apply_rotary_pos_emb", rotation)
