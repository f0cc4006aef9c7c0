"""Compute parts of reports so that no error in a report ends the program.

Code that only reports must never raise: a run of days must not end over a line of text. Such code
is `describe`, the account of `streambp launch`, callbacks, and hooks that print. Each part of a
report goes through `report_safely`. A part that fails is replaced by the reason. Code that decides,
or changes the model, raises as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from streambp.fields import short_repr

T = TypeVar("T")
MAX_ERROR_CHARACTERS = 400  # characters of an error in a report


def report_safely(part: Callable[..., T], *args: Any, otherwise: Callable[[str], T]) -> T:
    """Return the result of `part(*args)`, a part of a report. If the call raises, return
    `otherwise(text)` instead, where the text has the error's type and message. An error in a report
    thus does not end the program.

    Args:
        part: function that makes a part of a report.
        args: arguments of `part`.
        otherwise: makes a replacement for the part from the error's text.
    """
    try:
        return part(*args)
    except Exception as error:
        return otherwise(reason(error))


def reason(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = short_repr(error)
    if text:
        text = f"{type(error).__name__}: {text}"
    else:
        text = type(error).__name__
    if len(text) <= MAX_ERROR_CHARACTERS:
        return text
    return f"{text[:MAX_ERROR_CHARACTERS]}..."
