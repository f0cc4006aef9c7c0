"""Decode 4-bit weights once for each pass through a layer instead of once for each chunk.

A Linear of bitsandbytes decodes its weight in every call, twice for each chunk of a backward. While
a streamed layer's weights are on the device, its Linears multiply by a decoded weight. A Linear
decodes the weight in its first call and caches it until the layer's weights leave. Only one layer's
decoded weights therefore exist at a time. Decoding runs in the compute queue, like all reads of the
result, and the allocator provides the memory, so no wait is needed.

The result equals the Linear's own forward, which also decodes and multiplies. The Linear uses a
fused kernel for a few rows; unstreamed calls (token generation) run the Linear's own forward as
usual. Products use the same operations in the same modes, because autograd's own backward of a
product rounds differently.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from streambp.known_names import BITSANDBYTES, QUANT_STATE
from streambp.tensors import strip_view

FORWARD = "forward"  # name of a module's attribute, and of a direction


class FrozenLinearFunction(torch.autograd.Function):
    """Autograd function of a Linear with a frozen weight [out, in]: x [..., in] -> [..., out].
    Backward computes the gradient of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..., in] @ weight [out, in]^T + bias [out]."""
        ctx.weight = weight
        return strip_view(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Return the gradient of x [..., in] from grad [..., out], and None for the frozen weight
        and bias."""
        return torch.matmul(grad, ctx.weight), None, None


@dataclasses.dataclass
class DecodedLinear:
    """Replacement of the forward of a bitsandbytes Linear with a 4-bit weight: dequantizes the
    weight once for all chunks of a layer, instead of once for each chunk.

    Attributes:
        module: the Linear.
        weight: the dequantized weight [out, in]; None before the first call.
    """

    module: Any  # an nn.Linear of bitsandbytes
    weight: Tensor | None = None  # [out, in]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the Linear's output [..., out] for x [..., in], in x's dtype."""
        module = self.module
        result: Tensor
        if not self.decodes(x):
            result = type(module).forward(module, x)
            return result
        if self.weight is None:
            self.weight = _decode_weight(module)
        result = FrozenLinearFunction.apply(x.to(module.compute_dtype), self.weight, module.bias)  # type: ignore[no-untyped-call]
        return result.to(x.dtype)

    def decodes(self, x: Tensor) -> bool:
        """True if the module's own forward would dequantize its weight to `compute_dtype` and
        multiply x [..., in] by it in that dtype. A cached dequantized weight then gives the same
        numbers."""
        module = self.module
        kind = x.device.type
        dtype = module.compute_dtype
        bias = module.bias
        state = getattr(module.weight, QUANT_STATE, None)
        plain = bias is None or (bias.dtype == dtype and not bias.requires_grad)
        decodes = (
            module.compute_type_is_set
            and state is not None
            and dtype == state.dtype
            and x.shape[-1] == state.shape[1]
        )
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != dtype
        return plain and decodes and not cast and bool(x.numel())


def _decode_weight(module: Any) -> Tensor:
    """Return the dequantized weight [out, in] of `module`, a bitsandbytes Linear."""
    from bitsandbytes.functional import dequantize_4bit

    with torch.no_grad():
        weight: Tensor = dequantize_4bit(module.weight.data, getattr(module.weight, QUANT_STATE))
    return weight


class CountedPackedLinear(nn.Module):
    """Base class of Linears that take the place of a 4-bit Linear when the planner counts memory
    and FLOPs on meta or fake tensors.

    Attributes:
        compute_dtype: dtype of the dequantized weight.
    """

    compute_dtype: torch.dtype

    def decoded(self) -> Tensor:
        """Return a dequantized weight [out, in] as a meta or fake tensor, so that its memory is
        counted."""
        raise NotImplementedError


class CountedPackedWeight(nn.Module):
    """Base class of parametrizations of 4-bit weights that take the place of bitsandbytes'
    parametrizations when memory and FLOPs are counted on meta or fake tensors.

    Attributes:
        dtype: dtype of the decoded weight.
    """

    dtype: torch.dtype


def decoded_weight(module: Any) -> Tensor:
    """Return the dequantized weight [out, in] of a bitsandbytes Linear; cached if a `DecodedLinear`
    replaces its forward. A `CountedPackedLinear` returns a meta or fake tensor.

    Args:
        module: a Linear of bitsandbytes with a 4-bit weight, or a `CountedPackedLinear`.
    """
    if isinstance(module, CountedPackedLinear):
        return module.decoded()
    stands = vars(module).get(FORWARD)
    if not isinstance(stands, DecodedLinear):
        return _decode_weight(module)
    if stands.weight is None:
        stands.weight = _decode_weight(module)
    return stands.weight


def is_packed(module: nn.Module) -> bool:
    """True if a module is a Linear with a 4-bit weight and runs bitsandbytes' own forward, which a
    `DecodedLinear` can replace."""
    library = sys.modules.get(BITSANDBYTES)
    return library is not None and type(module).forward is library.nn.Linear4bit.forward


def has_packed_weight(module: nn.Module) -> bool:
    """True if a module is a 4-bit Linear, or a `CountedPackedLinear` in the place of a 4-bit
    Linear. The weight's parameter has packed bytes instead of [out, in]."""
    return isinstance(module, CountedPackedLinear) or is_packed(module)


def packed_linears(layer: nn.Module) -> list[nn.Module]:
    """Return the Linears with 4-bit weights inside a layer, whose forward a `DecodedLinear`
    replaces while the layer runs. A Linear with an instance attribute `forward` is left out,
    because other code has replaced its forward."""
    return [
        module for module in layer.modules() if is_packed(module) and FORWARD not in vars(module)
    ]
