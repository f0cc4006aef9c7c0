"""Find random numbers that a layer draws for a whole row, or for a weight, and not for each token.

Dropout draws a number for each token, and a chunk draws those of its tokens. Stochastic depth draws
one number for a row. peft's `rank_dropout` and `module_dropout` of LoKr and LoHa draw numbers for a
weight in each call. Each chunk would draw such numbers anew. The layer would then compute
something that the unpatched layer never computes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REASON_DRAWS_FOR_ROWS = (
    "it draws random numbers for the whole call and not for each token (stochastic depth, "
    "rank_dropout); each chunk would draw its own"
)
HALF = 0.5
# Thresholds of a draw are between these fractions, unless the draw has no effect, as at a rate of 0.
EXTREMES = (2.0**-20, 1 - 2.0**-20)
ATTENTION_PACKAGE = "streambp.attention"
CALL_MODULE = "streambp.layer.call"  # below it in the stack are frames of the layer's own code


class DrawRecorder(TorchDispatchMode):
    """Mode that records the random numbers drawn from torch's default generators, outside of
    streambp's attention. Attention draws a seed for each chunk, and masks of blocks.

    Args:
        fixed: indices of draws whose numbers are replaced, in the order of the draws.
        fraction: the replacement, as a fraction of the range of the numbers; at least 0.5 also
            reverses the order of whole numbers.

    Attributes:
        sizes: number of elements of each draw.
    """

    def __init__(self, fixed: Collection[int] = (), fraction: float = 0.0) -> None:
        super().__init__()
        self.fixed = fixed
        self.fraction = fraction
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation. After a draw, record the number of elements [...] of the operation's
        first result, and replace the numbers of a draw in `fixed`."""
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in function.tags or _is_in_attention():
            return result
        tensors = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
        if len(self.sizes) in self.fixed:
            for drawn in tensors:
                self._replace(drawn)
        self.sizes.append(sum(drawn.numel() for drawn in tensors[:1]))
        return result

    def _replace(self, drawn: Tensor) -> None:
        if drawn.is_floating_point():
            drawn.fill_(self.fraction)
        elif drawn.dtype == torch.bool:
            drawn.fill_(self.fraction >= HALF)
        elif self.fraction >= HALF and drawn.dim():
            drawn.copy_(drawn.flip(0))
        elif self.fraction >= HALF:
            drawn.add_(1)


def draws_for_rows(unchunked: list[int], chunks: list[list[int]]) -> set[int]:
    """Return the indices of draws whose sizes do not depend on the number of tokens.

    The result is empty if the chunks and the full sequence draw equally many numbers. The result
    has all draws if a chunk draws more or less often, for example for each expert.

    Args:
        unchunked: size of each draw in a run of all tokens at once.
        chunks: size of each draw in each chunk; empty for too few tokens for two chunks.
    """
    if sum(unchunked) == sum(map(sum, chunks)):
        return set()
    indices = set(range(len(unchunked)))
    if chunks and all(len(chunk) == len(unchunked) for chunk in chunks):
        for index, size in enumerate(unchunked):
            if all(chunk[index] != size for chunk in chunks):
                indices.discard(index)
    return indices


def _is_in_attention() -> bool:
    """True if code of streambp's attention runs, called by the layer that is tested."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(ATTENTION_PACKAGE):
            return True
        if name == CALL_MODULE:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False
