"""offload="auto" on a device that is really short of memory: what was chosen stays and leaves, each
allocation in turn fails, and the host has no room.

covers: offload/placement.py, offload/policy.py, offload/manager.py, layer/oom.py
"""

from __future__ import annotations

import dataclasses
import gc

import pytest

import streambp
from streambp.errors import HostMemoryError
from streambp.offload import manager_of
from streambp.offload.engines import TO_HOST_QUEUE
from tests.emulated.test_memory import (
    EARLY_ERROR_TEXT,
    ENDED,
    Steps,
    are_equal,
    ends_of_failing_allocations,
    outcome,
)
from tests.families import build, make_batch
from tests.tiers import thinned

pytestmark = pytest.mark.emulated
LENGTH = 40
CHUNK = 21
FEW_BYTES = 8192  # of host memory
LINK = 1e9  # bytes/s; times of an emulated device are no measure


class BothRooms(Steps):
    """A model that has measured a step, and whose link takes part of a layer."""

    def __init__(self, device, part=0.5, headroom=0.4, **settings):
        self.batch = make_batch("plain", length=LENGTH, rows=1)
        config = streambp.StreamConfig(chunk_size=CHUNK, offload="auto", **settings)
        model = build("qwen3", device="cpu", num_hidden_layers=3)
        self.model = streambp.patch(model, config).to(device)
        self.before_backward = None
        self.expected = [self()]
        link = self.chooser.link
        link.measure(list(self.chooser._seen.values()))
        self.chooser.learn()
        costs = [cost.cost for cost in self.chooser.figures.costs.values()]
        layer = sum(
            cost.x
            + cost.attn_out
            + cost.kv
            + sum(product.bytes for product in cost.products.values())
            for cost in costs
        )
        (length, measured), *_ = link.measured.items()
        link.measured[length] = dataclasses.replace(
            measured, seconds=part * layer / LINK, link=LINK, attention=1.0
        )
        manager = manager_of(self.model)
        # what the device has for saves beside a layer's keys and values
        manager.gpu_memory = int(manager.workspace + headroom * layer)
        count_before = self.count()
        self()
        self.allocations = self.count() - count_before

    @property
    def choice(self):
        return self.chooser.latest


@pytest.fixture(scope="module")
def shared_steps(device):
    return BothRooms(device)


def test_what_was_chosen_stays_and_leaves(shared_steps, device):
    steps = shared_steps.started()
    manager = manager_of(steps.model)
    sent_bytes = manager.transfers.bytes[TO_HOST_QUEUE]
    resident_bytes = []
    steps.before_backward = lambda: resident_bytes.append(manager.resident_bytes)
    result = steps()
    steps.before_backward = None
    choice = steps.choice
    assert choice.on_device > 0
    assert choice.leaving > 0
    assert resident_bytes == [choice.on_device]
    assert manager.transfers.bytes[TO_HOST_QUEUE] - sent_bytes == choice.leaving
    assert manager.workspace + choice.on_device <= manager.gpu_memory
    assert are_equal(result, steps.expected[0])
    # the same saves, all of them on the host: fewer bytes on the device, by what stays
    config = streambp.StreamConfig(chunk_size=CHUNK, offload="cpu", saves=tuple(choice.layers))
    model = build("qwen3", device="cpu", num_hidden_layers=3)
    host_steps = Steps.__new__(Steps)
    host_steps.model, host_steps.batch = streambp.patch(model, config).to(device), steps.batch
    host_steps.before_backward = None
    for _ in range(2):
        assert are_equal(host_steps(), result)
    host_steps.started()
    assert steps.peak - steps.start <= host_steps.peak - host_steps.start + choice.on_device


@pytest.mark.parametrize(
    ("first", "stride"), thinned([(5, 37), (0, 13)], lambda first, stride: stride > 13)
)
def test_each_allocation_in_turn_fails(first, stride, shared_steps):
    """A step that has no memory ends with one error that has advice, and the next one is exact."""
    steps = shared_steps.started()

    def check(number):
        gc.collect()
        assert outcome(steps) == ENDED, number
        assert steps.allocated() == steps.start, number

    outcomes = ends_of_failing_allocations(steps, first, stride, check)
    assert outcomes[EARLY_ERROR_TEXT] <= 2


@pytest.mark.parametrize("on_host_full", ["keep", "recompute", "raise"])
def test_a_host_without_room(on_host_full, device):
    steps = BothRooms(device, on_host_full=on_host_full)
    manager = manager_of(steps.model)
    manager.close()
    manager.host_memory = FEW_BYTES
    if on_host_full == "raise":
        with pytest.raises(HostMemoryError, match="on_host_full"):
            steps()
        gc.collect()
    else:
        assert are_equal(steps(), steps.expected[0])
        assert manager.transfers.overflow_count > 0
    assert manager.host_bytes <= FEW_BYTES
    manager.close()
    manager.host_memory = None
    assert are_equal(steps(), steps.expected[0])
    assert steps.choice.leaving > 0
