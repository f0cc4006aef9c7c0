"""Outputs of a call with labels, in which there are no logits: they tell a program that asks for them what to do.

Programs test `logits is None`, as they have to with other libraries' fused losses, so it is None.
A program that goes on with it fails at its next line, with an error of Python's that names nothing.
So whoever asks for logits by their name hears it before, once a place, and libraries do not.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

from streambp.errors import StreamBPError

LOGITS = "logits"
TEST_FOR_NONE = ("transformers", "accelerate", "trl", "peft", "torch", "deepspeed", "streambp")
REMEDY = (
    "there are none where labels are given: the loss was computed without them. Set "
    "StreamConfig(lazy_logits=True), which gives logits that are computed where they are used (in eval "
    "mode eval_logits=True), or leave labels out of the call."
)


class NoLogitsError(StreamBPError, KeyError):
    """An output was asked for its logits by a key that it does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


class LeftOut:
    """Mixed into a model's output: its field `logits` is None because labels were given."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == LOGITS and value is None:
            _tell()
        return value

    def get(self, name: Any, default: Any = None) -> Any:
        """As a dict's."""
        if name in self:  # type: ignore[attr-defined, operator]
            return self[name]
        if name == LOGITS:
            _tell()
        return default

    def __getitem__(self, name: Any) -> Any:
        if name == LOGITS and name not in self.keys():  # type: ignore[attr-defined]
            raise NoLogitsError(f"The output has no logits: {REMEDY}")
        return super().__getitem__(name)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        kind: Any = type(self).__mro__[2]
        return kind(**dict(self.items())).__reduce__()  # type: ignore[attr-defined]


def _tell() -> None:
    """Warn of logits that are None, at the line that asks for them, if no library does."""
    home = str(sys._getframe(2).f_globals.get("__name__"))
    if home.partition(".")[0] not in TEST_FOR_NONE:
        warnings.warn(f"logits is None: {REMEDY}", stacklevel=3)


@functools.cache
def left_out(kind: type[Any]) -> type[Any]:
    """A kind of output that tells so, by the same name."""
    return type(kind.__name__, (LeftOut, kind), {"__module__": kind.__module__})
