"""Warn a program that reads the logits of a call with labels, which has none.

Programs test `logits is None`, as other libraries' fused losses require, so the field is None. A
program that continues with None fails at its next line with an uninformative Python error. Reading
the field by name therefore warns first, once for each place in the code; reads by libraries do not
warn.
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
    "the loss was computed without them, because labels were passed. Set "
    "StreamConfig(lazy_logits=True) to compute logits at their first use (in eval mode "
    "eval_logits=True), or leave labels out of the call."
)


class NoLogitsError(StreamBPError, KeyError):
    """Raised by `output["logits"]` for an output whose logits were not built."""

    def __str__(self) -> str:
        return str(self.args[0])


class LeftOut:
    """Mixin for a `ModelOutput` whose `logits` are None because labels were passed. Reading the
    field warns."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == LOGITS and value is None:
            _tell()
        return value

    def get(self, name: Any, default: Any = None) -> Any:
        """Return the value of a key, like `dict.get`. Warn if the key is "logits" and the output
        has none."""
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
    """Warn that logits are None, at the source line of the code that reads them. Code of libraries
    that test for None gets no warning."""
    home = str(sys._getframe(2).f_globals.get("__name__"))
    if home.partition(".")[0] not in TEST_FOR_NONE:
        warnings.warn(f"logits is None: {REMEDY}", stacklevel=3)


@functools.cache
def left_out(kind: type[Any]) -> type[Any]:
    """Return a subclass of a `ModelOutput` class, under the same name. Reading the logits of its
    instances warns."""
    return type(kind.__name__, (LeftOut, kind), {"__module__": kind.__module__})
