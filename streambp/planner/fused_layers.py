"""Layers with fused kernels, as Liger's: RMSNorm, gated activations and rotary embeddings, by memory and bytes moved.

Where a model is planned with them, its modules are replaced by ones that allocate and keep what the kernels do. A norm
keeps its input and a number a row, and writes the gradient over the one it is given. An activation keeps both of its inputs
and writes their gradients over them. Rotary embeddings turn queries and keys in place. In passes over the tensor a norm
reads and writes 2, and 3 in backward, an activation 3 and 5, rotary embeddings 2 and 2.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streambp.device import has_data
from streambp.known_names import GATED_MLP, NORM, ROTARY
from streambp.planner.count import one_kernel


class Norm(torch.autograd.Function):
    """x [..., h], weight [h] -> [..., h] in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Keeps x [..., h] and a float32 a row."""
        with one_kernel(2 * x.nbytes):
            ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
            ctx.weight = weight
            return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """grad [..., h], which the gradient of x is written over, and that of the weight [h]."""
        (x, _) = ctx.saved_tensors
        with one_kernel(3 * x.nbytes):
            return grad, torch.empty_like(ctx.weight) if ctx.needs_input_grad[1] else None


class Gate(torch.autograd.Function):
    """gate, up [..., m] -> act(gate) * up [..., m]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Keeps gate and up, [..., m] each."""
        with one_kernel(3 * gate.nbytes):
            ctx.save_for_backward(gate, up)
            return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """grad [..., m] -> the gradients of gate and up, written over them."""
        gate, up = ctx.saved_tensors
        with one_kernel(5 * gate.nbytes):
            return gate.view_as(gate), up.view_as(up)


class Rotary(torch.autograd.Function):
    """q [B, H, T, D], k [B, H_kv, T, D] -> both, turned in place."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps nothing of q [B, H, T, D] and k [B, H_kv, T, D]."""
        ctx.moved = 2 * (q.nbytes + k.nbytes)
        with one_kernel(ctx.moved):
            return q.view_as(q), k.view_as(k)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """dq [B, H, T, D], dk [B, H_kv, T, D], turned back in place."""
        with one_kernel(ctx.moved):
            return dq, dk


def _norm(module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = Norm.apply(hidden_states, module.weight)
    return out


def _mlp(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    gate, up, down, _ = (getattr(module, name) for name in GATED_MLP)
    out: Tensor = down(Gate.apply(gate(x), up(x)))
    return out


def fuse_layers(model: nn.Module) -> int:
    """Replace the norms and gated MLPs of a model without data; how many there were."""
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    found = 0
    for module in model.modules():
        kind = type(module)
        weights = dict(module.named_parameters(recurse=False))
        if kind.__name__.endswith(NORM) and list(weights) == ["weight"] and _takes_one(kind):
            forward: Callable[..., Tensor] = _norm
        elif all(hasattr(module, name) for name in GATED_MLP):
            forward = _mlp
        else:
            continue
        if kind not in classes:
            classes[kind] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
        module.__class__ = classes[kind]
        found += 1
    return found


def _takes_one(kind: type[nn.Module]) -> bool:
    """Whether its forward takes the hidden states and nothing else; gated norms take a second tensor."""
    return len(inspect.signature(kind.forward).parameters) == 2


@contextlib.contextmanager
def fused_rotary(spaces: list[dict[str, Any]]) -> Iterator[None]:
    """Within, functions for rotary embeddings among these globals turn in place where tensors have no data."""
    before = [(space, space[ROTARY]) for space in spaces if _is_rotary(space.get(ROTARY))]
    try:
        for space, function in before:
            space[ROTARY] = _Rotary(function)
        yield
    finally:
        for space, function in before:
            space[ROTARY] = function


def _is_rotary(function: Any) -> bool:
    if not callable(function):
        return False
    return list(inspect.signature(function).parameters)[:4] == ["q", "k", "cos", "sin"]


class _Rotary:
    """In place of a modeling file's function: the kernel where the queries have no data, the function elsewhere."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._function(q, k, *args, **kwargs) if has_data(q) else Rotary.apply(q, k)
