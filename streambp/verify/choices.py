"""Count the indices that `torch.topk` chooses for each token in a forward, such as experts."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CountedChoices(TorchFunctionMode):
    """Context manager that counts the results of `torch.topk`: indices, for example of each token's
    experts in an MoE router. `verify` compares the counts of a model with and without streambp:
    gradients are only comparable if both runs chose the same experts.

    The counts do not depend on chunks or on the order of rows.

    Attributes:
        counts: dict from the size of the dimension in which topk selects to a Counter. The Counter
            counts rows by their returned indices, a tuple in ascending order.
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

    def count_differences(self, other_choices: CountedChoices) -> int:
        """Return the number of rows whose indices were counted here and not in `other_choices`. A
        row is a token with the indices of its experts, for example.

        Counts are compared separately for each size of the dimension in which topk selects. A size
        is ignored if the two objects counted different numbers of rows. This happens in sparse
        attention, whose `topk` selects among the keys so far: this size depends on the chunks.
        """
        sizes = self.counts.keys() & other_choices.counts.keys()
        comparable = []
        for n in sizes:
            if self.counts[n].total() == other_choices.counts[n].total():
                comparable.append(n)
        return sum((self.counts[n] - other_choices.counts[n]).total() for n in comparable)
