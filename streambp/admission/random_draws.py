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
    """Torch dispatch mode that records the size of each draw of random numbers from torch's default
    generators, and can replace the numbers. Draws inside of streambp's attention are left out,
    because attention draws for each chunk on purpose.

    Args:
        fixed: indices of the draws whose numbers are replaced, in the order of the draws.
        fraction: the replacement. Floating-point numbers become `fraction`. Bools become True if
            `fraction` is at least 0.5. The order of integers is then reversed, and a single integer
            is increased by 1.

    Attributes:
        sizes: the number of random numbers in each draw so far.
    """

    def __init__(self, fixed: Collection[int] = (), fraction: float = 0.0) -> None:
        super().__init__()
        self.fixed = fixed
        self.fraction = fraction
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and return its result. If the operation draws random numbers, add the
        number of elements of its first result [...] to `sizes`. If the draw's index is in `fixed`,
        replace the random numbers."""
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
    """Return the indices of a layer's random draws that may be for the call as a whole, and not for
    each token. A chunk with fewer tokens than the full sequence draws the same number of random
    numbers in these draws.

    The result is {} if chunks and full sequence draw equally many numbers altogether. All draws are
    returned if a chunk makes more or fewer draws than the full sequence, for example one for each
    expert.

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
    """True if the present operation was called by code of streambp's attention. The Python stack is
    searched up to the function that called the layer's forward."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(ATTENTION_PACKAGE):
            return True
        if name == CALL_MODULE:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False
