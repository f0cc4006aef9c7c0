"""Weights that store less than their shape says: bytes of a model's own, and experts in 4 bits in a
model without data.

torchao stores a weight in inner tensors of a tensor subclass. bitsandbytes stores experts as packed
bytes of a parametrization, with statistics in its attributes. A skeleton's parameter has the shape
of the weight or of the packed bytes, and two attributes with the numbers that a plan needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from streambp.known_names import QUANT_STATE
from streambp.offload.decoded_weights import CountedPackedWeight
from streambp.offload.mxfp4 import begin_cache, end_cache

PARAMETER_COUNT_ATTRIBUTE = (
    "stands_for"  # attribute of a parameter: number of model parameters that it stores
)
STORED_BYTES_ATTRIBUTE = (
    "stored"  # attribute of a parameter: bytes that the original stores, statistics included
)
FOUR_BIT_BYTES = 0.5 + 4 / 64  # bytes for each parameter, with a float32 for each block of 64


def parameters_of(parameter: Tensor) -> int:
    """Return the number of model parameters that a tensor [...] holds. A quantised weight may have
    several parameters in each element; then the number exceeds the tensor's number of elements."""
    return int(getattr(parameter, PARAMETER_COUNT_ATTRIBUTE, parameter.numel()))


def bytes_of(parameter: Tensor) -> int:
    """Return the bytes that a parameter takes in the real model, quantization statistics included.
    The argument is the parameter's copy [...] on meta or fake tensors (in a `Skeleton`)."""
    return int(getattr(parameter, STORED_BYTES_ATTRIBUTE, parameter.nbytes))


def statistics_of(weights: ParametrizationList) -> list[Tensor]:
    """Return the tensors [...] that are needed beside a packed weight to dequantize the weight,
    for example absmax. These tensors are buffers or attributes of the parametrizations, or in
    bitsandbytes' `quant_state` object."""
    statistics: dict[int, Tensor] = {}
    for module in weights:
        state = type(getattr(module, QUANT_STATE, None))
        waiting: list[Any] = [*module._buffers.values(), *vars(module).values()]
        for value in waiting:  # the loop appends to this list
            if isinstance(value, Tensor):
                statistics[id(value)] = value
            elif value is not None and type(value) is state:  # statistics of statistics too
                waiting += vars(value).values()
    return list(statistics.values())


def decoded_size(weights: ParametrizationList) -> int | None:
    """Return the number of elements of a parametrized weight after dequantization. None if no
    parametrization of the weight states the shape of the dequantized weight."""
    for module in weights:
        shape = getattr(getattr(module, QUANT_STATE, module), "shape", None)
        if shape is not None:
            return math.prod(shape)
    return None


class CountedExperts(CountedPackedWeight):
    """Parametrization (`torch.nn.utils.parametrize`) of experts' weights in 4 bits, for a model on
    meta or fake tensors whose memory and FLOPs are counted. Each read of the parameter allocates
    the dequantized weight, as bitsandbytes does.

    Args:
        weight: the weight [E, n, m] of all E experts, before it is packed.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape = weight.shape
        self.dtype = weight.dtype

    def forward(self, packed: Tensor) -> Tensor:
        """Return an uninitialized tensor [E, n, m] in place of the dequantized weight of E experts.
        `packed` is the packed weight, a tensor of bytes [bytes]."""
        return packed.new_empty(self.shape, dtype=self.dtype)


def pack_experts(layer: nn.Module) -> int:
    """Replace the frozen weights [E, n, m] of a layer's E experts by packed 4-bit weights, in a
    model without data whose memory will be counted. Return the number of replaced weights."""
    return sum(_pack(module, name) for module, name in list(_frozen_experts(layer)))


def _frozen_experts(layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, parameter name) for each parameter [E, n, m] of experts that is not trained.
    All modules with "experts" in their path are searched, because peft wraps the experts' module.
    """
    for path, module in layer.named_modules():
        if "experts" not in path:
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dim() != 3 or parameter.requires_grad:
                continue
            if parameter.is_floating_point():
                yield module, name


def _pack(module: nn.Module, name: str) -> int:
    """Replace a parameter [E, n, m] of a module by a packed 4-bit parameter, as bitsandbytes'
    `replace_parameter_4bit` does. Return 1: the caller adds up the number of replaced weights."""
    weight = module._parameters[name]
    assert weight is not None
    size = int(weight.numel() * FOUR_BIT_BYTES)
    packed = nn.Parameter(
        torch.empty(size, dtype=torch.uint8, device=weight.device), requires_grad=False
    )
    setattr(packed, PARAMETER_COUNT_ATTRIBUTE, weight.numel())
    first = not parametrize.is_parametrized(module)
    setattr(module, name, packed)
    parametrize.register_parametrization(module, name, CountedExperts(weight), unsafe=True)
    setattr(
        getattr(module.parametrizations, name).original, PARAMETER_COUNT_ATTRIBUTE, weight.numel()
    )  # type: ignore[union-attr]
    if first:
        module.register_forward_pre_hook(begin_cache)
        module.register_forward_hook(end_cache, always_call=True)
    return 1
