"""What a forward chose by `topk`: which experts a token goes to."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Choices(TorchFunctionMode):
    """Within, counts what `torch.topk` chose, row by row; chunks, and the order in which rows come, make no difference.

    counts: for each number of candidates, of the indices chosen, ascending.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, collections.Counter[tuple[int, ...]]] = collections.defaultdict(collections.Counter)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            rows = result.indices.flatten(0, -2).sort(-1).values.tolist()  # [n, k]
            self.counts[args[0].shape[-1]].update(map(tuple, rows))
        return result

    def differing(self, other: Choices) -> int:
        """How many rows chose what no row of the other did. Where the number of candidates is that of the keys so far, as
        in sparse attention, chunks have other numbers of rows to it: these are left out."""
        both = self.counts.keys() & other.counts.keys()
        alike = [n for n in both if self.counts[n].total() == other.counts[n].total()]
        return sum((self.counts[n] - other.counts[n]).total() for n in alike)
