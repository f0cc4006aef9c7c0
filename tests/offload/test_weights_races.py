"""The waits of weights on the host under the race checker: no races, and one for each wait that is
left out.

covers: offload/weights.py, offload/gradients.py
"""

from __future__ import annotations

import inspect
import sys

import pytest

from streambp.offload import gradients, manager_of, weights
from tests.families import build
from tests.offload.runs import forward
from tests.offload.trace_engine import TraceEngine
from tests.offload.weights_runs import adapted_model, patched, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")
WAIT_CASES = {
    line.rpartition("# ")[2]: (module.__file__, number)
    for module in (weights, gradients)
    for number, line in enumerate(inspect.getsource(module).splitlines(), 1)
    if ".wait(" in line
}
RACES = {
    "7": "back writes device", "8": "compute reads device", "9": "out reads device", "10": "host reads host",
    "11": "compute writes device",
}  # fmt: skip
GRADIENT_WAITS = ("9", "10", "11")  # those of gradients


def traced(left_out=None, trained=False, **settings):
    """The weights' engine after micro-batches that interleave; without one of the waits."""

    class Leaky(TraceEngine):
        def wait(self, queue, event):
            caller = sys._getframe(1)
            if (caller.f_code.co_filename, caller.f_lineno) != WAIT_CASES.get(left_out):
                super().wait(queue, event)

    model = (
        patched(build("qwen3", num_hidden_layers=4).train(), **settings)
        if trained
        else adapted_model(**settings)
    )
    engine = weights_of(model)._given_engine = Leaky(collect=left_out is not None)
    if "offload" in settings:
        manager_of(model)._given_engine = TraceEngine()
    for _ in range(2):
        losses = [forward(model, seed) for seed in range(2)]
        losses[1].backward()
        losses[0].backward()
        forward(model, 3).backward()
    return engine


def test_every_wait_has_a_number_and_a_race():
    assert WAIT_CASES.keys() == RACES.keys()


SETTINGS = ({}, {"offload": "cpu", "saves": ("attn_out",)}, {"trained": True})


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "settings", SETTINGS, ids=["weights", "saved tensors too", "gradients too"]
)
def test_no_races(settings):
    engine = traced(**settings)
    assert engine.checked > 100
    assert not engine.races


@pytest.mark.fast(5)
@pytest.mark.parametrize("wait", RACES)
def test_a_missing_wait_is_a_race(wait):
    assert any(RACES[wait] in race for race in traced(wait, wait in GRADIENT_WAITS).races)
