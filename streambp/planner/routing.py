"""What forwards of experts that look at their routing see without data: every expert gets an equal share of the tokens.

Some families (dbrx, jetmoe, longcat_flash) do not multiply experts together, but ask which of them were picked and by which
tokens, and compute one after the other. They ask in two ways:

    nonzero    of a flag for each expert: all of them were picked. Of an expert's row of a one-hot matrix: its share of the
               pairs of a token and an expert
    to a list  the number of tokens of each expert: their shares

Shares are whole; the first experts get what is left over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streambp.planner.work import aten

TOP_K = aten.topk.default
LOOKED_AT = frozenset({aten.nonzero.default, aten._to_copy.default})


def answer(func: Any, asked: Tensor, rows: int, experts: int) -> Tensor | tuple[tuple[int, int], torch.dtype] | None:
    """What an operation on a tensor [...] without data gives: one with data, or the shape and dtype of one without; None
    where it does not look at a routing.

    Args:
        rows: pairs of a token and an expert in the routing that was seen last; experts: how many there are.
    """
    if func is aten._to_copy.default:
        if asked.dim() != 1 or not rows or asked.is_floating_point() or asked.dtype == torch.bool:
            return None
        each, more = divmod(rows, asked.shape[0])
        shares = [each + (place < more) for place in range(asked.shape[0])]
        return torch.tensor(shares, dtype=torch.long, device="cpu").to(asked.dtype)  # [experts]
    if asked.dtype == torch.bool:
        return ((asked.shape[0], 1), torch.long) if asked.dim() == 1 else None
    return ((-(-asked.numel() // experts), asked.dim()), torch.long) if experts else None
