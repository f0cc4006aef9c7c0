"""The manager's copies under the race checker: no races, and one for each wait that is left out.

covers: attention/kv.py, offload/engines.py, offload/manager.py, offload/transfers.py
"""

from __future__ import annotations

import functools

import pytest
import torch

from streambp.attention import kv as keys
from streambp.offload import engines, manager, manager_of
from tests.offload.runs import (
    BOTH_SAVES,
    SAVES,
    SCHEDULES,
    break_off,
    model_with,
    offloaded,
    prefix_bytes,
    run,
    sampled,
)
from tests.offload.trace_engine import TraceEngine


def traced(schedule, saves=("attn_out", "kv"), collect=False, gpu_memory=None):
    """Twice the schedule, with a step between that breaks off in backward, while tensors are on
    their way back."""
    model = offloaded(saves, gpu_memory=gpu_memory)
    engine = TraceEngine(collect)
    manager_of(model)._given_engine = engine
    run(model, schedule)
    break_off(model)
    return run(model, schedule), engine


FAST_CASES = (
    "interleaved",
    "evaluation in between",
)  # the others are parts of what happens in these


@pytest.mark.fast("evaluation in between-attn_out+kv")
@pytest.mark.parametrize(
    ("schedule", "saves"),
    sampled(
        lambda schedule, saves: saves == BOTH_SAVES and schedule in FAST_CASES, SCHEDULES, SAVES
    ),
)
def test_no_races(schedule, saves):
    gradients, engine = traced(SCHEDULES[schedule], saves)
    assert engine.checked > 100
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.fast("interleaved-none-True")
@pytest.mark.parametrize(
    ("schedule", "saves", "stay"),
    sampled(
        lambda schedule, saves, stay: (schedule, saves) == ("interleaved", ()),
        SCHEDULES,
        [(), BOTH_SAVES],
        [False, True],
    ),
)
def test_no_races_while_prefixes_stream(schedule, saves, stay, monkeypatch):
    """stay: some tiles do."""
    monkeypatch.setattr(keys, "WORKING_TILES", 1)
    gradients, engine = traced(
        SCHEDULES[schedule], saves, gpu_memory=int(0.9 * prefix_bytes()) if stay else 1
    )
    assert engine.checked > 1000
    expected = run(model_with(saves), SCHEDULES[schedule])
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


def without(waits):
    """The checker's `wait` with some of the manager's waits left out, told apart by their queue and
    their event's."""

    def wait(self, waiting, event, real=TraceEngine.wait):
        if event is not None and (waiting, event.get("from")) in waits:
            return
        real(self, waiting, {k: v for k, v in (event or {}).items() if k != "from"})

    return wait


def record(self, queue, real=TraceEngine.record):
    return {**real(self, queue), "from": queue}


@functools.cache
def races_without(waits, gpu_memory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraceEngine, "record", record)
        patch.setattr(TraceEngine, "wait", without(waits))
        return traced("F0 F1 B0 B1", collect=True, gpu_memory=gpu_memory)[1].races


WAIT_CASES = {  # the wait that is left out, and a race that must be found then
    "offload before compute": (
        [(engines.TO_HOST_QUEUE, engines.COMPUTE_QUEUE)],
        "out reads device",
    ),
    "reload into memory that compute still uses": (
        [(engines.FROM_HOST_QUEUE, engines.COMPUTE_QUEUE)],
        "back writes device",
    ),
    "compute before the reload": (
        [(engines.COMPUTE_QUEUE, engines.FROM_HOST_QUEUE)],
        "compute reads device",
    ),
    "source let go before its offload": (
        [(engines.COMPUTE_QUEUE, engines.TO_HOST_QUEUE)],
        "writes device",
    ),
    # Others cover these two as well: only what was let go is loaded, and compute waits for what
    # came back before a stack is used again. They fail without both.
    "host memory written before it was read": (
        [
            (engines.TO_HOST_QUEUE, engines.FROM_HOST_QUEUE),
            (engines.COMPUTE_QUEUE, engines.FROM_HOST_QUEUE),
        ],
        "out writes host",
    ),
    "reload before its offload": (
        [
            (engines.FROM_HOST_QUEUE, engines.TO_HOST_QUEUE),
            (engines.COMPUTE_QUEUE, engines.TO_HOST_QUEUE),
        ],
        "back reads host",
    ),
}


@pytest.mark.fast("reload before its offload-None")
@pytest.mark.parametrize(
    ("name", "gpu_memory"),
    sampled(lambda name, gpu_memory: gpu_memory is None, WAIT_CASES, [None, 1]),
)
def test_a_missing_wait_is_a_race(name, gpu_memory):
    waits, race = WAIT_CASES[name]
    assert not races_without((), gpu_memory)
    assert any(race in message for message in races_without(tuple(waits), gpu_memory))


@pytest.mark.full
def test_a_tile_must_not_be_changed_while_it_is_copied_out(monkeypatch):
    def borrow(self, name, chunk):
        tensor = self.peek(name, chunk)
        self._engine.access(engines.COMPUTE_QUEUE, tensor, write=True)
        return tensor

    monkeypatch.setattr(manager.HostTensors, "borrow", borrow)
    races = traced("F0 B0", collect=True, gpu_memory=1)[1].races
    assert any(
        "compute writes device" in race and "out may still be reading" in race for race in races
    )
