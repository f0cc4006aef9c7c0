"""The default on a device whose steps are faster with the host: what was chosen stays and leaves,
after steps that pay for pinning, and memory runs out in each phase. [Note: host by seconds]

covers: offload/host_choice.py, offload/policy.py, layer/saved_tensors.py, attention/prefix.py,
    layer/oom.py, model/describe.py, planner/auto.py
"""

from __future__ import annotations

import dataclasses
import gc

import pytest

import streambp
from streambp.errors import StreamBPError
from streambp.layer import saved_tensors
from streambp.offload import host_choice, manager_of
from streambp.offload.engines import TO_HOST_QUEUE
from streambp.offload.policy import SavesPolicy
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
LENGTH = 41
CHUNK = 20
LINK = 1e9  # bytes/s
STEP_SECONDS = 10.0  # seconds of a step without saves
SPARED_SECONDS = 5.0  # seconds that all saves would spare


def spared_flops(costs):
    return sum(
        candidate.bytes * candidate.flops_per_byte
        for index, cost in costs.items()
        for candidate in cost.candidates(index, LENGTH, LENGTH)
    )


class DefaultSteps(Steps):
    """A patched model on a device that has room for a step without saves, and hardly for more. By
    prediction, saves spare seconds, and the link takes part of a layer."""

    def __init__(self, device, part=0.5, headroom=0.4, price=0.0, **settings):
        self.batch = make_batch("plain", length=LENGTH, rows=1)
        model = build("qwen3", device="cpu", num_hidden_layers=3)
        config = streambp.StreamConfig(**{"chunk_size": CHUNK, **settings})
        self.model = streambp.patch(model, config).to(device)
        self.before_backward = None
        self.expected = [self()]
        self()
        self.predict(part, headroom, price)
        count_before = self.count()
        self()
        self.allocations = self.count() - count_before

    def predict(self, part, headroom, price):
        """Give the model's policy the numbers of this test."""
        policy = self.chooser
        policy.learn()
        figures = policy.figures
        costs = {index: cost.cost for index, cost in figures.costs.items()}
        layer = max(
            cost.x
            + cost.attn_out
            + cost.kv
            + sum(product.bytes for product in cost.products.values())
            for cost in costs.values()
        )
        figures.products = spared_flops(figures.costs) / SPARED_SECONDS
        figures.seconds = lambda tokens, chunk: STEP_SECONDS
        if figures.on_host is not None:
            host_figures = figures.on_host()
            assert host_figures is not None
            # copies under way take `part`
            need = StepRoom(figures.need, (headroom + 1.1 * part) * layer)
            forward = len(costs) * part * layer / LINK
            on_host = dataclasses.replace(
                host_figures,
                need=need,
                seconds=lambda tokens, chunk: (forward, STEP_SECONDS - forward, STEP_SECONDS),
                products=figures.products,
                attention=1.0,
                link=LINK,
            )
            figures.on_host = lambda: on_host
        policy.free = lambda device: figures.need(LENGTH, CHUNK, 0.0)
        if policy.host is not None:
            policy.host.price = price
            policy.host.waited = host_choice.COUNTING_SECONDS

    @property
    def is_moving(self):
        return self.chooser.moving is not None


class StepRoom:
    """The need of a step that leaves so many bytes more free than one on the device."""

    def __init__(self, need, spared_bytes):
        self.need, self.spared_bytes = need, spared_bytes

    def __call__(self, tokens, chunk, present=0.0):
        return self.need(tokens, chunk, present) - self.spared_bytes

    def chunk_bytes(self, chunk):
        return 0.0


@pytest.fixture(scope="module")
def shared_steps(device):
    return DefaultSteps(device)


def moved_as_chosen(steps):
    """A step moves what was chosen, and keeps what was chosen: its loss and gradients."""
    steps.started()
    manager = manager_of(steps.model)
    sent_bytes = manager.transfers.bytes[TO_HOST_QUEUE]
    resident_bytes = []
    steps.before_backward = lambda: resident_bytes.append(manager.resident_bytes)
    result = steps()
    steps.before_backward = None
    assert steps.is_moving
    choice = steps.chooser.latest
    assert choice.on_device > 0
    assert choice.leaving > choice.inputs - choice.on_device
    assert resident_bytes == [choice.on_device]
    assert manager.transfers.bytes[TO_HOST_QUEUE] - sent_bytes == choice.leaving
    assert manager.host_bytes <= host_choice.HOST_ALLOCATION_FACTOR * choice.leaving + 64
    assert manager.transfers.overflow_count == 0
    return result


