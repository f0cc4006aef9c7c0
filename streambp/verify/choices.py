"""Record the experts that `topk` chose for each token in a forward."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CountedChoices(TorchFunctionMode):
    """Context manager that counts the choices of `torch.topk`, row by row.

    The counts do not depend on chunks or on the order of rows.

    Attributes:
        counts: number of candidates -> how often each ascending tuple of indices was chosen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, collections.Counter[tuple[int, ...]]] = collections.defaultdict(
            collections.Counter
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            rows = result.indices.flatten(0, -2).sort(-1).values.tolist()  # [n, k]
            self.counts[args[0].shape[-1]].update(map(tuple, rows))
        return result

    def differing(self, other: CountedChoices) -> int:
        """Return how many rows made a choice that no row of `other` made.

        In sparse attention the number of candidates is the number of keys so far. Chunks then
        differ in the number of rows for a number of candidates; such counts are ignored.
        """
        both = self.counts.keys() & other.counts.keys()
        alike = []
        for n in both:
            if self.counts[n].total() == other.counts[n].total():
                alike.append(n)
        return sum((self.counts[n] - other.counts[n]).total() for n in alike)
