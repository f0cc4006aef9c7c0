"""What a caller will do with the logits of a call with labels, where only the caller itself can tell.

Most read the loss alone, and test whether there are logits, as they have to with other libraries'
fused losses. Three do not test. peft's CPT computes a loss of its own from them. So does a method
`compute_loss` that a program writes for HF Trainer. HF Trainer hands them to `compute_metrics` or
returns them from `predict`. None says so in what it passes, so the functions that are running are
asked, and all get logits.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType

from streambp.known_names import CPT_FORWARD, PREDICTION, TRAINERS_LOSS

LIBRARIES = ("transformers", "trl", "streambp")  # whose own trainers read the loss alone, or ask for more
NEAR = 24  # frames between a model's forward and the function that called it: torch's, accelerate's, ours


def computes_its_own_loss() -> bool:
    """Whether peft's CPT is calling the model, or a method `compute_loss` that overrides a Trainer's."""
    return any(map(_is_cpts, _near())) or any(map(_overrides, _near()))


def _near() -> Iterator[FrameType]:
    return itertools.islice(_running(), NEAR)


def _is_cpts(frame: FrameType) -> bool:
    home = str(frame.f_globals.get("__name__"))
    return frame.f_code.co_name == CPT_FORWARD and home.startswith("peft.")


def _overrides(frame: FrameType) -> bool:
    """Whether a function that is running is a method of a Trainer's heir, none of a library's own trainer."""
    method, kind = TRAINERS_LOSS
    if frame.f_code.co_name != method:
        return False
    if str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES:
        return False
    named = (own for own in type(frame.f_locals.get("self")).__mro__ if own.__name__ == kind)
    return any(own.__module__.partition(".")[0] == LIBRARIES[0] for own in named)


def wants_predictions() -> bool:
    """Whether a Trainer takes the logits of this evaluation, for metrics or as predictions."""
    return any(frame.f_code.co_name == PREDICTION[0] and frame.f_locals.get(PREDICTION[1]) is False for frame in _running())


def _running() -> Iterator[FrameType]:
    """The functions that are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
