"""Weights of experts in MXFP4, the format of gpt-oss checkpoints: 4.25 bits for each number.

A block is 32 numbers in 16 bytes with one power of two. The first number of a byte is in its low
four bits. Blocks run along the inputs of a weight. The experts of transformers read a weight [E,
in, out]. A `Mxfp4Weight` is the parametrization that decodes the weight for them, so a streamed
layer decodes once for each pass (`layer/packed_experts.py`). Every decoded number is exact in
bfloat16, and equal to the number that transformers decodes.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

BLOCK_SIZE = 32
EXPONENT_BIAS = 127
MAX_DECODED_ELEMENTS = 2**25  # numbers that are decoded at a time, which bounds temporary memory
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers of the low three bits


class Mxfp4Weight(nn.Module):
    """Parametrization of a frozen weight of experts that is stored in MXFP4.

    Args:
        scales: exponents of the blocks' powers of two, [E, out, blocks] uint8.
        dtype: dtype of the decoded weight. Casts of the model change it.

    Attributes:
        scales: the exponents.
        pairs: the two numbers of each byte [256, 2] without a power of two, in the decoded dtype.
    """

    pairs: Tensor

    def __init__(self, scales: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        # a parameter, so that it moves between host and device with the layer
        self.scales = nn.Parameter(scales, requires_grad=False)
        numbers = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
        pairs = [(low, high) for high, low in itertools.product(numbers, numbers)]
        table = torch.tensor(pairs, dtype=dtype, device=scales.device)
        self.register_buffer("pairs", table, persistent=False)

    @property
    def shape(self) -> torch.Size:
        """Return the shape [E, in, out] of the decoded weight."""
        experts, outputs, blocks = self.scales.shape
        return torch.Size((experts, blocks * BLOCK_SIZE, outputs))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the decoded weight."""
        return self.pairs.dtype

    @torch.no_grad()
    def forward(self, blocks: Tensor) -> Tensor:
        """Return the decoded weight [E, in, out], contiguous, for bytes [E, out, blocks, 16]."""
        weight = self.pairs.new_empty(self.shape)
        exponents = self.scales.to(torch.int32) - EXPONENT_BIAS
        step = max(1, MAX_DECODED_ELEMENTS // max(1, weight[:1].numel()))
        for start in range(0, len(weight), step):
            some = slice(start, start + step)
            numbers = self.pairs[blocks[some].to(torch.int32)].flatten(-2)
            torch.ldexp(numbers, exponents[some].unsqueeze(-1), out=numbers)
            weight[some].copy_(numbers.flatten(-2).mT)
        return weight


def keep_in_mxfp4(module: nn.Module, name: str, blocks: Tensor, scales: Tensor) -> None:
    """Replace a weight of experts by bytes in MXFP4, which each read decodes. A call of the experts
    decodes once.

    Args:
        module: the experts.
        name: name of the weight [E, in, out] in `module`, whose dtype is kept.
        blocks: the weight's bytes, [E, out, blocks, 16] uint8.
        scales: exponents of the blocks' powers of two, [E, out, blocks] uint8.
    """
    dtype = getattr(module, name).dtype
    is_first = not parametrize.is_parametrized(module)
    setattr(module, name, nn.Parameter(blocks, requires_grad=False))
    parametrize.register_parametrization(module, name, Mxfp4Weight(scales, dtype), unsafe=True)
    if is_first:
        module.register_forward_pre_hook(begin_cache)
        module.register_forward_hook(end_cache, always_call=True)


def begin_cache(module: nn.Module, args: Any) -> None:
    """Enable torch's parametrization cache, so that one call of the experts' module decodes each
    weight once: a forward pre-hook of the module."""
    parametrize._cache_enabled += 1


def end_cache(module: nn.Module, args: Any, output: Any) -> None:
    """Disable torch's parametrization cache, and free the weights that a call of the experts'
    module has decoded: a forward hook of the module."""
    parametrize._cache_enabled = max(0, parametrize._cache_enabled - 1)
    if not parametrize._cache_enabled:
        parametrize._cache = {}