def test_what_was_chosen_stays_and_leaves(shared_steps):
    result = moved_as_chosen(shared_steps)
    assert are_equal(result, shared_steps.expected[0])
    record = streambp.last_step(shared_steps.model)
    assert record.host.out == shared_steps.chooser.latest.leaving
    assert "moved" in str(record)
    description = streambp.describe(shared_steps.model).offload
    assert "to the host, at most" in description
    assert "by prediction" in description
    unpatched = build("qwen3", device="cpu", num_hidden_layers=3).to(
        shared_steps.batch["labels"].device
    )
    loss = unpatched(**shared_steps.batch, use_cache=False).loss
    loss.backward()
    expected = {name: p.grad.cpu() for name, p in unpatched.named_parameters()}
    assert result.keys() == {"loss", *expected}
    for name, gradient in expected.items():
        assert (result[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize(
    "settings",
    [{"offload": "none"}, {"saves": ()}, {"saves": ("attn_out",)}, {"weights": "cpu"}],
    ids=str,
)
def test_settings_with_which_nothing_moves(settings, device):
    steps = DefaultSteps.__new__(DefaultSteps)
    steps.predict = lambda *_: None
    steps.__init__(device, **settings)
    policy = steps.model._streambp.saves_policy
    assert policy is None or (policy.host is None and policy.moving is None)
    assert streambp.last_step(steps.model).host is None
    with pytest.raises(StreamBPError, match="is offloaded"):
        manager_of(steps.model)


def test_offload_none_moves_nothing_where_it_would_be_faster(device):
    steps = DefaultSteps(device, offload="none")
    assert are_equal(steps(), steps.expected[0])
    assert not steps.is_moving
    assert streambp.last_step(steps.model).host is None


def test_steps_pay_for_pinning_first(device):
    steps = DefaultSteps(device, price=1.0)
    host = steps.chooser.host
    assert not steps.is_moving
    assert 0 < host.gain < host.unpaid_seconds
    assert "have paid for pinning" in streambp.describe(steps.model).offload
    assert not manager_is_used(steps.model)
    leaving = host.unpaid_seconds + host.saved_up_seconds
    host.price = 3.5 * host.gain / leaving
    host.saved_up_seconds = 0.0
    decisions = []
    for _ in range(4):
        assert are_equal(steps(), steps.expected[0])
        decisions.append(steps.is_moving)
    assert decisions == [False, False, False, True]
    host.price = 1e9
    steps()
    assert steps.is_moving  # what is pinned is free


def manager_is_used(model):
    return model._streambp.offloader.is_used


def test_a_step_without_room_on_the_device_moves_at_once(device):
    steps = DefaultSteps(device, price=1e9)
    assert not steps.is_moving
    figures = steps.chooser.figures
    steps.chooser.free = lambda device: figures.need(LENGTH, CHUNK, 0.0) - 1.0
    assert are_equal(steps(), steps.expected[0])
    assert steps.is_moving
    assert "would not fit" in streambp.describe(steps.model).offload


def test_host_memory_that_cannot_be_pinned_is_not_used(device):
    steps = DefaultSteps(device)
    assert steps.is_moving
    (engine,) = manager_of(steps.model).transfers.engines.values()
    engine.pinned = False
    assert are_equal(steps(), steps.expected[0])
    assert not steps.is_moving


@pytest.mark.parametrize(("name", "value"), [("drew", True), ("allowed", False)])
def test_draws_and_shared_sequences_keep_everything(name, value, device):
    steps = DefaultSteps(device)
    assert steps.is_moving
    setattr(steps.chooser.host, name, value)
    assert are_equal(steps(), steps.expected[0])
    assert not steps.is_moving


@pytest.mark.parametrize(
    ("first", "stride"), thinned([(5, 37), (0, 13)], lambda first, stride: stride > 13)
)
def test_each_allocation_in_turn_fails(first, stride, shared_steps):
    """Saved tensors are freed and the chunk is computed again, or one error has advice; the next
    step is exact."""
    steps = shared_steps.started()

    def check(number):
        gc.collect()
        steps.forget()
        assert outcome(steps) == ENDED, number
        assert steps.allocated() == steps.start, number
        steps.forget()

    outcomes = ends_of_failing_allocations(steps, first, stride, check)
    assert outcomes[EARLY_ERROR_TEXT] <= 2
    assert outcomes[ENDED] >= 0.5 * outcomes.total()


@pytest.mark.parametrize("on_host_full", ["keep", "recompute"])
def test_a_host_that_fills_up(on_host_full, device):
    """The system refuses what the budget allows."""
    steps = DefaultSteps(device, on_host_full=on_host_full)
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
    assert are_equal(steps(), steps.expected[0])
    assert manager.transfers.overflow_count > 0
    manager.close()
    manager.start = start
    assert are_equal(steps(), steps.expected[0])
    assert manager.transfers.overflow_count > 0


def stays_on_paper(patch):
    patch.setattr(host_choice.HostChoice, "prepare", lambda self, step: None)


def keeps_what_stays(patch):
    patch.setattr(
        saved_tensors.SavedForBackward,
        "_drop_saves_on_device",
        lambda self, store, is_running: False,
    )


def never_moves(patch):
    patch.setattr(SavesPolicy, "_faster_on_host", lambda *_: None)


def without_a_price(patch):
    patch.setattr(host_choice.HostChoice, "begin_micro_batch", lambda self, step: None)


@pytest.mark.parametrize("mutant", [stays_on_paper, never_moves])
def test_mutant_of_the_choice_turns_a_test_red(mutant, device, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, StreamBPError)):
        moved_as_chosen(DefaultSteps(device))


def test_mutant_of_the_price_turns_a_test_red(device, monkeypatch):
    without_a_price(monkeypatch)
    with pytest.raises(AssertionError):
        test_steps_pay_for_pinning_first(device)
