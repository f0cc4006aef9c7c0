"""The default on a device whose steps are faster with the host: what was chosen stays and leaves,
after steps that pay for pinning, and memory runs out in each phase. [Note: host by seconds]

covers: offload/moving.py, offload/policy.py, layer/saved.py, attention/prefix.py, layer/oom.py,
    model/describe.py, planner/auto.py
"""

from __future__ import annotations

import dataclasses
import gc

import pytest

import streambp
from streambp.errors import StreamBPError
from streambp.layer import saved
from streambp.offload import manager_of, moving
from streambp.offload.engines import OUT
from streambp.offload.policy import SavesPolicy
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
LENGTH = 41
CHUNK = 20
LINK = 1e9  # bytes/s
STEP = 10.0  # seconds of a step without saves
WORTH = 5.0  # seconds that all saves would spare


def worth(costs):
    return sum(
        one.bytes * one.worth
        for index, cost in costs.items()
        for one in cost.candidates(index, LENGTH, LENGTH)
    )


class ByDefault(Steps):
    """A patched model on a device that has room for a step without saves, and hardly for more. By
    prediction, saves spare seconds, and the link takes part of a layer."""

    def __init__(self, device, part=0.5, room=0.4, price=0.0, **settings):
        self.batch = make_batch("plain", length=LENGTH, rows=1)
        model = build("qwen3", device="cpu", num_hidden_layers=3)
        config = streambp.StreamConfig(**{"chunk_size": CHUNK, **settings})
        self.model = streambp.patch(model, config).to(device)
        self.before_backward = None
        self.expected = [self()]
        self()
        self.predict(part, room, price)
        before = self.count()
        self()
        self.allocations = self.count() - before

    def predict(self, part, room, price):
        """Give the model's policy the numbers of this test."""
        policy = self.chooser
        policy.learn()
        figures = policy.known
        costs = {index: cost.cost for index, cost in figures.costs.items()}
        layer = max(
            cost.x + cost.attn_out + cost.kv + sum(one.bytes for one in cost.products.values())
            for cost in costs.values()
        )
        figures.products = worth(figures.costs) / WORTH
        figures.seconds = lambda tokens, chunk: STEP
        if figures.on_host is not None:
            found = figures.on_host()
            assert found is not None
            need = Room(figures.need, (room + 1.1 * part) * layer)  # copies under way take `part`
            forward = len(costs) * part * layer / LINK
            on_host = dataclasses.replace(
                found,
                need=need,
                seconds=lambda tokens, chunk: (forward, STEP - forward, STEP),
                products=figures.products,
                attention=1.0,
                link=LINK,
            )
            figures.on_host = lambda: on_host
        policy.free = lambda device: figures.need(LENGTH, CHUNK, 0.0)
        if policy.host is not None:
            policy.host.price = price
            policy.host.waited = moving.COUNTING

    @property
    def moved(self):
        return self.chooser.moving is not None


class Room:
    """The need of a step that leaves so many bytes more free than one on the device."""

    def __init__(self, need, less):
        self.need, self.less = need, less

    def __call__(self, tokens, chunk, present=0.0):
        return self.need(tokens, chunk, present) - self.less

    def at_work(self, chunk):
        return 0.0


@pytest.fixture(scope="module")
def made(device):
    return ByDefault(device)


def moved_as_chosen(steps):
    """A step moves what was chosen, and keeps what was chosen: its loss and gradients."""
    steps.started()
    manager = manager_of(steps.model)
    moved = manager.transfers.bytes[OUT]
    kept = []
    steps.before_backward = lambda: kept.append(manager.kept)
    found = steps()
    steps.before_backward = None
    assert steps.moved
    chosen = steps.chooser.latest
    assert chosen.on_device > 0
    assert chosen.leaving > chosen.inputs - chosen.on_device
    assert kept == [chosen.on_device]
    assert manager.transfers.bytes[OUT] - moved == chosen.leaving
    assert manager.host_bytes <= moving.RESERVED * chosen.leaving + 64
    assert manager.left == 0
    return found


def test_what_was_chosen_stays_and_leaves(made):
    found = moved_as_chosen(made)
    assert same(found, made.expected[0])
    record = streambp.last_step(made.model)
    assert record.host.out == made.chooser.latest.leaving
    assert "moved" in str(record)
    said = streambp.describe(made.model).offload
    assert "to the host, at most" in said
    assert "by prediction" in said
    unpatched = build("qwen3", device="cpu", num_hidden_layers=3).to(made.batch["labels"].device)
    loss = unpatched(**made.batch, use_cache=False).loss
    loss.backward()
    expected = {name: p.grad.cpu() for name, p in unpatched.named_parameters()}
    assert found.keys() == {"loss", *expected}
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize(
    "settings",
    [{"offload": "none"}, {"saves": ()}, {"saves": ("attn_out",)}, {"weights": "cpu"}],
    ids=str,
)
def test_settings_with_which_nothing_moves(settings, device):
    steps = ByDefault.__new__(ByDefault)
    steps.predict = lambda *_: None
    steps.__init__(device, **settings)
    policy = steps.model._streambp.saves_policy
    assert policy is None or (policy.host is None and policy.moving is None)
    assert streambp.last_step(steps.model).host is None
    with pytest.raises(StreamBPError, match="is offloaded"):
        manager_of(steps.model)


