"""Which cases the fast tier runs; the full tier runs all of them.

The fast tier takes about ten minutes on two cores. So a case of more than a second is for the full
tier, unless it is the only one that tries what it tries: `@pytest.mark.full` on a test, `thinned`
on one axis, and `@pytest.mark.fast("packed", "left-padded")` or `@pytest.mark.fast(3)` on all cases
of a test: the fast tier runs the cases of these names, or every third.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], fast: Callable[..., bool]) -> list[Any]:
    """For `parametrize`: cases for which `fast` is false are marked `full`. A case of several
    arguments is a tuple."""
    parameter_sets = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        parameter_sets.append(
            pytest.param(*values, marks=() if fast(*values) else pytest.mark.full)
        )
    return parameter_sets


def leave_out(items: list[pytest.Item]) -> None:
    """Marks `full` what a test's `fast` mark leaves out of the cases in `items`.

    Raises:
        pytest.UsageError: a test has two cases or more here, and the names of its mark are of none.
    """
    marked = [
        item
        for item in items
        if item.get_closest_marker("fast") and not item.get_closest_marker("full")
    ]
    tests = [item.nodeid.partition("[")[0] for item in marked]
    counts: Counter[str] = Counter()
    left_out_counts: Counter[str] = Counter()
    for item, test in zip(marked, tests, strict=True):
        names = item.get_closest_marker("fast").args
        name = item.nodeid.partition("[")[2].removesuffix("]")
        runs = counts[test] % names[0] == 0 if isinstance(names[0], int) else name in names
        counts[test] += 1
        if not runs:
            left_out_counts[test] += 1
            item.add_marker(pytest.mark.full)
    for test, number in counts.items():
        if number > 1 and left_out_counts[test] == number:
            raise pytest.UsageError(f"{test}: no case has a name of its mark `fast`.")
