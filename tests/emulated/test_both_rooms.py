"""offload="auto" on a device that is really short of memory: what was chosen stays and leaves, each
allocation in turn fails, and the host has no room.

covers: offload/places.py, offload/policy.py, offload/manager.py, layer/oom.py
"""

from __future__ import annotations

import dataclasses
import gc

import pytest

import streambp
from streambp.errors import HostMemoryError
from streambp.offload import manager_of
from streambp.offload.engines import OUT
from tests.emulated.test_memory import (
    BEFORE,
    ENDED,
    Steps,
    ends_of_failing_allocations,
    outcome,
    same,
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

    def __init__(self, device, part=0.5, room=0.4, **settings):
        self.batch = make_batch("plain", length=LENGTH, rows=1)
        config = streambp.StreamConfig(chunk_size=CHUNK, offload="auto", **settings)
        model = build("qwen3", device="cpu", num_hidden_layers=3)
        self.model = streambp.patch(model, config).to(device)
        self.before_backward = None
        self.expected = [self()]
        link = self.chooser.link
        link.measure(list(self.chooser._seen.values()))
        self.chooser.learn()
        costs = [cost.cost for cost in self.chooser.known.costs.values()]
        layer = sum(
            cost.x + cost.attn_out + cost.kv + sum(one.bytes for one in cost.products.values())
            for cost in costs
        )
        (length, measured), *_ = link.measured.items()
        link.measured[length] = dataclasses.replace(
            measured, seconds=part * layer / LINK, link=LINK, attention=1.0
        )
        manager = manager_of(self.model)
        # what the device has for saves beside a layer's keys and values
        manager.gpu_memory = int(manager.workspace + room * layer)
        before = self.count()
        self()
        self.allocations = self.count() - before

    @property
    def chosen(self):
        return self.chooser.latest


@pytest.fixture(scope="module")
def made(device):
    return BothRooms(device)


def test_what_was_chosen_stays_and_leaves(made, device):
    steps = made.started()
    manager = manager_of(steps.model)
    moved = manager.transfers.bytes[OUT]
    kept = []
    steps.before_backward = lambda: kept.append(manager.kept)
    found = steps()
    steps.before_backward = None
    chosen = steps.chosen
    assert chosen.on_device > 0
    assert chosen.leaving > 0
    assert kept == [chosen.on_device]
    assert manager.transfers.bytes[OUT] - moved == chosen.leaving
    assert manager.workspace + chosen.on_device <= manager.gpu_memory
    assert same(found, steps.expected[0])
    # the same saves, all of them on the host: fewer bytes on the device, by what stays
    config = streambp.StreamConfig(chunk_size=CHUNK, offload="cpu", saves=tuple(chosen.layers))
    model = build("qwen3", device="cpu", num_hidden_layers=3)
    other = Steps.__new__(Steps)
    other.model, other.batch = streambp.patch(model, config).to(device), steps.batch
    other.before_backward = None
    for _ in range(2):
        assert same(other(), found)
    other.started()
    assert steps.peak - steps.start <= other.peak - other.start + chosen.on_device


@pytest.mark.parametrize(
    ("first", "stride"), thinned([(5, 37), (0, 13)], lambda first, stride: stride > 13)
)
def test_each_allocation_in_turn_fails(first, stride, made):
    """A step that has no memory ends with one error that has advice, and the next one is exact."""
    steps = made.started()

    def check(number):
        gc.collect()
        assert outcome(steps) == ENDED, number
        assert steps.allocated() == steps.start, number

    found = ends_of_failing_allocations(steps, first, stride, check)
    assert found[BEFORE] <= 2


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
        assert same(steps(), steps.expected[0])
        assert manager.left > 0
    assert manager.host_bytes <= FEW_BYTES
    manager.close()
    manager.host_memory = None
    assert same(steps(), steps.expected[0])
    assert steps.chosen.leaving > 0
