"""Models whose layers are on several devices, and how much of a device a process may have.

covers: device.py, layer/call.py, offload/engines.py, offload/manager.py, offload/transfers.py,
  offload/free_memory.py, planner/auto.py, planner/profile.py
"""

from __future__ import annotations

import itertools

import pytest
import torch

from streambp import device
from streambp.layer.call import LayerCall
from streambp.offload import engines, free_memory, manager_of, transfers
from streambp.offload.costs import StepFigures
from streambp.offload.engines import TO_HOST_QUEUE, DeviceMemory
from streambp.offload.free_memory import FreeMemory
from streambp.offload.link import LinkBudget
from streambp.offload.manager import OffloadManager
from streambp.offload.policy import SavesPolicy
from streambp.planner.auto import StepNeed
from streambp.planner.laws import Law
from streambp.planner.profile import Method, Phase
from tests.offload.runs import (
    BOTH_SAVES,
    SCHEDULES,
    assert_same,
    break_off,
    model_with,
    offloaded,
    run,
    step,
)
from tests.offload.test_auto import Injected
from tests.offload.test_races import record, without
from tests.offload.trace_engine import TraceEngine

GIB = 2**30


@pytest.fixture
def two_devices(monkeypatch):
    """Odd layers say that they are on the first device and even ones on the second, though their
    tensors are on the CPU."""

    def elsewhere(index):
        return torch.device("cuda", (index + 1) % 2)

    def limit_prefix(self, offloader, real=LayerCall.limit_prefix):
        real_device, self.device = self.device, elsewhere(self.layer_state.index)
        real(self, offloader)
        self.device = real_device

    def open_layer(self, index, device, real=OffloadManager.open):
        return real(self, index, elsewhere(index))

    def time_chunks(self, observed_costs, real=LinkBudget.time_chunks):
        observed_costs.device = elsewhere(next(layers))
        return real(self, observed_costs)

    layers = itertools.count()  # of the measured forward
    monkeypatch.setattr(LinkBudget, "time_chunks", time_chunks)
    monkeypatch.setattr(LayerCall, "limit_prefix", limit_prefix)
    monkeypatch.setattr(OffloadManager, "open", open_layer)


def traced(saves=BOTH_SAVES, collect=False, gpu_memory=None):
    model = offloaded(saves, gpu_memory=gpu_memory)
    manager_of(model)._given_engine = engine = TraceEngine(collect)
    return model, engine


@pytest.mark.full
@pytest.mark.parametrize("gpu_memory", [pytest.param(None, marks=pytest.mark.full), 1])
def test_each_device_has_an_engine(two_devices, gpu_memory):
    expected = run(model_with(BOTH_SAVES), SCHEDULES["1F1B"])
    model, engine = traced(gpu_memory=gpu_memory)
    run(model, SCHEDULES["1F1B"])
    break_off(model)
    manager_of(model).abort()
    gradients = run(model, SCHEDULES["1F1B"])
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())
    assert list(manager_of(model).transfers.engines) == [
        torch.device("cuda", 1),
        torch.device("cuda", 0),
    ]
    assert {queue.split()[0] for queue in engine._world.clocks} >= {"compute", "cuda:0"}
    assert engine.checked > 1000


@pytest.mark.full
@pytest.mark.parametrize(
    ("waits", "race"),
    [
        (
            [
                (engines.TO_HOST_QUEUE, engines.FROM_HOST_QUEUE),
                (engines.COMPUTE_QUEUE, engines.FROM_HOST_QUEUE),
            ],
            "out writes host while back may still be reading",
        ),
        (
            [(engines.TO_HOST_QUEUE, engines.TO_HOST_QUEUE)],
            "out writes host while out may still be writing",
        ),
    ],
    ids=["before it was read", "before it was written"],
)
def test_host_memory_of_one_device_is_not_written_by_another(two_devices, waits, race, monkeypatch):
    def races():
        model, engine = traced(collect=True, gpu_memory=1)
        run(model, "F0 B0 F1 B1")
        return engine.races

    monkeypatch.setattr(TraceEngine, "record", record)
    monkeypatch.setattr(TraceEngine, "wait", without([]))
    assert not races()
    monkeypatch.setattr(TraceEngine, "wait", without(waits))
    assert any(f"cuda:0 {race}" in message for message in races())


