"""Detect callers that read the logits of a call with labels.

Most callers read the loss alone and test if logits exist, as other libraries' fused losses require.
Three callers do not test. peft's CPT computes a loss of its own from the logits, and so does a
method `compute_loss` that a program writes for HF Trainer. HF Trainer passes logits to
`compute_metrics` or returns them from `predict`. The arguments of a call do not show which caller
it has. The running Python frames are therefore inspected, and all three callers get logits.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType

from streambp.known_names import CPT_FORWARD, PREDICTION, TRAINERS_LOSS

# their own trainers read the loss alone, or request logits
LIBRARIES = ("transformers", "trl", "streambp")
MAX_FRAMES = 24  # maximal number of frames between a model's forward and its caller


def computes_its_own_loss() -> bool:
    """True if the running call of the model comes from code that computes its loss from the logits:
    peft's CPT, or a `compute_loss` method that a user's Trainer subclass overrides.

    The function inspects the running Python frames.
    """
    return any(map(_is_cpts, _near())) or any(map(_overrides, _near()))


def _near() -> Iterator[FrameType]:
    return itertools.islice(_running(), MAX_FRAMES)


def _is_cpts(frame: FrameType) -> bool:
    home = str(frame.f_globals.get("__name__"))
    return frame.f_code.co_name == CPT_FORWARD and home.startswith("peft.")


def _overrides(frame: FrameType) -> bool:
    """True if a running function is a `compute_loss` method of a Trainer's subclass that neither
    transformers nor another known library defines."""
    method, kind = TRAINERS_LOSS
    if frame.f_code.co_name != method:
        return False
    if str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES:
        return False
    named = (own for own in type(frame.f_locals.get("self")).__mro__ if own.__name__ == kind)
    return any(own.__module__.partition(".")[0] == LIBRARIES[0] for own in named)


def wants_predictions() -> bool:
    """True if the running call is an evaluation by a Trainer that collects the logits, for
    `compute_metrics` or as predictions. The function inspects the running Python frames."""
    return any(
        frame.f_code.co_name == PREDICTION[0] and frame.f_locals.get(PREDICTION[1]) is False
        for frame in _running()
    )


def _running() -> Iterator[FrameType]:
    """Yield the Python frames of the current call stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
