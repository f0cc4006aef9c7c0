"""Which cases of an axis the fast tier runs; the full tier runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], fast: Callable[..., bool]) -> list[Any]:
    """For `parametrize`: cases for which `fast` is false are marked `full`. A case of several arguments is a tuple."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if fast(*values) else pytest.mark.full))
    return found