@pytest.mark.full
def test_auto_keeps_to_the_fullest_device(two_devices, monkeypatch):
    def measured(*memories):
        """Two devices with these (allocated, peak, limit)."""
        two_engines = [Injected(memory=DeviceMemory(*memory)) for memory in memories]
        two_engines[0].engine_for = lambda device: two_engines[1]
        model = model_with("auto", offload="auto")
        manager_of(model)._given_engine = two_engines[0]
        assert_same(step(model), step(model_with()))
        assert manager_of(model).prefix_memory == min((m[2] - m[0]) // 2 for m in memories)
        step(model)
        return manager_of(model).gpu_memory

    roomy, full = (0, 10 * GIB, 80 * GIB), (0, 70 * GIB, 80 * GIB)
    assert (
        measured(roomy, full)
        == measured(full, roomy)
        == measured(full, full)
        < measured(roomy, roomy)
    )


def test_stalls_and_copies_of_all_devices_are_added_up():
    class Fixed(Injected):
        def __init__(self, seconds):
            super().__init__()
            self.fixed = seconds

        def queue_seconds(self):
            return {
                name: number * self.fixed for number, name in enumerate(engines.TIMED_QUEUES, 1)
            }

    two_transfers = transfers.Transfers()
    two_transfers.engines[torch.device("cuda", 0)] = Fixed(1.0)
    two_transfers.engines[torch.device("cuda", 1)] = Fixed(3.0)
    assert two_transfers.queue_seconds() == {
        TO_HOST_QUEUE: 4.0,
        engines.FROM_HOST_QUEUE: 8.0,
        "stall_out": 12.0,
        "stall_back": 16.0,
    }


class FakeCard:
    """What torch.cuda says of a card: total bytes, those that others use, this process' own, and
    its fraction."""

    total, others_bytes, reserved, allocated, peak, fraction = 140 * GIB, 0, 0, 0, 0, 1.0


@pytest.fixture
def card(monkeypatch):
    fake = FakeCard()
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda d: (fake.total - fake.others_bytes - fake.reserved, fake.total),
    )
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda d: fake.fraction)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda d: counts_of(fake))
    return fake


def counts_of(card):
    """As torch's allocator gives them, in part."""
    pools = {
        "allocated_bytes": (card.allocated, card.peak),
        "reserved_bytes": (card.reserved, 2 * card.reserved),
    }
    return {
        name: {"all": {"current": size, "peak": peak}, "small_pool": {"current": 1}}
        for name, (size, peak) in pools.items()
    }


def test_counting_makes_no_list_of_all_counts(card, monkeypatch):
    """Each layer of each pass asks several times."""

    def refuse(*_):
        raise AssertionError("half a millisecond")

    for name in ("memory_stats", "memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    card.allocated, card.reserved = 16 * GIB, 17 * GIB
    gpu = torch.device("cuda", 0)
    assert free_memory.FreeMemory()(gpu) == pytest.approx((0.95 * 140 - 16) * GIB, abs=2)
    # as before CUDA is used
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda d: {})
    assert device.allocator_bytes(gpu, "allocated") == 0


@pytest.mark.parametrize(
    ("others_bytes", "reserved", "fraction", "expected"),
    [
        (0, 0, 1.0, 140),
        (0, 30, 1.0, 140),
        (0, 30, 79 / 140, 79),
        (100, 30, 1.0, 40),
        (100, 30, 79 / 140, 40),
    ],
)
def test_the_limit_is_the_processs_fraction_and_what_others_leave(
    card, others_bytes, reserved, fraction, expected
):
    card.others_bytes, card.reserved, card.fraction = others_bytes * GIB, reserved * GIB, fraction
    assert device.memory_limit(torch.device("cuda", 0)) == pytest.approx(expected * GIB, abs=1)


def test_both_budgets_keep_to_the_limit(card, monkeypatch):
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    card.fraction, card.allocated, card.reserved, card.peak = 79 / 140, 16 * GIB, 17 * GIB, 20 * GIB
    gpu = torch.device("cuda", 0)
    assert free_memory.free_memory(gpu) == pytest.approx((0.95 * 79 - 16) * GIB, abs=2)
    memory = engines.AcceleratorEngine(gpu).memory()
    assert (memory.allocated, memory.peak) == (16 * GIB, 20 * GIB)
    assert memory.limit == pytest.approx(79 * GIB, abs=1)
    card.others_bytes = 100 * GIB
    assert free_memory.free_memory(gpu) == pytest.approx((0.95 * 40 - 16) * GIB, abs=2)
    assert free_memory.free_memory(torch.device("cpu")) is None


def test_a_smaller_fraction_makes_smaller_chunks(card):
    """Something like the Qwen3-8B shape at 196,608 tokens; the limit is asked for again at each
    forward's first layer."""
    phase = Phase("backward 0", Law(17.2 * GIB, 0.22 * 2**20, 200 * 2**10))
    figures = StepFigures(
        StepNeed(Method("streambp", (), "none", False, True, (phase,), (), Law(), ())),
        {},
        lambda tokens, chunk: 1 / chunk,
    )
    rule = SavesPolicy(1, FreeMemory(), lambda device: (figures, 0.0), True, True).chunk
    card.allocated = card.reserved = int(15.3 * GIB)
    gpu = torch.device("cuda", 0)
    assert rule(0, 1, 196608, gpu) == 32768
    card.fraction = 79 / 140
    assert rule(1, 1, 196608, gpu) == 32768
    assert rule(0, 1, 196608, gpu) == 1024
    card.fraction, card.others_bytes = 1.0, 61 * GIB
    assert rule(0, 1, 196608, gpu) == 1024
