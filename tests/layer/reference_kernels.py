"""What the packages' kernels compute, token by token in torch, with what they ask of layouts,
dtypes and shapes asserted.

`install` puts them where transformers would find the packages: behind its own wrapper, which hands
on what a kernel takes. Signatures are those of causal_conv1d 1.6, mamba_ssm 2.3 and fla-core 0.6,
for as much as transformers passes.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """x [B, D, L], weight [D, k], seq_idx [B, L] -> [B, D, L]; a token reads those of its own
    document."""
    assert initial_states is None
    assert not return_final_states
    assert final_states_out is None
    assert activation in (None, "silu", "swish")
    length = x.shape[-1]
    if seq_idx is not None:
        assert x.stride(1) == 1, "seq_idx is for channels last alone"
        assert x.shape[1] % 8 == 0
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == (x.shape[0], length)
    out = torch.zeros_like(x)
    for shift in range(min(weight.shape[-1], length)):
        # [D, 1] x [B, D, L - back]
        part = weight[:, weight.shape[-1] - 1 - shift, None] * x[..., : length - shift]
        if seq_idx is not None:
            part = part * (seq_idx[:, shift:] == seq_idx[:, : length - shift])[:, None]
        out = out + F.pad(part, (shift, 0))
    out = out if bias is None else out + bias[:, None]
    if seq_idx is not None:
        out = out * (seq_idx >= 0)[:, None]
    return out if activation is None else F.silu(out)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [B, L, H, K], v [B, L, H, V], g [B, L, H, 1 or K], beta [B, L, H], state [B, H, K, V] ->
    [B, L, H, V], state."""
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        new = (v[:, t] - (state * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]  # [B, H, V]
        state = state + k[:, t, :, :, None] * new[:, :, None]
        outputs.append((state * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """q, k [B, L, H, K], v [B, L, Hv, V], g, beta [B, L, Hv], states [N, Hv, K, V]: one for each
    document, or row."""
    assert scale is None
    groups = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    rows, length = q.shape[:2]
    ends = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    states = rows if cu_seqlens is None else len(ends) - 1
    if cu_seqlens is not None:
        assert rows == 1, "cu_seqlens are for a single row"
        assert cu_seqlens.dim() == 1
        assert cu_seqlens.dtype in (torch.int32, torch.int64)
        assert ends[0] == 0
        assert ends[-1] == length
        assert all(a < b for a, b in itertools.pairwise(ends)), "an empty document"
    shape = (states, v.shape[2], k.shape[-1], v.shape[-1])
    state = g.new_zeros(shape) if initial_state is None else initial_state
    assert state.shape == shape, f"{tuple(state.shape)} instead of {shape}"
    row_states = state.split(rows)
    parts = [
        _delta_rule(*(x[:, a:b] for x in (q, k, v, g, beta)), start)
        for (a, b), start in zip(itertools.pairwise(ends), row_states, strict=True)
    ]
    out = torch.cat([part for part, _ in parts], 1).to(v.dtype)
    return out, torch.cat([end for _, end in parts]) if output_final_state else None


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same with decays g [B, L, H, K]."""
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens,
    )


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """x [B, L, H, P], dt [B, L, H], A [H], B, C [B, L, G, N], states [B, H, P, N]; a start state is
    document 0's."""
    rows, length, heads, size = x.shape
    assert cu_seqlens is None
    assert z is None
    assert not return_varlen_states
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == (rows, length)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (part.repeat_interleave(heads // part.shape[2], 2) for part in (B, C))
    shape = (rows, heads, size, B.shape[-1])
    state = A.new_zeros(shape) if initial_states is None else initial_states
    assert state.shape == shape, f"{tuple(state.shape)} instead of {shape}"
    previous_ids = None if seq_idx is None else torch.zeros_like(seq_idx[:, 0])
    outputs = []
    for t in range(length):
        if seq_idx is not None:
            state = state * (seq_idx[:, t] == previous_ids)[:, None, None, None]
            previous_ids = seq_idx[:, t]
        step = dt[:, t, :, None, None]
        state = (
            state * (step * A[:, None, None]).exp() + step * x[:, t, :, :, None] * B[:, t, :, None]
        )
        outputs.append((state * C[:, t, :, None]).sum(-1))
    out = torch.stack(outputs, 1).to(x.dtype)
    out = out if D is None else (out + x * D[:, None]).to(x.dtype)
    return (out, state) if return_final_states else out


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """u, delta, z [B, D, L], A [D, N], B, C [B, N, L] -> [B, D, L], end state [B, D, N], which has
    no gradient.

    In half precision between kernels alone: all that it computes is in float32.
    """
    assert u.dtype == delta.dtype
    x, dt, b, c = (part.to(A.dtype) for part in (u, delta, B, C))
    dt = dt if delta_bias is None else dt + delta_bias[:, None]
    dt = F.softplus(dt) if delta_softplus else dt
    state = A.new_zeros(u.shape[0], *A.shape)
    outputs = []
    for t in range(u.shape[-1]):
        step = dt[..., t, None]
        state = state * (step * A).exp() + step * x[..., t, None] * b[:, None, :, t]
        outputs.append((state * c[:, None, :, t]).sum(-1))
    out = torch.stack(outputs, -1)
    out = out if D is None else out + x * D[:, None]
    out = (out if z is None else out * F.silu(z.to(A.dtype))).to(u.dtype)
    return (out, state.detach()) if return_last_state else out


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """All of a mixer behind its first projection, zxbcdt [B, L, 2 H P + 2 G N + H] -> [B, L, h]."""
    assert initial_states is None
    assert not return_final_states
    assert headdim is not None
    assert outproj_weight is not None
    heads = D.shape[0]
    width = heads * headdim
    size = (zxbcdt.shape[-1] - 2 * width - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([width, width + 2 * ngroups * size, heads], -1)
    xbc = causal_conv1d_fn(xbc.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation).mT
    x, b, c = xbc.split([width, ngroups * size, ngroups * size], -1)
    x, b, c = (
        x.unflatten(-1, (heads, headdim)),
        b.unflatten(-1, (ngroups, size)),
        c.unflatten(-1, (ngroups, size)),
    )
    y = mamba_chunk_scan_combined(
        x,
        dt,
        A,
        b,
        c,
        chunk_size,
        D,
        None,
        dt_bias,
        None,
        seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
    ).flatten(-2)
    if rmsnorm_weight is None:
        y = y * F.silu(z)
    else:
        assert not norm_before_gate
        grouped = (y * F.silu(z)).unflatten(-1, (ngroups, -1))
        y = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + rmsnorm_eps)).flatten(
            -2
        ) * rmsnorm_weight
    return F.linear(y, outproj_weight, outproj_bias)


KERNELS = {  # transformers' name for it: its package and what stands for it
    "causal_conv1d_fn": ("causal_conv1d", causal_conv1d_fn),
    "torch_chunk_gated_delta_rule": ("fla", chunk_gated_delta_rule),
    "chunk_kimi_delta_attention": ("fla", chunk_kda),
    "mamba2_chunk_scan": ("mamba_ssm", mamba_chunk_scan_combined),
    "mamba_selective_scan": ("mamba_ssm", selective_scan_fn),
    "mamba2_split_conv1d_scan_combined": ("mamba_ssm", mamba_split_conv1d_scan_combined),
}


def install(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module, **changes: Any) -> None:
    """Put these kernels, or `changes` by transformers' names, into the modeling module of a
    model."""
    modeling = sys.modules[type(model).__module__]
    # transformers 5.5 has none
    from transformers.integrations import use_kernel_func_from_hub_with_fallback

    kernels = {
        name: (package, changes.get(name, kernel)) for name, (package, kernel) in KERNELS.items()
    }
    for package in {package for package, _ in kernels.values()}:
        by_name = {kernel.__name__: kernel for of, kernel in kernels.values() if of == package}
        stands_in = types.ModuleType(package)
        stands_in.__dict__.update(by_name)
        monkeypatch.setitem(sys.modules, package, stands_in)
    for name, (package, kernel) in kernels.items():
        if hasattr(modeling, name):
            wrapped = use_kernel_func_from_hub_with_fallback(kernel.__name__, package)
            monkeypatch.setattr(modeling, name, wrapped(inspect.unwrap(getattr(modeling, name))))
