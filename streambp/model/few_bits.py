"""Report for `describe` which weights of streamed layers are stored in few bits."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from streambp.distributed.engines import is_partitioned
from streambp.foreign import package_of
from streambp.known_names import BITSANDBYTES, FLOAT8_LINEAR, LOCAL_SHARD, QUANT_STATE, TORCHAO
from streambp.layer.float8_linears import is_float8
from streambp.layer.packed_experts import packed_kinds
from streambp.offload.decoded_weights import has_packed_weight
from streambp.offload.mxfp4 import Mxfp4Weight
from streambp.tensors import FLATTEN_METHOD, inner_bytes

BITS_PER_BYTE = 8
MXFP4_TEXT = "4 bits (MXFP4)"
EIGHT_BIT_PARAMETER = "Int8Params"  # class of bitsandbytes' weights in 8 bits


def few_bits_notes(layers: Iterable[nn.Module]) -> list[str]:
    """Return a line for `describe` on weights that are stored in few bits: numbers of Linears and
    of layers with such experts, the bits, and the name of the format. Empty without such weights.

    Args:
        layers: the decoder layers.
    """
    linears = collections.Counter[str]()
    experts = collections.Counter[str]()
    for layer in layers:
        formats = set()
        for module in layer.modules():
            if isinstance(module, ParametrizationList):
                if isinstance(module[0], packed_kinds()):
                    formats.add(_format_of_experts(module[0]))
            elif isinstance(module, nn.Linear) and (text := _format_of_linear(module)):
                linears[text] += 1
        experts.update(formats)
    parts = [f"{number} Linears {text}" for text, number in sorted(linears.items())]
    for text, number in sorted(experts.items()):
        parts.append(f"experts of {number} layers in {text}, decoded once a pass")
    if not parts:
        return []
    return ["weights: " + ", ".join(parts)]


def _format_of_experts(decoding: Any) -> str:
    """Return the bits and the format of a weight of experts as text, from its parametrization."""
    if isinstance(decoding, Mxfp4Weight):
        return MXFP4_TEXT
    return _four_bits(getattr(decoding, QUANT_STATE, None))


def _four_bits(state: Any) -> str:
    """Return "4 bits" and bitsandbytes' name of the format, as text.

    Args:
        state: bitsandbytes' quantization state of the weight; None if it is unknown.
    """
    kind = getattr(state, "quant_type", None)
    if kind is None:
        return "4 bits"
    return f"4 bits ({BITSANDBYTES} {kind})"


def _format_of_linear(linear: nn.Linear) -> str:
    """Return text on the format of a Linear's weight; "" for a weight that is not in few bits."""
    weight: Any = linear.weight
    if is_float8(linear):
        return f"that train in float8 ({TORCHAO} {FLOAT8_LINEAR})"
    state = getattr(weight, QUANT_STATE, None) or getattr(linear, QUANT_STATE, None)
    if has_packed_weight(linear) or state is not None:
        return "in " + _four_bits(state)
    weight = getattr(weight, LOCAL_SHARD, weight)
    kind = type(weight)
    if kind.__name__ == EIGHT_BIT_PARAMETER:
        return f"in 8 bits ({BITSANDBYTES} int8)"
    if is_partitioned(weight) or inner_bytes(weight) is None:
        return _bytes_text(weight)
    names = getattr(weight, FLATTEN_METHOD)()[0]
    largest = max(getattr(weight, name).nbytes for name in names)  # the others are scales
    bits = BITS_PER_BYTE * largest // max(1, weight.numel())
    return f"in {bits} bits ({package_of(kind)} {kind.__name__})"


def _bytes_text(weight: Tensor) -> str:
    """Return text on a plain weight whose numbers take a byte each; "" for other weights."""
    if weight.itemsize > 1 or weight.dtype == torch.bool:
        return ""
    return f"in 8 bits ({str(weight.dtype).removeprefix('torch.')})"
