"""When a micro-batch moves saved tensors to the host: seconds, the price of pinned memory, and what
is predicted. [Note: host by seconds]

covers: offload/host_choice.py, offload/engines.py, offload/arena.py
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from streambp.offload import host_choice
from streambp.offload.costs import Cost, LayerCost, LinearOutput
from streambp.offload.engines import MIN_RATED_BYTES, TO_HOST_QUEUE, Engine
from streambp.offload.host_choice import HostChoice, MicroBatchShape, StepSpeeds, predicted_move
from streambp.offload.manager import OffloadManager
from streambp.offload.transfers import MICRO_BATCH

TOKENS = 64
SHAPE = MicroBatchShape(TOKENS, TOKENS, 16)
LINK = 100.0  # bytes/s
CPU = torch.device("cpu")


def costs(layers=4):
    products = {"up": LinearOutput(640, 64000.0), "down": LinearOutput(320, 64000.0)}
    cost = Cost(x=640, attn_out=640, kv=320, attention_flops=640000.0, products=products)
    return {index: LayerCost(CPU, cost, 0.0, TOKENS, TOKENS, 1) for index in range(layers)}


def predicted(free_bytes=0.0, host=math.inf, forward=100.0, shape=SHAPE):
    pace = StepSpeeds(forward, 2 * forward, 3 * forward, 1e5, 1e5, LINK)
    return predicted_move(costs(), shape, free_bytes, host, pace)


def test_more_room_is_never_slower_and_never_lies():
    slowest = predicted(host=2560).seconds
    for host in (2560, 4000, 8000, math.inf):
        for free_bytes in (0.0, 1300.0, 2600.0, 9000.0):
            step = predicted(free_bytes, host)
            assert step.fits
            assert step.leaving <= host
            assert step.placement.on_device <= step.headroom <= free_bytes
            assert step.copies + step.placement.on_device <= free_bytes * (1 + 1e-9)
            assert step.seconds <= slowest
    assert predicted(9000.0).seconds < slowest


def test_copies_have_room_on_the_device():
    """In one chunk the copies of two layers are under way; with little room fewer tensors leave."""
    shape = MicroBatchShape(TOKENS, TOKENS, TOKENS)
    plenty, little = predicted(9000.0, shape=shape), predicted(720.0, shape=shape)
    assert plenty.copies > 720.0
    assert little.fits
    assert 0 < little.copies <= 720.0
    assert little.placement.spared < plenty.placement.spared


def test_no_room_is_left_for_copies_that_the_host_has_no_room_for():
    """Inputs fill the host: the device's room is for tensors that stay, of any number of chunks."""
    inputs = 4 * 640
    shape = MicroBatchShape(TOKENS, TOKENS, TOKENS)
    for step in (predicted(4000.0, host=inputs), predicted(4000.0, host=inputs, shape=shape)):
        assert step.headroom == 0.9 * 4000.0
        assert step.copies == 0.0
        assert step.placement.on_device > 0.8 * 0.9 * 4000.0


def test_what_does_not_fit():
    assert not predicted(-1.0).fits
    assert not predicted(0.0, host=1000.0).fits  # inputs stay, and there is no room


def test_copies_that_take_longer_than_backward_are_waited_for():
    fast, slow = predicted(forward=100.0), predicted(forward=1.0)
    assert fast.seconds <= 300.0
    assert slow.seconds >= slow.leaving / LINK


def test_one_chunk_saves_no_keys():
    step = predicted(9000.0, shape=MicroBatchShape(TOKENS, TOKENS, TOKENS))
    names = {
        candidate.name for candidates in step.placement.saved.values() for candidate in candidates
    }
    assert "kv" not in names
    assert "kv" in {
        candidate.name
        for candidates in predicted(9000.0).placement.saved.values()
        for candidate in candidates
    }


