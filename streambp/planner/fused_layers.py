"""Layers with fused kernels, Liger's or compiled: RMSNorm, gated activations and rotary embeddings, by memory and bytes.

Where a model is planned with them, its modules are replaced by ones that allocate and keep what the kernels do. A norm
keeps its input and a number a row, an activation both of its inputs, rotary embeddings nothing. Liger's kernels write
gradients over what they are given, and turn in place; compiled code gives new tensors. In passes over the tensor a norm
reads and writes 2, and 3 in backward, an activation 3 and 5, rotary embeddings 2 and 2; a compiled norm 5 in backward, as
the weight's gradient has a kernel of its own. `scripts/elementwise_bytes.py` counts them beside the kernels themselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

from streambp.device import has_data
from streambp.errors import ConfigError
from streambp.fields import shown
from streambp.known_names import GATED_MLP, LIGER, NORM, ROTARY
from streambp.planner.count import Replayed, one_kernel
from streambp.planner.mixers import globals_of, is_installed, replaced_functions

Fusion = Literal["liger", "compiled"]
Kernels = Literal["auto", "own", "liger", "compiled"]


def fusion(kernels: Kernels, device: str) -> Fusion | None:
    """What `StreamConfig.kernels` gives on a device of this type; None: the model's own code.

    Raises:
        ConfigError: it is none of `Kernels`.
    """
    if kernels == "auto":
        return "liger" if device != "cpu" and is_installed(LIGER) else None
    if kernels not in ("own", "liger", "compiled"):
        raise ConfigError(f"kernels is {shown(kernels)}; it must be one of 'auto', 'own', 'liger', 'compiled'.")
    return None if kernels == "own" else kernels


def _norm_kernel(ctx: Any, x: Tensor, weight: Tensor, by: Fusion) -> Tensor:
    """Keeps x [..., h] and a float32 a row."""
    with one_kernel(2 * x.nbytes):
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.weight, ctx.by = weight, by
        return torch.empty_like(x)


def _norm_kernel_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    """grad [..., h] -> the gradient of x, Liger's written over it, and that of the weight [h]."""
    (x, _) = ctx.saved_tensors
    d_weight = torch.empty_like(ctx.weight) if ctx.needs_input_grad[3] else None
    own = ctx.by == "compiled"
    with one_kernel((5 if own and d_weight is not None else 3) * x.nbytes):
        return torch.empty_like(grad) if own else grad, d_weight, None


# x [..., h], weight [h] -> [..., h] in x's dtype.
norm_kernel = functools.partial(Replayed.apply, _norm_kernel, _norm_kernel_backward)


def _gate_kernel(ctx: Any, gate: Tensor, up: Tensor, by: Fusion) -> Tensor:
    """Keeps gate and up, [..., m] each."""
    with one_kernel(3 * gate.nbytes):
        ctx.save_for_backward(gate, up)
        ctx.by = by
        return torch.empty_like(gate)


def _gate_kernel_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """grad [..., m] -> the gradients of gate and up, Liger's written over them."""
    gate, up = ctx.saved_tensors
    with one_kernel(5 * gate.nbytes):
        if ctx.by == "compiled":
            return torch.empty_like(gate), torch.empty_like(up), None
        return gate.view_as(gate), up.view_as(up), None


# gate, up [..., m] -> act(gate) * up [..., m].
gate_kernel = functools.partial(Replayed.apply, _gate_kernel, _gate_kernel_backward)


def _rotary_kernel(ctx: Any, q: Tensor, k: Tensor, by: Fusion) -> tuple[Tensor, Tensor]:
    """Keeps nothing of q [B, H, T, D] and k [B, H_kv, T, D]."""
    ctx.moved, ctx.by = 2 * (q.nbytes + k.nbytes), by
    with one_kernel(ctx.moved):
        return (q.view_as(q), k.view_as(k)) if by == "liger" else (torch.empty_like(q), torch.empty_like(k))


def _rotary_kernel_backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None]:
    """dq [B, H, T, D], dk [B, H_kv, T, D], turned back; Liger's in place."""
    with one_kernel(ctx.moved):
        return (dq, dk, None) if ctx.by == "liger" else (torch.empty_like(dq), torch.empty_like(dk), None)


# q [B, H, T, D], k [B, H_kv, T, D] -> both, turned; Liger's in place.
rotary_kernel = functools.partial(Replayed.apply, _rotary_kernel, _rotary_kernel_backward)


def fuse_layers(model: nn.Module, by: Fusion | None) -> int:
    """Replace the norms and gated MLPs of a model without data; how many there were.

    by: None: those alone that a program gave Liger's kernels itself. Its forwards may be bound to modules.
    """
    fusion = by or "liger"

    def norm(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return norm_kernel(hidden_states, self.weight, fusion)

    def mlp(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        gate, up, down = (getattr(self, name) for name in GATED_MLP[:3])
        return down(gate_kernel(gate(hidden_states), up(hidden_states), fusion))

    classes: dict[type[nn.Module], type[nn.Module]] = {}
    found = 0
    for module in model.modules():
        kind, ligers = type(module), is_ligers(module.forward)
        if by is None and not ligers:
            continue
        weights = [name for name, _ in module.named_parameters(recurse=False)]
        takes_one = len(inspect.signature(kind.forward).parameters) == 2  # gated norms take a second tensor
        is_norm = kind.__name__.endswith(NORM) and weights == ["weight"] and takes_one
        if is_norm or all(hasattr(module, name) for name in GATED_MLP[: 3 if ligers else 4]):
            if ligers:
                module.__dict__.pop("forward", None)
            content = {"forward": norm if is_norm else mlp, "__module__": kind.__module__}
            classes[kind] = classes.get(kind) or type(kind.__name__, (kind,), content)
            module.__class__ = classes[kind]
            found += 1
    return found


def is_ligers(function: Any) -> bool:
    """Whether Liger's files define a function or method."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == LIGER


def fused_rotary(model: nn.Module, by: Fusion | None) -> contextlib.AbstractContextManager[None]:
    """Within, functions of the model's files for rotary embeddings are kernels where tensors have no data; by None: Liger's
    alone."""
    found = []
    for space in globals_of(model):
        function = space.get(ROTARY)
        if not callable(function) or (by is None and not is_ligers(function)):
            continue
        if list(inspect.signature(function).parameters)[:4] == ["q", "k", "cos", "sin"]:
            found.append((space, ROTARY, functools.partial(_rotary, function, by or "liger")))
    return replaced_functions(found)


def _rotary(function: Any, by: Fusion, /, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The kernel where the queries have no data, a modeling file's function elsewhere."""
    return function(q, k, *args, **kwargs) if has_data(q) else rotary_kernel(q, k, by)
