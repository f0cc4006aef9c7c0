"""DeepSpeed ZeRO-3: parameters that are on this rank only while a module runs.

[Note: ZeRO-3 leaves] DeepSpeed gathers a module's parameters in its forward and backward hooks. Inside a streamed layer
these would run once a chunk, so the layer is marked as a leaf, which is gathered whole: once for its forward, once for
its backward. A leaf's gradients are reduced by a full-backward hook, which fires too early unless hidden_states is a
positional argument that requires a gradient; a hook in front of DeepSpeed's sees to that, which a layer gets once DeepSpeed
was imported. Both do nothing without ZeRO-3.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from streambp.known_names import ENGINES, FULL_SHAPE, PARTITIONED


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 manages a parameter [...], be it gathered now or not."""
    return hasattr(parameter, PARTITIONED)


def full_shape(parameter: Tensor) -> torch.Size:
    """A parameter's shape as when it is gathered; ZeRO-3 leaves a tensor of 0 elements in place of [V, h], say."""
    shape: torch.Size = getattr(parameter, FULL_SHAPE, parameter.shape)
    return shape


def differentiable_input(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook of a streamed layer: its hidden_states are positional and want a gradient under ZeRO-3."""
    if ENGINES[0] not in sys.modules or not any(map(is_partitioned, layer.parameters())):
        return None
    kwargs = dict(kwargs)
    hidden_states: Tensor = args[0] if args else kwargs.pop("hidden_states")
    if torch.is_grad_enabled() and not hidden_states.requires_grad:
        hidden_states = hidden_states.detach().requires_grad_()
    return (hidden_states, *args[1:]), kwargs
