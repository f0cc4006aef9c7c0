"""What `@pytest.mark.fast` leaves to the full tier. It is about the tests themselves, and covers no
module."""

from __future__ import annotations

import pytest

from tests.tiers import leave_out


class Case:
    """Of a collected test, what `leave_out` asks for."""

    def __init__(self, name, fast=None, full=False):
        self.nodeid = f"tests/test_x.py::test_y[{name}]"
        self.marks = {}
        if fast is not None:
            self.marks["fast"] = pytest.mark.fast(*fast).mark
        if full:
            self.marks["full"] = pytest.mark.full.mark

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, marker):
        self.marks[marker.name] = marker.mark


def fast_ones(cases):
    leave_out(cases)
    return [case.nodeid.partition("[")[2][:-1] for case in cases if "full" not in case.marks]


def test_names():
    assert fast_ones([Case(name, ["a", "[T, T]"]) for name in ("a", "b", "[T, T]", "ab")]) == [
        "a",
        "[T, T]",
    ]


def test_every_third_of_those_that_are_not_full_already():
    cases = [Case(str(index), [3], full=index == 0) for index in range(8)]
    assert fast_ones(cases) == ["1", "4", "7"]


def test_a_test_without_the_mark_stays():
    assert fast_ones([Case("a"), Case("b", full=True)]) == ["a"]


def test_a_name_of_no_case_is_an_error():
    with pytest.raises(pytest.UsageError, match="no case has a name"):
        leave_out([Case("a", ["c"]), Case("b", ["c"])])


def test_a_case_asked_for_alone_is_no_error():
    assert fast_ones([Case("a", ["c"])]) == []
