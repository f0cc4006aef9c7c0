"""Objectives that moved to the examples: the package has them for one more release, and says where
they are.

covers: losses/__init__.py
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest

from streambp import losses

EXAMPLE = Path(__file__).parents[2] / "examples" / "objectives.py"


@pytest.mark.parametrize("name", losses.DEPRECATED_NAMES)
def test_a_warning_names_the_example(name):
    with pytest.warns(
        FutureWarning, match=rf"Copy examples/objectives\.py, which has {name}:"
    ) as warned:
        value = getattr(losses, name)
    assert [warning.filename for warning in warned] == [__file__]  # who has to change a line
    if callable(value):
        assert inspect.getsourcefile(value) == str(EXAMPLE)
    assert value


def test_what_stays_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(callable(getattr(losses, name)) for name in losses.__all__)


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'kto_loss'"):
        losses.kto_loss  # noqa: B018
