"""DeepSpeed ZeRO-3: parameters that are on this rank only while a module runs.

[Note: ZeRO-3 leaves] DeepSpeed gathers a module's parameters in its forward and backward hooks.
Inside a streamed layer these hooks would run once for each chunk. The layer is therefore marked as
a leaf. DeepSpeed gathers a leaf completely: once for its forward, once for its backward. A
full-backward hook reduces a leaf's gradients. The hook runs too early unless hidden_states is a
positional argument that requires a gradient. A hook before DeepSpeed's ensures this; a layer gets
the hook once DeepSpeed was imported. The mark and the hook have no effect without ZeRO-3.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from streambp.known_names import ENGINES, FULL_SHAPE, PARTITIONED


def is_partitioned(parameter: Tensor) -> bool:
    """True if DeepSpeed's ZeRO-3 partitions this parameter [...], whether it is gathered now or
    not."""
    return hasattr(parameter, PARTITIONED)


def full_shape(parameter: Tensor) -> torch.Size:
    """Return a parameter's full shape, such as [V, h]. Between gathers, ZeRO-3 replaces the
    parameter's data by a tensor of 0 elements."""
    shape: torch.Size = getattr(parameter, FULL_SHAPE, parameter.shape)
    return shape


def differentiable_input(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the layer's arguments, changed so that hidden_states is positional and requires a
    gradient. None if ZeRO-3 does not partition the layer. Registered as a forward pre-hook of
    decoder layers."""
    if ENGINES[0] not in sys.modules or not any(map(is_partitioned, layer.parameters())):
        return None
    kwargs = dict(kwargs)
    hidden_states: Tensor
    if args:
        hidden_states = args[0]
    else:
        hidden_states = kwargs.pop("hidden_states")
    if torch.is_grad_enabled() and not hidden_states.requires_grad:
        hidden_states = hidden_states.detach().requires_grad_()
    return (hidden_states, *args[1:]), kwargs