def a_host(price):
    choice = HostChoice(OffloadManager(None, "keep", 4, on_demand=True), price)
    choice.manager.host_room = lambda: math.inf
    return choice


@pytest.mark.parametrize("gain", [0.7, 1.0, 3.0, 50.0])
def test_the_price_is_paid_once_and_at_most_as_much_is_lost(gain):
    step = predicted()
    price = 10.0
    host = a_host(price / step.leaving)
    lost = 0.0
    while True:
        host.reset()
        pays = host.is_worth_moving(step, step.seconds + gain)
        host.begin_micro_batch(step if pays else None)
        if pays:
            break
        assert host.unpaid_seconds == pytest.approx(price - lost - gain)
        lost += gain
    assert lost <= price
    assert lost + gain >= price - 1e-9


def test_a_small_gain_moves_nothing():
    step = predicted()
    host = a_host(0.0)
    host.reset()
    assert not host.is_worth_moving(step, step.seconds * (1 + host_choice.MIN_RELATIVE_GAIN / 2))
    assert host.gain == 0
    assert host.is_worth_moving(step, step.seconds * (1 + 3 * host_choice.MIN_RELATIVE_GAIN))
    assert host.is_worth_moving(step, math.inf)
    assert not host.is_worth_moving(dataclasses.replace(step, fits=False), math.inf)


def test_counting_begins_once_it_may_pay():
    host = a_host(1.0)
    decisions = []
    for _ in range(4):
        host.reset()
        decisions.append(host.is_worth_counting(host_choice.COUNTING_SECONDS / 3, 100.0))
        host.begin_micro_batch(None)
    assert decisions == [False, False, True, True]
    assert not host.is_worth_counting(0.01, 100.0)
    assert a_host(1.0).is_worth_counting(0.01, math.inf)


def test_pinned_memory_is_free():
    manager = OffloadManager(None, "keep", 4, on_demand=True)
    assert not manager.is_used
    assert manager.pinned == 0
    manager.reserve = 4096
    store = manager.open(0, CPU)
    assert manager.is_used
    assert manager.pinned == 0
    headroom = manager.host_room()
    store._holding.retire()
    assert manager.pinned == 4096
    assert manager.host_room() == headroom + 4096
    assert manager.arena.largest_idle("prefix") == 0
    assert manager.arena.largest_idle(MICRO_BATCH) == 4096


def test_a_rate_is_known_after_enough_bytes():
    engine = Engine(CPU)
    small = torch.zeros(1024, dtype=torch.uint8)
    engine.copy(TO_HOST_QUEUE, small.clone(), small)
    assert engine.rate(TO_HOST_QUEUE) is None
    engine._copied[TO_HOST_QUEUE] = MIN_RATED_BYTES
    engine._spent[TO_HOST_QUEUE] = 2.0
    assert engine.rate(TO_HOST_QUEUE) == MIN_RATED_BYTES / 2


def forgets_what_was_lost(patch):
    patch.setattr(HostChoice, "begin_micro_batch", lambda self, step: None)


def copies_without_the_host(patch):
    real = host_choice.room_beside_copies

    def without_host(headroom, *arguments):
        result = real(dataclasses.replace(headroom, host=math.inf), *arguments)
        return dataclasses.replace(result, host=headroom.host)

    patch.setattr(host_choice, "room_beside_copies", without_host)


def test_mutant_copies_without_the_host(monkeypatch):
    copies_without_the_host(monkeypatch)
    with pytest.raises(AssertionError):
        test_no_room_is_left_for_copies_that_the_host_has_no_room_for()


def pays_nothing(patch):
    real = HostChoice.__init__
    patch.setattr(HostChoice, "__init__", lambda self, manager, price: real(self, manager, 0.0))


@pytest.mark.parametrize("mutant", [forgets_what_was_lost, pays_nothing])
def test_mutant_turns_a_test_red(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_price_is_paid_once_and_at_most_as_much_is_lost(3.0)
