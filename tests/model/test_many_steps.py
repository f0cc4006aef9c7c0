"""A thousand steps cost no more than the first: `scripts/many_steps.py` and its slopes.

covers: chunks.py, layer/layer_state.py
"""

from __future__ import annotations

import pytest

from scripts import many_steps
from scripts.many_steps import MODES, Point, run, slope, summary_line

OBJECTS, CALLS = 0.5, 0.5  # a step: an object that each step leaves is 1


def check(mode, steps):
    points = run(mode, steps)
    print(summary_line(mode, points))
    assert abs(slope(points, "objects")) < OBJECTS
    assert slope(points, "calls") / points[-1].calls * steps < CALLS


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_objects_and_calls_of_a_step_stay(mode):
    """400 steps: by then caches of chunk plans, which keep 128 lengths, are full. The script's
    default are 1,000."""
    check(mode, 400)


@pytest.mark.full
def test_a_leak_is_found(monkeypatch):
    leak, real = [], many_steps.trained

    def leaking(*args):
        leak.append([])
        real(*args)

    monkeypatch.setattr(many_steps, "trained", leaking)
    monkeypatch.setattr(
        many_steps, "batch", lambda mode, length, rows, real=many_steps.batch: real(mode, 41, 2)
    )
    with pytest.raises(AssertionError):
        check("auto", 60)


def test_slopes():
    points = [Point(step, 7, 100 + 3 * step, None) for step in range(0, 100, 10)]
    assert slope(points, "objects") == pytest.approx(3)
    assert slope(points, "calls") == pytest.approx(0)
    assert slope(points, "resident") != slope(points, "resident")
