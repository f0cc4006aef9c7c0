"""What a short step asks of torch and of Python in each layer, beside the unpatched model: counts,
no times. `pytest -s` prints the table of docs/explanation/measurements.md.

covers: model/unpatched.py, layer/function.py, layer/saved_tensors.py
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import streambp
from streambp.layer.function import StreamedLayer
from streambp.model import unpatched
from tests import zoo
from tests.counting import Dispatches

MAX_MEMORY_SHARE = unpatched.MAX_SHARE_OF_FREE_MEMORY  # which conftest.py takes to 0
ROOT = Path(__file__).parents[2]
LENGTH = 127
FEW, MANY = 2, 4  # layers of two models, whose difference is layers' alone
STEP_FUNCTIONS = {
    "checkpointing": None,
    "streambp, as unpatched": {},
    "streambp, kept graph": {"unpatched_runs": False},
    "streambp, `saves=()`": {"saves": ()},
}
KEPT, PLAIN_RUN = "streambp, kept graph", "streambp, as unpatched"


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", MAX_MEMORY_SHARE)


def stepper(way, layers):
    """A step of a small Llama, and the model after three of them."""
    model = zoo.build("llama", torch.float32, num_hidden_layers=layers).train()
    if way == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif way != "unpatched":
        streambp.patch(model, streambp.StreamConfig(**STEP_FUNCTIONS[way]))
    ids = torch.randint(0, model.config.vocab_size, (1, LENGTH))  # [B, T]

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    return step, model


def calls_of(step):
    """Functions of Python and of C that a step calls."""
    calls = 0

    def called(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    profiler = sys.getprofile()
    sys.setprofile(called)
    try:
        step()
    finally:
        sys.setprofile(profiler)
    return calls


def of_a_layer(way):
    """(dispatches, calls) of a layer, forward and backward."""
    counts = []
    for layers in (FEW, MANY):
        step, model = stepper(way, layers)
        with Dispatches() as count:
            step()
        counts.append((sum(count.counts.values()), calls_of(step)))
        if way in (KEPT, PLAIN_RUN):
            text = str(streambp.last_step(model))
            assert ("kept its graph" if way == KEPT else "ran unpatched") in text
    return tuple((of_many - of_few) / (MANY - FEW) for of_few, of_many in zip(*counts, strict=True))


@functools.cache
def rows_of_a_process():
    """(dispatches, calls) of a layer for each way, in a process of its own: what other tests leave
    in a process changes the number of calls."""
    command = [sys.executable, "-m", "tests.model.test_short_steps"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.full
def test_a_layer_that_runs_unpatched_asks_torch_for_nothing_more():
    rows = rows_of_a_process()
    dispatches, calls = rows["unpatched"]
    assert rows[PLAIN_RUN][0] == dispatches
    assert rows[PLAIN_RUN][1] <= 1.4 * calls


def test_a_kept_graph_asks_torch_for_little_more():
    """Of Python it asks for more: `unpatched_runs=False` is for those who want to stream."""
    rows = rows_of_a_process()
    assert of_a_layer(KEPT)[0] <= 1.3 * rows["unpatched"][0]
    assert rows[KEPT][1] <= rows["checkpointing"][1]


def test_the_table():
    rows = rows_of_a_process()
    base = rows["unpatched"][0]
    print()
    for way, (dispatches, calls) in rows.items():
        print(f"| {way} | {dispatches:.0f} | {dispatches / base:.2f} | {calls:.0f} |")
    assert rows["checkpointing"][0] > 1.3 * base  # the count sees what is computed again


def test_mutant_that_recomputes_turns_a_test_red(monkeypatch):
    """A layer that keeps its graph and computes it again all the same."""
    real = StreamedLayer.backward

    def backward(ctx, *grads):
        ctx.call.saved.drop_saves(is_running=False)
        return real(ctx, *grads)

    monkeypatch.setattr(StreamedLayer, "backward", staticmethod(backward))
    with pytest.raises(AssertionError):
        test_a_kept_graph_asks_torch_for_little_more()


if __name__ == "__main__":
    print(json.dumps({way: of_a_layer(way) for way in ("unpatched", *STEP_FUNCTIONS)}))
