"""What a caller will do with the logits of a call with labels, where only the caller itself can tell.

Most read the loss alone, and test whether there are logits, as they have to with other libraries' fused losses. Two do not
test: peft's CPT computes a loss of its own from them, and HF Trainer hands them to `compute_metrics` or returns them from
`predict`. Neither says so in what it passes, so the functions that are running are asked.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from types import FrameType

from streambp.known_names import CPT_FORWARD, PREDICTION

NEAR = 24  # frames between a model's forward and the function that called it: torch's, accelerate's, ours


def computes_its_own_loss() -> bool:
    """Whether peft's CPT is calling the model."""
    near = itertools.islice(_running(), NEAR)
    return any(frame.f_code.co_name == CPT_FORWARD and _home(frame).startswith("peft.") for frame in near)


def warn_of_missing_predictions() -> bool:
    """Warn if a Trainer wants the logits of this evaluation, for metrics or as predictions; whether it did."""
    wanted = any(
        frame.f_code.co_name == PREDICTION[0] and frame.f_locals.get(PREDICTION[1]) is False for frame in _running()
    )
    if wanted:
        warnings.warn(
            "Set streambp.StreamConfig(eval_logits=True) to get logits in eval mode. This Trainer wants the logits of an "
            "evaluation, for compute_metrics or as predictions, but a streamed model with labels computes the loss without "
            "logits, and returns none.",
            stacklevel=2,
        )
    return wanted


def _running() -> Iterator[FrameType]:
    """The functions that are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _home(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
