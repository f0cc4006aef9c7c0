"""What scripts/house.py counts, by hand; and how many protocols the package may have."""

from __future__ import annotations

import ast
from pathlib import Path

from scripts.house import Counts, body_lines, counts_of, densities, table

PACKAGE = Path(__file__).parents[2] / "streambp"
SOURCE = '''"""A module.

[Note: a rule] It is cited below.
"""

import typing
from typing import Protocol


class Kernel(Protocol):
    """What computes. [Note: a rule]"""

    def run(self) -> int: ...


class Plain:
    # Why it is here.
    def run(self) -> int:
        """Three lines of body.

        Its docstring counts for none.
        """
        x = 1
        y = 2  # and why
        return x + y

    def long(self) -> int:
        """Four."""
        x = 1
        y = 2

        return x + y
'''


def test_counts_by_hand():
    expected = Counts(
        files=1,
        lines=32,
        code=13,
        functions=3,
        tiny=2,
        classes=2,
        protocols=1,
        notes=1,
        commented=2,
        longest=8,
    )
    assert counts_of(SOURCE) == expected
    assert expected.comments == round(1000 * 2 / 13)
    assert densities(expected) == "231 functions and 153.8 classes for 1,000 lines of code"


def test_sums_keep_the_longest_function():
    total = counts_of(SOURCE)
    total += Counts(files=1, lines=10, longest=4)
    assert (total.files, total.lines, total.longest) == (2, 42, 8)


def test_a_table_shows_what_differs():
    old_counts, new_counts = (
        {"all": Counts(lines=1000)},
        {"all": Counts(lines=2000), "new": Counts(files=1)},
    )
    rows = table(old_counts, new_counts).splitlines()
    assert rows[2].startswith("| new | 0 -> 1 | 0 |")
    assert rows[3].startswith("| all | 0 | 1,000 -> 2,000 | 0 |")


def test_protocols_are_few():
    """One for several implementations, or between modules that would import each other. A single
    one names its class."""
    sources = (path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    assert sum(counts_of(source).protocols for source in sources if "Protocol" in source) <= 5


def test_a_body_without_its_docstring():
    (function,) = ast.parse('def f():\n    """Says."""\n').body
    assert body_lines(function) == 0
