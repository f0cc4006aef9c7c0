"""Detect, or warn, callers that read the logits of a call with labels, whose logits are None.

Most callers read the loss alone and test `logits is None`, as other libraries' fused losses
require. Four callers do not test. peft's CPT computes a loss of its own from the logits. So does a
method `compute_loss` that a program writes for HF Trainer, and a function that calls the model and
names the logits in its code. HF Trainer passes logits to `compute_metrics` or returns them from
`predict`. The arguments of a call do not show which caller it has. The running Python frames are
therefore inspected, and all four callers get logits.

Any other program that continues with None fails at its next line with an uninformative Python
error. Examples are programs that hand the output on to another function. Reading the field by name
therefore warns first, once for each place in the code; reads by libraries do not warn.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

from streambp.errors import StreamBPError
from streambp.known_names import CPT_FORWARD, PREDICTION, TRAINERS_LOSS

# Trainers of these libraries request the logits that they read.
TRAINER_LIBRARIES = ("transformers", "trl", "streambp")
LOGITS_KEY = "logits"
LIBRARIES_TESTING_NONE = (
    "transformers",
    "accelerate",
    "trl",
    "peft",
    "torch",
    "deepspeed",
    "streambp",
    "contextlib",
)
# Code of these modules requests the logits that it reads.
LOSS_READERS = (
    "transformers.trainer",
    "transformers.generation.",
    "trl.",
    "streambp.cli.",
    "streambp.integrations.",
    "streambp.planner.",
    "streambp.verify.",
)
MODULE_METHODS = ("forward", "__call__")
MAX_FRAMES = 48  # maximal number of frames between a model's forward and its caller


def reads_logits(by_name: bool = False) -> bool:
    """True if the running call of the model comes from code that computes its loss from the logits:
    peft's CPT, or a `compute_loss` method that a user's Trainer subclass overrides. Such a caller
    gets logits even if labels are passed. The function inspects the running Python frames.

    Args:
        by_name: True: code that names `logits` counts as well, as in `model(**batch).logits`. The
            code is that of the innermost running function outside of torch, transformers and
            similar libraries, and if that is a module's `forward`, of the next such function. A
            library's trainer reads the loss alone, whatever the program around it names.
    """
    is_searching = by_name
    frame: FrameType | None = sys._getframe()
    for _ in range(MAX_FRAMES):
        if frame is None:
            return False
        code = frame.f_code
        home = f"{frame.f_globals.get('__name__')}."
        if code.co_name == CPT_FORWARD and home.startswith("peft."):
            return True
        if code.co_name == TRAINERS_LOSS[0] and _overrides(frame):
            return True
        if is_searching and home.startswith(LOSS_READERS):
            is_searching = False
        if is_searching and home.partition(".")[0] not in LIBRARIES_TESTING_NONE:
            if LOGITS_KEY in (*code.co_names, *code.co_varnames, *code.co_consts):
                return True
            is_searching = code.co_name in MODULE_METHODS
        frame = frame.f_back
    return False


def _overrides(frame: FrameType) -> bool:
    """True if the `compute_loss` method that this frame runs belongs to a subclass of HF Trainer
    outside of transformers, TRL and streambp. Such a method may read the logits."""
    if str(frame.f_globals.get("__name__")).partition(".")[0] in TRAINER_LIBRARIES:
        return False
    for cls in type(frame.f_locals.get("self")).__mro__:
        if (
            cls.__name__ == TRAINERS_LOSS[1]
            and cls.__module__.partition(".")[0] == TRAINER_LIBRARIES[0]
        ):
            return True
    return False


def wants_predictions() -> bool:
    """True if the running call is an evaluation by a Trainer that collects the logits, for
    `compute_metrics` or to return them as predictions. Such a call gets logits even if labels are
    passed. The function inspects the running Python frames."""
    return any(
        frame.f_code.co_name == PREDICTION[0] and frame.f_locals.get(PREDICTION[1]) is False
        for frame in _stack_frames()
    )


def _stack_frames() -> Iterator[FrameType]:
    """Yield the Python frames of the current call stack, innermost first. Callers search these
    frames for the code that called the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


NO_LOGITS_REMEDY = (
    "the loss was computed without them, because labels were passed. Set "
    "StreamConfig(lazy_logits=True) to compute logits at their first use (in eval mode "
    "eval_logits=True), or leave labels out of the call."
)


class NoLogitsError(StreamBPError, KeyError):
    """Raised by `output["logits"]` for an output whose logits were not built."""

    def __str__(self) -> str:
        return str(self.args[0])


class NoLogitsMixin:
    """Mixin for a `ModelOutput` whose field `logits` is None because labels were passed. Reading
    `output.logits` warns, and `output["logits"]` raises `NoLogitsError`."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == LOGITS_KEY and value is None:
            _warn_of_read()
        return value

    def get(self, name: Any, default: Any = None) -> Any:
        """Return the value of a key, like `dict.get`. Warn if the key is "logits" and the output
        has none."""
        if name in self:  # type: ignore[attr-defined, operator]
            return self[name]
        if name == LOGITS_KEY:
            _warn_of_read()
        return default

    def __getitem__(self, name: Any) -> Any:
        if name == LOGITS_KEY and name not in self.keys():  # type: ignore[attr-defined]
            raise NoLogitsError(f"The output has no logits: {NO_LOGITS_REMEDY}")
        return super().__getitem__(name)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        kind: Any = type(self).__mro__[2]
        return kind(**dict(self.items())).__reduce__()  # type: ignore[attr-defined]


def _warn_of_read() -> None:
    """Warn that `output.logits` is None, if user code reads it; the warning points at that line.
    Libraries such as transformers test for None, so their reads do not warn.

    Called by the methods of `NoLogitsMixin` that read a field.
    """
    home = str(sys._getframe(2).f_globals.get("__name__"))
    if home.partition(".")[0] not in LIBRARIES_TESTING_NONE:
        warnings.warn(f"logits is None: {NO_LOGITS_REMEDY}", stacklevel=3)


@functools.cache
def without_logits(kind: type[Any]) -> type[Any]:
    """Return a subclass of a `ModelOutput` class, under the same name, for the outputs of calls
    with labels. Reading the logits of its instances warns."""
    return type(kind.__name__, (NoLogitsMixin, kind), {"__module__": kind.__module__})
