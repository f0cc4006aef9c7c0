"""4-bit weights that are decoded once for each pass through a layer, not once for each chunk.

[Note: decode on arrival] A Linear of bitsandbytes decodes its weight in every call, twice for each chunk of a backward.
While a streamed layer's weights are on the device, such a Linear multiplies by a weight that it decodes at its first call
and keeps until they leave. So one layer's decoded weights are there at a time. Decoding runs in the compute queue, like
what reads them, and their memory is the allocator's: no wait is needed.

The numbers are those of the Linear's own forward, which decodes and multiplies, too, unless its rows are so few that a
kernel of its own does both; calls that are not streamed (a token that is generated) go there as ever. Products are made by
the same operations in the same modes: autograd's own backward of a product rounds otherwise.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from streambp.known_names import BITSANDBYTES, QUANT_STATE

FORWARD = "forward"  # a module's attribute, and a layer's direction


class Multiplied(torch.autograd.Function):
    """x [..., in] and a frozen weight [out, in] -> [..., out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] @ weight [out, in] + bias [out]."""
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """grad [..., out] -> the gradient of x [..., in]; weight and bias are frozen."""
        return torch.matmul(grad, ctx.weight), None, None


@dataclasses.dataclass
class DecodedLinear:
    """In the place of the forward of a Linear with a 4-bit weight, as long as its layer is computed."""

    module: Any  # its attributes are bitsandbytes'
    weight: Tensor | None = None  # [out, in], once it is decoded

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype."""
        module = self.module
        result: Tensor
        if not self.decodes(x):
            result = type(module).forward(module, x)
            return result
        if self.weight is None:
            self.weight = _decoded(module)
        result = Multiplied.apply(x.to(module.compute_dtype), self.weight, module.bias)  # type: ignore[no-untyped-call]
        return result.to(x.dtype)

    def decodes(self, x: Tensor) -> bool:
        """Whether the module's own forward multiplies x [..., in] in the dtype that its weight is decoded to."""
        module, kind = self.module, x.device.type
        dtype, bias, state = module.compute_dtype, module.bias, getattr(module.weight, QUANT_STATE, None)
        plain = bias is None or (bias.dtype == dtype and not bias.requires_grad)
        decodes = (
            module.compute_type_is_set and state is not None and dtype == state.dtype and x.shape[-1] == state.shape[1]
        )
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != dtype
        return plain and decodes and not cast and bool(x.numel())


def _decoded(module: Any) -> Tensor:
    """The module's weight [out, in]."""
    from bitsandbytes.functional import dequantize_4bit

    with torch.no_grad():
        weight: Tensor = dequantize_4bit(module.weight.data, getattr(module.weight, QUANT_STATE))
    return weight


def decoded_weight(module: Any) -> Tensor:
    """The weight [out, in] of a Linear with a 4-bit weight; where its forward is replaced, that of what stands there."""
    stands = vars(module).get(FORWARD)
    if not isinstance(stands, DecodedLinear):
        return _decoded(module)
    if stands.weight is None:
        stands.weight = _decoded(module)
    return stands.weight


def is_packed(module: nn.Module) -> bool:
    """Whether it is a Linear with a 4-bit weight, and has bitsandbytes' own forward."""
    library = sys.modules.get(BITSANDBYTES)
    return library is not None and type(module).forward is library.nn.Linear4bit.forward


def packed_linears(layer: nn.Module) -> list[nn.Module]:
    """The Linears inside a layer whose weights have 4 bits, and whose forwards nobody has replaced."""
    return [module for module in layer.modules() if is_packed(module) and FORWARD not in vars(module)]
