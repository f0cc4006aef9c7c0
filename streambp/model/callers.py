"""What a caller will do with the logits of a call with labels, where only the caller itself can tell.

Most read the loss alone, and test whether there are logits, as they have to with other libraries' fused losses. Two do not
test: peft's CPT computes a loss of its own from them, and HF Trainer hands them to `compute_metrics` or returns them from
`predict`. Neither says so in what it passes, so the functions that are running are asked, and both get logits.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType

from streambp.known_names import CPT_FORWARD, PREDICTION

NEAR = 24  # frames between a model's forward and the function that called it: torch's, accelerate's, ours


def computes_its_own_loss() -> bool:
    """Whether peft's CPT is calling the model."""
    near = itertools.islice(_running(), NEAR)
    return any(f.f_code.co_name == CPT_FORWARD and str(f.f_globals.get("__name__")).startswith("peft.") for f in near)


def wants_predictions() -> bool:
    """Whether a Trainer takes the logits of this evaluation, for metrics or as predictions."""
    return any(frame.f_code.co_name == PREDICTION[0] and frame.f_locals.get(PREDICTION[1]) is False for frame in _running())


def _running() -> Iterator[FrameType]:
    """The functions that are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
