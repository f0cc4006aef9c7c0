"""Reports that end nothing.

[Note: reports] What only reports (`describe`, the account of `streambp launch`, callbacks, hooks that tell) never raises: a
run of days must not end over a line of text. Each part of a report goes through `told`, which says in its place what
could not be told, and why. What decides, or changes the model, raises as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from streambp.fields import shown

T = TypeVar("T")
LONGEST = 400  # characters of an error in a report


def told(part: Callable[..., T], *args: Any, otherwise: Callable[[str], T]) -> T:
    """What `part` returns; if it raises, what `otherwise` makes of the reason, one line. [Note: reports]"""
    try:
        return part(*args)
    except Exception as error:
        return otherwise(reason(error))


def reason(error: BaseException) -> str:
    """An error in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = shown(error)
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
