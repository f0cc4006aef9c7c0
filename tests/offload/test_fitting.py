"""saves="auto" without offloading: it fits, changes no value, and gives way where memory runs
short. [Note: saves that fit]

covers: layer/function.py, layer/oom.py, layer/saved_tensors.py, offload/costs.py,
    offload/policy.py, planner/auto.py
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import itertools
import math
import random
from pathlib import Path

import pytest
import torch

import streambp
from streambp.attention.prefix import Stage
from streambp.device import RandomState
from streambp.errors import BackwardError, DeviceMemoryError
from streambp.layer.call import LayerCall
from streambp.layer.saved_tensors import SavedForBackward
from streambp.offload import free_memory, policy
from streambp.offload.costs import Cost, LayerCost, LinearOutput, StepFigures
from streambp.offload.free_memory import host_limit
from streambp.offload.policy import SavesPolicy
from streambp.planner import auto
from streambp.planner.laws import Law
from streambp.planner.profile import Method, Phase
from tests import zoo
from tests.families import LENGTH, build, make_batch
from tests.offload.runs import assert_same, step
from tests.seeds import seed_of, seed_torch

TOKEN = 1000.0  # bytes that the law of these tests gives each of them
AMPLE_BYTES = 1e9
LAW = auto.StepNeed(
    Method("streambp", (), "none", False, True, (Phase("all", Law(0.0, TOKEN)),), (), Law(), ())
)
FREE_BYTES = (0.0, 3e4, 1e5, 2.5e5, AMPLE_BYTES)


class Device:
    """Memory as these tests say it is: `headroom` bytes beside a step without saves, less what is taken
    meanwhile."""

    def __init__(self, headroom=AMPLE_BYTES):
        self.headroom, self.tokens, self.taken_bytes = headroom, 2 * LENGTH, 0.0

    def free(self, device):
        return self.headroom + TOKEN * self.tokens - self.taken_bytes


@pytest.fixture
def patched(monkeypatch):
    """Makes a streamed model whose saves are chosen for the memory that a `Device` says."""

    def make(model=None, headroom=AMPLE_BYTES, chunk_size=5):
        monkeypatch.setattr(auto, "upper_bound_of_step", lambda *_: LAW)
        model = (
            build("qwen3", num_hidden_layers=3, attention_dropout=0.3)
            if model is None
            else copy.deepcopy(model)
        )
        model = streambp.patch(model, streambp.StreamConfig(chunk_size=chunk_size, saves="auto"))
        device = Device(headroom)
        chooser_of(model).free = device.free
        return model, device

    return make


def chooser_of(model):
    return next(
        w.layer_state.saves_policy for w in model._streambp.wrappers if hasattr(w, "layer_state")
    )


def plain(model=None, **settings):
    model = (
        build("qwen3", num_hidden_layers=3, attention_dropout=0.3)
        if model is None
        else copy.deepcopy(model)
    )
    return streambp.patch(model, streambp.StreamConfig(chunk_size=5, **{"saves": (), **settings}))


def seeded(model, seed=3, **batch):
    seed_torch(seed)
    return step(model, **batch)


@functools.cache
def without_saves():
    """Loss and gradients of the model that most tests here compare with; asked for before anything
    is replaced."""
    return seeded(plain())


@contextlib.contextmanager
def kept_by_layer():
    """Collects what each layer keeps, as its forward ends."""
    saves_by_layer = {}
    real = SavedForBackward.seal

    def seal(self, size):
        tensors = self.store.tensors
        optional = sum(
            t.nbytes
            for (name, _), t in tensors.items()
            if name != "x" and not name.startswith("state.")
        )
        kv = (
            sum(kv.k.nbytes + kv.v.nbytes for kv in self.carried.prefix.kv_storages)
            if "kv" in self.saves
            else 0
        )
        saves_by_layer[self.layer_state.index] = (self.saves, optional + kv)
        real(self, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedForBackward, "seal", seal)
        yield saves_by_layer


@contextlib.contextmanager
def after_the_first_layer(act):
    """Acts as the second layer of a forward asks what to save."""
    real = SavesPolicy.saves

    def saves(self, saved, *args):
        if saved.layer_state.index == 1:
            act()
        return real(self, saved, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavesPolicy, "saves", saves)
        yield


def planned(model):
    return sum(
        candidate.bytes
        for candidates in chooser_of(model)._forward.batch.plan.values()
        for candidate in candidates
    )


@pytest.mark.fast(2)
@pytest.mark.parametrize("headroom", FREE_BYTES)
def test_it_takes_what_it_planned_and_changes_no_value(patched, headroom):
    expected = without_saves()
    model, _ = patched(headroom=headroom)
    assert_same(seeded(model), expected)  # the first step saves nothing
    with kept_by_layer() as saves_by_layer:
        assert_same(seeded(model), expected)
    saved_bytes = sum(size for _, size in saves_by_layer.values())
    assert saved_bytes == pytest.approx(planned(model))
    assert saved_bytes <= headroom
    assert (saved_bytes > 0) == (headroom > 1e4)
    if headroom == AMPLE_BYTES:
        assert all(
            {"attn_out", "kv", "mlp.gate_proj"} <= set(saves)
            for saves, _ in saves_by_layer.values()
        )
        # nobody reads it
        assert not any("mlp.down_proj" in saves for saves, _ in saves_by_layer.values())
        assert_same(seeded(plain(saves=saves_by_layer[0][0])), expected)
    if headroom == 1e5:
        same_by_hand(saves_by_layer, expected)


def same_by_hand(automatic, expected):
    """The same saves for the last layers by name: the same bytes and gradients."""
    counts = collections.Counter(name for saves, _ in automatic.values() for name in saves)
    model = plain(saves=tuple(f"{name}@{count}" for name, count in counts.items()))
    assert len(set(counts.values())) > 1
    with kept_by_layer() as manual:
        assert_same(seeded(model), expected)
    assert {index: (set(saves), size) for index, (saves, size) in manual.items()} == {
        index: (set(saves), size) for index, (saves, size) in automatic.items()
    }


def test_a_call_in_one_chunk_keeps_no_keys(patched):
    """Its backward computes none ahead, so that they would spare nothing; Linears get their
    room."""
    model = build("qwen3", num_hidden_layers=3, attention_dropout=0.3)
    expected = seeded(
        streambp.patch(copy.deepcopy(model), streambp.StreamConfig(chunk_size=LENGTH, saves=()))
    )
    model, _ = patched(model, headroom=6e4, chunk_size=LENGTH)
    seeded(model)
    with kept_by_layer() as saves_by_layer:
        assert_same(seeded(model), expected)
    names = {name for saves, _ in saves_by_layer.values() for name in saves}
    assert "mlp.gate_proj" in names
    assert "kv" not in names
    assert 0 < sum(size for _, size in saves_by_layer.values()) == pytest.approx(planned(model))


@pytest.mark.fast(2)
@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "gemma3_text", "qwen3_moe"])
def test_other_layers(patched, family):
    stock = zoo.build(family, dtype=torch.float32)
    expected = seeded(plain(stock))
    model, device = patched(stock)
    for headroom in (AMPLE_BYTES, 1e5, 2e4):
        device.headroom = headroom
        assert_same(seeded(model), expected)
    with kept_by_layer() as saves_by_layer:
        assert_same(seeded(model), expected)
    assert 0 < sum(size for _, size in saves_by_layer.values()) <= 2e4


def spared(candidates):
    return sum(candidate.bytes * candidate.flops_per_byte for candidate in candidates)


def chosen_of_three(length, share):
    """What three layers of an 8B model's shape save with a share of the room for everything, and
    all they could."""
    shapes = {"q_proj": (4096, 4096), "gate_proj": (12288, 4096)}
    products = {
        name: LinearOutput(length * o * 2, 2.0 * length * o * i) for name, (o, i) in shapes.items()
    }
    cost = Cost(
        length * 8192, length * 8320, length * 4096, 4.0 * 4096 * length / 2 * length, products
    )
    layer_cost = LayerCost(torch.device("cpu"), cost, 0.0, length, length, 1)
    chooser = SavesPolicy(3, lambda device: None, lambda device: (StepFigures(), 0.0), False, True)
    chooser.figures = StepFigures(LAW, dict.fromkeys(range(3), layer_cost))
    all_there_is = [
        candidate
        for index in range(3)
        for candidate in layer_cost.candidates(index, length, length)
    ]
    headroom = share * sum(candidate.bytes for candidate in all_there_is)
    headrooms = {layer_cost.device: [[math.inf, headroom]]}
    plan = chooser._fill(headrooms, range(3), length, length, False)
    return (
        [candidate for candidates in plan.values() for candidate in candidates],
        all_there_is,
        headroom,
    )


@pytest.mark.parametrize("length", [4096, 65536])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_no_other_choice_spares_much_more(length, share):
    """Of all that fit the best is better by less than one tensor is worth."""
    choice, all_there_is, headroom = chosen_of_three(length, share)
    affordable = [
        some
        for count in range(len(all_there_is) + 1)
        for some in itertools.combinations(all_there_is, count)
        if sum(candidate.bytes for candidate in some) <= headroom
    ]
    assert sum(candidate.bytes for candidate in choice) <= headroom
    assert spared(choice) > max(map(spared, affordable)) - max(
        spared([candidate]) for candidate in all_there_is
    )


def test_another_order_is_seen(monkeypatch):
    monkeypatch.setattr(
        policy, "sorted", lambda candidates, **_: list(candidates)[::-1], raising=False
    )
    with pytest.raises(AssertionError):
        test_no_other_choice_spares_much_more(65536, 0.3)


def test_last_layers_come_first(patched):
    model, _ = patched(headroom=6e4)
    seeded(model)
    with kept_by_layer() as saves_by_layer:
        seeded(model)
    sizes = [saves_by_layer[index][1] for index in range(3)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_what_others_take_between_layers_is_given_up(patched):
    expected = without_saves()
    model, device = patched(headroom=2e5)
    seeded(model)
    with kept_by_layer() as saves_before:
        seeded(model)
    # with what the layer has saved, and its input
    taken_bytes = 1.5e5 + saves_before[0][1] + 4 * 2 * LENGTH * model.config.hidden_size
    with (
        kept_by_layer() as saves_after,
        after_the_first_layer(lambda: setattr(device, "taken_bytes", taken_bytes)),
    ):
        assert_same(seeded(model), expected)
    assert saves_after[0] == saves_before[0]
    assert sum(size for _, size in saves_after.values()) <= 2e5 - 1.5e5 + saves_before[0][1]
    assert sum(size for _, size in saves_after.values()) < sum(
        size for _, size in saves_before.values()
    )


def test_memory_that_shrinks_between_steps(patched):
    expected = without_saves()
    model, device = patched()
    seeded(model)
    for headroom in (AMPLE_BYTES, 2e5, 1e5, -1e6, 1e5):
        device.headroom = headroom
        with kept_by_layer() as saves_by_layer:
            assert_same(seeded(model), expected)
        assert sum(size for _, size in saves_by_layer.values()) <= max(0.0, headroom)


def fails_once(monkeypatch, at, stage=Stage.FORWARD):
    """The `at`-th computation of a chunk runs out of memory when it is done."""
    real, calls = LayerCall.compute, []

    def compute(self, hidden_chunk, chunk, current_stage, *args, **kwargs):
        result = real(self, hidden_chunk, chunk, current_stage, *args, **kwargs)
        if current_stage is stage and kwargs.get("prefix") is None and not args:
            calls.append(chunk.index)
            if len(calls) == at:
                raise torch.OutOfMemoryError("no memory left, says a test")
        return result

    monkeypatch.setattr(LayerCall, "compute", compute)
    return calls


@pytest.mark.fast("4")
@pytest.mark.parametrize("at", [1, 4, 7, 15])  # of three layers with five chunks each
def test_a_forward_chunk_that_runs_out_is_computed_again(patched, monkeypatch, at):
    expected = without_saves()
    model, _ = patched()
    seeded(model)
    with monkeypatch.context() as patch:
        calls = fails_once(patch, at)
        assert_same(seeded(model), expected)
    assert len(calls) == 16
    with kept_by_layer() as saves_by_layer:
        assert_same(seeded(model), expected)
    assert sum(size for _, size in saves_by_layer.values()) > 0  # half of before


def test_without_saves_it_raises(patched, monkeypatch):
    expected = without_saves()
    model, _ = patched(headroom=0.0)
    seeded(model)
    with monkeypatch.context() as patch:
        fails_once(patch, 4)
        with pytest.raises(DeviceMemoryError, match="ran out of memory"):
            seeded(model)
    assert_same(seeded(model), expected)


def test_around_the_layers_it_raises_with_advice_too(patched, monkeypatch):
    """Where transformers shifts the labels, outside of its backbone."""
    expected = without_saves()
    model, _ = patched(headroom=0.0)
    seeded(model)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("a test wants it")

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "pad", full)
        with pytest.raises(
            DeviceMemoryError, match=r"in the model around its layers\. Set offload"
        ):
            seeded(model)
    assert_same(seeded(model), expected)


@pytest.mark.fast("2-Stage.REFILL", "2-Stage.RECOMPUTE")
@pytest.mark.parametrize("stage", [Stage.REFILL, Stage.RECOMPUTE])
@pytest.mark.parametrize("at", [2, 9])
def test_a_backward_chunk_that_runs_out_is_computed_again(patched, monkeypatch, stage, at):
    expected = without_saves()
    model, _ = patched()
    if stage is Stage.REFILL:  # where keys are kept there is none
        real = LayerCost.candidates
        attention_only = lambda *args: (  # noqa: E731
            candidate for candidate in real(*args) if candidate.name == "attn_out"
        )
        monkeypatch.setattr(LayerCost, "candidates", attention_only)
    seeded(model)
    with kept_by_layer() as saves_before:
        seeded(model)
    with monkeypatch.context() as patch:
        calls = fails_once(patch, at, stage)
        assert_same(seeded(model), expected)
    assert len(calls) > at
    with kept_by_layer() as saves_after:
        assert_same(seeded(model), expected)
    sizes = [
        sum(size for _, size in saves_by_layer.values())
        for saves_by_layer in (saves_before, saves_after)
    ]
    assert 0 < sizes[1] <= sizes[0] / 2


@pytest.mark.full
def test_many_lengths_leave_nothing_behind(patched):
    model, device = patched(headroom=1e5)
    reference, lengths = plain(), random.Random(seed_of(5))
    for _ in range(12):
        length = lengths.randint(2, 40)
        device.tokens = 2 * length
        batch = make_batch("plain", length=length)
        assert_same(seeded(model, **batch), seeded(reference, **batch))
        assert planned(model) <= 1e5
    gc.collect()
    assert not chooser_of(model)._waiting
    assert len(chooser_of(model).figures.costs) == 3
    assert not chooser_of(model)._seen


@pytest.mark.full
def test_micro_batches_in_any_order(patched):
    losses = []
    for model in (plain(), patched(headroom=1e5)[0]):
        seeded(model)
        model.zero_grad(set_to_none=True)
        seed_torch()
        first, second = (
            model(**make_batch("plain", seed=seed), use_cache=False).loss for seed in (1, 2)
        )
        first.backward()
        second.backward()
        losses.append(
            (second.detach(), {name: p.grad.clone() for name, p in model.named_parameters()})
        )
    assert_same(losses[1], losses[0])


def test_what_other_processes_take_of_a_machine(monkeypatch):
    """Of its free memory a step takes a half at most, and what is free is looked up again within a
    step."""
    machine = [2 * AMPLE_BYTES]
    monkeypatch.setattr(free_memory, "host_limit", lambda requested_bytes: machine[0])
    monkeypatch.setattr(free_memory, "HOST_MEMORY_CACHE_SECONDS", -1.0)
    expected = without_saves()
    model = build("qwen3", num_hidden_layers=3, attention_dropout=0.3)
    chooser = chooser_of(streambp.patch(model, streambp.StreamConfig(chunk_size=5)))
    for _ in range(2):
        assert_same(seeded(model), expected)
    needed_bytes = chooser.figures.need(2 * LENGTH, 10)
    assert chooser.latest.headroom == AMPLE_BYTES - needed_bytes
    assert sum(chooser.latest.layers.values()) > 3
    with after_the_first_layer(lambda: machine.__setitem__(0, 0.0)):
        assert_same(seeded(model), expected)
    assert chooser.latest.drop_reason
    machine[0] = 2 * needed_bytes + 4e4
    assert_same(seeded(model), expected)
    assert 0 < sum(chooser.latest.bytes.values()) <= 2e4


def test_a_machine_that_does_not_tell_its_free_memory(monkeypatch):
    monkeypatch.setattr(
        free_memory,
        "host_limit",
        lambda requested_bytes: host_limit(None, Path("missing"), Path("missing")),
    )
    model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=5))
    for _ in range(2):
        step(model)
    assert chooser_of(model).latest is None


def test_free_memory_is_not_looked_up_for_each_chunk(monkeypatch):
    looked = []
    monkeypatch.setattr(
        free_memory,
        "host_limit",
        lambda requested_bytes: looked.append(requested_bytes) or AMPLE_BYTES,
    )
    monkeypatch.setattr(free_memory, "HOST_MEMORY_CACHE_SECONDS", 1e9)
    free = free_memory.FreeMemory()
    assert [free(torch.device("cpu")) for _ in range(50)] == [AMPLE_BYTES / 2] * 50
    assert len(looked) == 1


def test_describe_tells(patched):
    model, _ = patched(headroom=1e5)
    assert streambp.describe(model).saves == ("not tried yet (auto)",)
    seeded(model)
    seeded(model)
    *lines, headroom = streambp.describe(model).saves
    assert lines[0] == "kv of 3 layers (17.2 KiB)"
    assert headroom.startswith("auto: a step without saves leaves 97.7 KiB free; at least ")


def test_a_model_that_cannot_be_counted_saves_nothing(monkeypatch):
    unknown = StepFigures(why="a step could not be counted: it reads values")
    monkeypatch.setattr(auto.ModelStates, "_count", lambda self, device: unknown)
    model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=5, saves="auto"))
    expected = seeded(streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=5)))
    for _ in range(2):
        assert_same(seeded(model), expected)
    assert streambp.describe(model).saves == (
        "nothing (auto: a step could not be counted: it reads values)",
    )


def test_copies_have_seen_nothing(patched):
    model, _ = patched()
    seeded(model)
    assert chooser_of(copy.deepcopy(model)).figures.costs == {}


def test_the_first_step_saves_what_was_counted(monkeypatch):
    """On tensors without data, layer by layer: the same bytes as are seen in the step itself."""
    monkeypatch.setattr(auto, "_law", lambda *_: LAW)
    monkeypatch.setattr(free_memory, "free_memory", lambda device: AMPLE_BYTES)
    model = build("qwen3", num_hidden_layers=4, attention_dropout=0.3)
    expected = seeded(plain(model))
    model = streambp.patch(model, streambp.StreamConfig(chunk_size=5, saves="auto"))
    chooser = chooser_of(model)
    chooser.free = Device(1.5e5).free
    chooser.begin_forward(torch.device("cpu"))
    counted = {
        index: set(cost.candidates(index, 2 * LENGTH, LENGTH))
        for index, cost in chooser.figures.costs.items()
    }
    with kept_by_layer() as saves_by_layer:
        assert_same(seeded(model), expected)
    saved_bytes = sum(size for _, size in saves_by_layer.values())
    assert 0 < saved_bytes == pytest.approx(planned(model))
    assert saved_bytes <= 1.5e5
    measured = {
        index: set(cost.candidates(index, 2 * LENGTH, LENGTH))
        for index, cost in chooser.learn().items()
    }
    sizes = [
        {(c.index, c.name, c.bytes) for candidates in by_layer.values() for c in candidates}
        for by_layer in (counted, measured)
    ]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 4 * 8


@pytest.mark.full
def test_the_law_is_counted(monkeypatch):
    """The one that `patch` uses: what a step of 96 more tokens takes is no less than its saved
    inputs."""
    model = build("qwen3", num_hidden_layers=2, dtype=torch.bfloat16)
    law = auto._law(model, streambp.StreamConfig(saves="auto"), None)
    assert isinstance(law, auto.StepNeed), law
    inputs = 2 * model.config.hidden_size * 2 * 2**16  # two layers, two bytes
    assert law(2 * 2**16, 2048) - law(2**16, 2048) >= inputs


def other_numbers(patch):
    """A chunk that is computed again draws numbers of its own."""
    real, calls = RandomState.restore, []
    patch.setattr(RandomState, "restore", lambda self: real(self) if calls else calls.append(self))


def nothing_let_go(patch):
    patch.setattr(SavesPolicy, "drop_saves", lambda self, saved: False)


def inputs_let_go(patch):
    real = SavedForBackward.drop_saves
    patch.setattr(
        SavedForBackward,
        "drop_saves",
        lambda self, is_running: (real(self, is_running), self.store.tensors.clear()),
    )


@pytest.mark.fast("other_numbers")
@pytest.mark.parametrize("mutant", [other_numbers, nothing_let_go, inputs_let_go])
def test_mutant_turns_a_test_red(patched, monkeypatch, mutant):
    expected = without_saves()
    model, _ = patched()
    seeded(model)
    fails_once(monkeypatch, 7)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, DeviceMemoryError, BackwardError)):
        assert_same(seeded(model), expected)


@pytest.mark.full
def test_a_choice_that_ignores_the_room_is_seen(patched, monkeypatch):
    real = SavesPolicy._fill
    monkeypatch.setattr(
        SavesPolicy,
        "_fill",
        lambda self, headrooms, *args: real(
            self, {device: [[math.inf, AMPLE_BYTES]] for device in headrooms}, *args
        ),
    )
    with pytest.raises(AssertionError):
        test_it_takes_what_it_planned_and_changes_no_value(patched, 1e5)
