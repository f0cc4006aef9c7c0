"""DeepSpeed ZeRO-3: parameters that are on this rank only while a module runs.

[Note: ZeRO-3 leaves] DeepSpeed gathers a module's parameters in its forward and backward hooks. Inside a streamed layer
these would run once a chunk, so the layer is marked as a leaf, which is gathered whole: once for its forward, once for
its backward. A leaf's gradients are reduced by a full-backward hook, which fires too early unless hidden_states is a
positional argument that requires a gradient; a hook in front of DeepSpeed's sees to that. Both do nothing without ZeRO-3.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from streambp.known_names import ENGINES, FORWARD_HOOKS, FULL_SHAPE, PARTITIONED, WITH_KWARGS, Z3_LEAF


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 manages a parameter [...], be it gathered now or not."""
    return hasattr(parameter, PARTITIONED)


def full_shape(parameter: Tensor) -> torch.Size:
    """A parameter's shape as when it is gathered; ZeRO-3 leaves a tensor of 0 elements in place of [V, h], say."""
    shape: torch.Size = getattr(parameter, FULL_SHAPE, parameter.shape)
    return shape


def make_leaf(layer: nn.Module) -> RemovableHandle:
    """Have ZeRO-3 treat a streamed layer as one unit, before or after deepspeed.initialize. [Note: ZeRO-3 leaves]"""
    setattr(layer, Z3_LEAF, True)
    return layer.register_forward_pre_hook(_differentiable_input, with_kwargs=True, prepend=True)


def unmake_leaf(layer: nn.Module, handle: RemovableHandle) -> None:
    """Undo `make_leaf`, which returned `handle`."""
    handle.remove()
    layer.__dict__.pop(Z3_LEAF, None)


def no_leaf(own: dict[str, Any], handle: RemovableHandle) -> None:
    """The attributes `own` of a copied layer without what `make_leaf`, which returned `handle`, has put there."""
    own.pop(Z3_LEAF, None)
    for table in (FORWARD_HOOKS[1], WITH_KWARGS):
        own[table] = type(own[table])((key, hook) for key, hook in own[table].items() if key != handle.id)


def _differentiable_input(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    if ENGINES[0] not in sys.modules or not any(map(is_partitioned, layer.parameters())):
        return None
    kwargs = dict(kwargs)
    hidden_states: Tensor = args[0] if args else kwargs.pop("hidden_states")
    if torch.is_grad_enabled() and not hidden_states.requires_grad:
        hidden_states = hidden_states.detach().requires_grad_()
    return (hidden_states, *args[1:]), kwargs
