"""Find random numbers that a layer draws for a whole row, or for a weight, and not for each token.

Dropout draws a number for each token, and a chunk draws those of its tokens. Stochastic depth draws
one number for a row. peft's `rank_dropout` and `module_dropout` of LoKr and LoHa draw numbers for a
weight in each call. Each chunk would draw such numbers anew. The layer would then compute
something that the unpatched layer never computes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

REASON_DRAWS_FOR_ROWS = (
    "it draws random numbers for a row or a weight and not for each token (stochastic depth, "
    "rank_dropout); each chunk would draw its own"
)
ATTENTION_PACKAGE = "streambp.attention"
CALL_MODULE = "streambp.layer.call"  # below it in the stack are frames of the layer's own code


class DrawCounter(TorchDispatchMode):
    """Mode that counts the random numbers drawn from torch's default generators, outside of
    streambp's attention. Attention draws a seed for each chunk, and masks of blocks.

    Attributes:
        numbers: number of random numbers drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count the elements [...] of its first result if they are random."""
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags and not _is_in_attention():
            first = result[0] if isinstance(result, (tuple, list)) else result
            if isinstance(first, Tensor):
                self.numbers += first.numel()
        return result


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