def test_offload_none_moves_nothing_where_it_would_be_faster(device):
    steps = ByDefault(device, offload="none")
    assert same(steps(), steps.expected[0])
    assert not steps.moved
    assert streambp.last_step(steps.model).host is None


def test_steps_pay_for_pinning_first(device):
    steps = ByDefault(device, price=1.0)
    host = steps.chooser.host
    assert not steps.moved
    assert 0 < host.gain < host.missing
    assert "have paid for pinning" in streambp.describe(steps.model).offload
    assert not manager_is_used(steps.model)
    leaving = host.missing + host.unspent
    host.price = 3.5 * host.gain / leaving
    host.unspent = 0.0
    moved = []
    for _ in range(4):
        assert same(steps(), steps.expected[0])
        moved.append(steps.moved)
    assert moved == [False, False, False, True]
    host.price = 1e9
    steps()
    assert steps.moved  # what is pinned is free


def manager_is_used(model):
    return model._streambp.offloader.is_used


def test_a_step_without_room_on_the_device_moves_at_once(device):
    steps = ByDefault(device, price=1e9)
    assert not steps.moved
    figures = steps.chooser.known
    steps.chooser.free = lambda device: figures.need(LENGTH, CHUNK, 0.0) - 1.0
    assert same(steps(), steps.expected[0])
    assert steps.moved
    assert "would not fit" in streambp.describe(steps.model).offload


def test_host_memory_that_cannot_be_pinned_is_not_used(device):
    steps = ByDefault(device)
    assert steps.moved
    (engine,) = manager_of(steps.model).transfers.engines.values()
    engine.pinned = False
    assert same(steps(), steps.expected[0])
    assert not steps.moved


@pytest.mark.parametrize(("name", "value"), [("drew", True), ("allowed", False)])
def test_draws_and_shared_sequences_keep_everything(name, value, device):
    steps = ByDefault(device)
    assert steps.moved
    setattr(steps.chooser.host, name, value)
    assert same(steps(), steps.expected[0])
    assert not steps.moved


@pytest.mark.parametrize(
    ("first", "stride"), thinned([(5, 37), (0, 13)], lambda first, stride: stride > 13)
)
def test_each_allocation_in_turn_fails(first, stride, made):
    """Saved tensors are freed and the chunk is computed again, or one error has advice; the next
    step is exact."""
    steps = made.started()

    def check(number):
        gc.collect()
        steps.forget()
        assert outcome(steps) == ENDED, number
        assert steps.allocated() == steps.start, number
        steps.forget()

    found = ends_of_failing_allocations(steps, first, stride, check)
    assert found[BEFORE] <= 2
    assert found[ENDED] >= 0.5 * found.total()


@pytest.mark.parametrize("on_host_full", ["keep", "recompute"])
def test_a_host_that_fills_up(on_host_full, device):
    """The system refuses what the budget allows."""
    steps = ByDefault(device, on_host_full=on_host_full)
    manager = manager_of(steps.model)
    manager.close()
    start = manager.start

    def refusing(device):
        arena, engine = start(device)
        arena.buffer = full
        return arena, engine

    def full(size):
        raise MemoryError

    manager.start = refusing
    assert same(steps(), steps.expected[0])
    assert manager.left > 0
    manager.close()
    manager.start = start
    assert same(steps(), steps.expected[0])
    assert manager.left > 0


def stays_on_paper(patch):
    patch.setattr(moving.HostChoice, "prepare", lambda self, step: None)


def keeps_what_stays(patch):
    patch.setattr(saved.SavedForBackward, "_give_up_on_device", lambda self, store, at_work: False)


def never(patch):
    patch.setattr(SavesPolicy, "_faster_on_host", lambda *_: None)


def without_a_price(patch):
    patch.setattr(moving.HostChoice, "began", lambda self, step: None)


@pytest.mark.parametrize("mutant", [stays_on_paper, never])
def test_mutant_of_the_choice_turns_a_test_red(mutant, device, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, StreamBPError)):
        moved_as_chosen(ByDefault(device))


def test_mutant_of_the_price_turns_a_test_red(device, monkeypatch):
    without_a_price(monkeypatch)
    with pytest.raises(AssertionError):
        test_steps_pay_for_pinning_first(device)
