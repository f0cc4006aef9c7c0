"""scripts/renames.py: a change of names passes, every other change is found."""

from __future__ import annotations

import pytest

from scripts.renames import Comparison

SOURCE = '''
"""A module."""
LIMIT = 3


class Layer:
    size = 2

    def run(self, tokens, width=1):
        """Run."""
        total = sum(token * width for token in tokens)

        def add(value):
            nonlocal total
            total = total + value + LIMIT
            return total

        return add(self.size), f"{total} tokens"
'''
RENAMES = [
    [("sum(token * width for token in", "sum(piece * width for piece in")],
    [("total", "amount")],
    [("width", "factor")],
    [("size", "width_of_layer")],
    [("LIMIT", "BOUND")],
    [("Layer", "Block")],
    [('"""Run."""', '"""Run it."""')],
]
OTHER_CHANGES = [
    [("value + LIMIT", "value - LIMIT")],  # an operator
    [("LIMIT = 3", "LIMIT = 4")],
    [("total + value", "value + value")],  # two variables become one
    [("value", "total")],
    [("token * width", "width * width")],
    [("            nonlocal total\n", "")],
    [("return total", "return tokens")],  # one variable becomes two
    [("add(self.size)", "add(self.size, 1)")],
]


def compared(replacements):
    source = SOURCE
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    comparison = Comparison()
    comparison.compare_files("layer.py", SOURCE, source)
    return comparison


@pytest.mark.parametrize("replacements", RENAMES, ids=str)
def test_names_alone_are_no_difference(replacements):
    assert compared(replacements).differences == []


@pytest.mark.parametrize("replacements", OTHER_CHANGES, ids=str)
def test_every_other_change_is_a_difference(replacements):
    assert compared(replacements).differences


def test_attributes_and_strings_are_listed():
    assert compared([("self.size", "self.length")]).renamed["size"] == {"length": 1}
    assert compared([(" tokens", " words")]).strings == {(" tokens", " words"): 1}
