"""Hidden states shared by several tokens of a batch, with an index for each token.

[Note: places] A model whose rows share prefixes ends with the hidden states [N, h] of its packed
row. The head reads them at places [B, T], or at the labelled places only, and never as [B, T, h].
The gradient of a hidden state that several tokens read is a sum, added in promote_types(dtype,
float32) and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 4096


class AtPlaces(torch.autograd.Function):
    """Autograd Function that selects rows: source [N, h] and places [M] -> [M, h]."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, places: Tensor) -> Tensor:
        """Return a new tensor [M, h] in source's dtype."""
        ctx.save_for_backward(places)
        ctx.count = source.shape[0]
        return source.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sums [N, h] of grad [M, h], in its dtype. [Note: places]"""
        (places,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.count, grad.shape[1], dtype=torch.promote_types(grad.dtype, torch.float32))
        for part, at in zip(grad.split(ROWS), places.split(ROWS), strict=True):
            total.index_add_(0, at, part.to(total.dtype))
        return total.to(grad.dtype), None


def taken(source: Tensor, places: Tensor) -> Tensor:
    """Return source [N, h] at places [...], [..., h] in source's dtype."""
    flat: Tensor = AtPlaces.apply(source, places.reshape(-1))
    return flat.view(*places.shape, source.shape[-1])
