"""The waits of weights on the host under the race checker: no races, and one for each wait that is left out.

covers: offload/weights.py
"""

from __future__ import annotations

import inspect
import sys

import pytest

from streambp.offload import manager_of, weights
from tests.offload.runs import forward
from tests.offload.trace_engine import TraceEngine
from tests.offload.weights_runs import made, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")
LINES = inspect.getsource(weights).splitlines()
WAITS = {line.rpartition("# ")[2]: number for number, line in enumerate(LINES, 1) if ".wait(" in line}
RACES = {"7": "back writes device", "8": "compute reads device"}


def traced(left_out=None, **settings):
    """The weights' engine after micro-batches that interleave; without one of the waits."""

    class Leaky(TraceEngine):
        def wait(self, queue, event):
            if sys._getframe(1).f_code.co_filename != weights.__file__ or sys._getframe(1).f_lineno != WAITS.get(left_out):
                super().wait(queue, event)

    model = made(**settings)
    engine = weights_of(model)._given_engine = Leaky(collect=left_out is not None)
    if settings:
        manager_of(model)._given_engine = TraceEngine()
    for _ in range(2):
        losses = [forward(model, seed) for seed in range(2)]
        losses[1].backward()
        losses[0].backward()
        forward(model, 3).backward()
    return engine


def test_every_wait_has_a_number_and_a_race():
    assert WAITS.keys() == RACES.keys()


@pytest.mark.parametrize("settings", [{}, {"offload": "cpu", "saves": ("attn_out",)}], ids=["weights", "saved tensors too"])
def test_no_races(settings):
    engine = traced(**settings)
    assert engine.checked > 100
    assert not engine.races


@pytest.mark.parametrize("wait", RACES)
def test_a_missing_wait_is_a_race(wait):
    assert any(RACES[wait] in race for race in traced(wait).races)
