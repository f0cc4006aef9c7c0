"""What forwards of experts that look at their routing see without data: every expert gets an equal share of the tokens.

Some families (dbrx, jetmoe, longcat_flash) do not multiply experts together, but ask which of them were picked and by which
tokens, and compute one after the other. They ask in two ways:

    nonzero    of a flag for each expert: all of them were picked. Of an expert's row of a one-hot matrix: its share of the
               pairs of a token and an expert
    to a list  the number of tokens of each expert: their shares

Shares are whole; the first experts get what is left over.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from streambp.planner.work import aten

TOP_K = aten.topk.default
LOOKED_AT = frozenset({aten.nonzero.default, aten._to_copy.default})


@dataclasses.dataclass
class Routing:
    """The routing that was seen last. rows: pairs of a token and an expert; experts: how many there are."""

    rows: int = 0
    experts: int = 0

    def answer(self, func: Any, args: Any) -> Tensor | tuple[tuple[int, int], torch.dtype] | None:
        """What an operation on a tensor [...] without data gives: one with data, or the shape and dtype of one without;
        None where it does not look at a routing."""
        (asked,) = args[:1]
        if func is aten._to_copy.default:
            counts = asked.dim() == 1 and self.rows and not asked.is_floating_point() and asked.dtype != torch.bool
            if not counts:
                return None
            each, more = divmod(self.rows, asked.shape[0])
            shares = [each + (place < more) for place in range(asked.shape[0])]
            return torch.tensor(shares, dtype=torch.long, device="cpu").to(asked.dtype)  # [experts]
        if asked.dtype == torch.bool and asked.dim() == 1:
            self.experts = asked.shape[0]
            return (self.experts, 1), torch.long
        if asked.dtype == torch.bool or not self.experts:
            return None
        return (-(-asked.numel() // self.experts), asked.dim()), torch.long
