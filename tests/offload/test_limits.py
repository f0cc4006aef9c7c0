"""saves="auto" on a device whose memory is a number that shrinks at any operation: it runs wherever
saves=() does.

covers: attention/kv.py, head/one_pass.py, head/recipe.py, layer/gradients.py, layer/oom.py,
    layer/recompute.py, offload/costs.py, offload/policy.py
"""

from __future__ import annotations

import gc
import itertools
import math
import random

import pytest
import torch

import streambp
from streambp.accumulate import GradientSum
from streambp.attention.kv import KVBuffer
from streambp.errors import BackwardError
from streambp.offload import costs
from streambp.offload.policy import SavesPolicy
from streambp.planner.count import LiveBytes
from tests import zoo
from tests.families import LENGTH, build, make_batch
from tests.offload.runs import assert_same, broken_activation
from tests.oracle import gradients, worst_error
from tests.seeds import seed_of, seed_torch
from tests.tiers import thinned
from tests.versions import needs_states

ALLOCATOR_REST_BYTES = 512  # bytes that an allocator has left over in what it holds
AMPLE_BYTES = 10**9
# bytes: the witness of two tiny layers notes more where something is saved. [Note: witness]
MAX_WITNESS_BYTES = 10_000


class Device(LiveBytes):
    """Memory of so many bytes, within: an operation that makes more alive raises
    torch.OutOfMemoryError.

    shrinks_at: the operation from which on the limit is `later_limit`. fails_at: the first operation
    from that number on that makes anything alive raises, once. error: raised instead. places: the
    operations that make anything alive, and those after which the free memory is read.
    """

    def __init__(
        self,
        limit=AMPLE_BYTES,
        shrinks_at=None,
        later_limit=AMPLE_BYTES,
        fails_at=math.inf,
        error=None,
    ):
        super().__init__()
        self.error = (
            torch.OutOfMemoryError("no memory left, says a test") if error is None else error
        )
        self.limit, self.shrinks_at, self.later_limit, self.fails_at = (
            limit,
            shrinks_at,
            later_limit,
            fails_at,
        )
        self.operations, self.failed = 0, False
        self.places: set[int] = set()

    def free(self):
        self.places.add(self.operations)
        return self.limit - self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        if self.operations == self.shrinks_at:
            self.limit = self.later_limit
        live_before = self.live
        result = super().__torch_dispatch__(func, types, args, kwargs)
        fails = self.operations >= self.fails_at and not self.failed
        if self.live > live_before + ALLOCATOR_REST_BYTES:
            self.places.add(self.operations)
            if fails or self.live > self.limit:
                self.failed = True
                # one that is kept would keep the frames it came through
                raise type(self.error)(*self.error.args)
        return result


class MemoryNeed(costs.MemoryNeed):
    """What a step without saves was seen to take; how much of it a chunk takes is not known."""

    def __init__(self):
        self.bytes = 0.0

    def bytes_by_layer(self, tokens, chunk, present):
        return ((math.inf, self.bytes),)

    def chunk_bytes(self, chunk):
        return 0.0


class FixedNeed:
    """What a policy knows of a model's steps is what they need; what layers may save they show."""

    def __init__(self, need):
        self.figures = costs.StepFigures(need)

    def __call__(self, device):
        return self.figures, 0.0


class Pair:
    """A model with saves="auto" on a device of the test's, and the same with saves=()."""

    def __init__(self, chunk_size, saves="auto", models=None, **settings):
        settings = {"num_hidden_layers": 2, "attention_dropout": 0.3, **settings}
        models = models or (build("qwen3", **settings) for _ in range(2))
        configs = (
            streambp.StreamConfig(chunk_size=chunk_size, saves=saves) for saves in (saves, ())
        )
        self.model, self.plain = map(streambp.patch, models, configs)
        self.chooser = next(
            w.layer_state.saves_policy
            for w in self.model._streambp.wrappers
            if hasattr(w, "layer_state")
        )
        self.need = MemoryNeed()
        self.chooser.states = FixedNeed(self.need)
        self.device = None
        self.chooser.free = lambda device: self.device.free()

    def reference(self, **batch):
        """Loss and gradients without saves, and what they take."""
        device = Device()
        result = stepped(self.plain, device, **batch)
        self.need.bytes = device.peak
        return result, device

    def step(self, device, **batch):
        self.device = device
        return stepped(self.model, device, **batch)

    def forget(self):
        """What running out of memory has taught."""
        self.chooser.margins.clear()
        self.chooser._forward.batch.devices.clear()
        runs = self.model._streambp.unpatched
        if runs is not None:
            runs.max_tokens = math.inf

    def warmed(self, **batch):
        for _ in range(2):
            self.reference(**batch)
            self.step(Device(), **batch)
        return self


def stepped(model, device, **batch):
    model.zero_grad(set_to_none=True)
    batch = batch or make_batch("plain")
    seed_torch(3)
    with device:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    return loss.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def through(pair, make, count):
    """Steps of `make(at)`, at `count` places of the step's operations; the places where one
    raised."""
    expected, _ = pair.reference()
    pair.step(full_device := Device())
    raised = []
    for number in range(count):
        at = 1 + (2 * number + 1) * full_device.operations // (2 * count)
        pair.forget()
        device = make(at)
        try:
            assert_same(pair.step(device), expected)
        except torch.OutOfMemoryError:
            raised.append(at)
    return raised


FULL_MARK = pytest.mark.full


@pytest.mark.full
@pytest.mark.parametrize(
    ("chunk_size", "positions"),
    [(5, 3), pytest.param(5, 16, marks=FULL_MARK), pytest.param(LENGTH, 16, marks=FULL_MARK)],
)
def test_a_limit_that_shrinks_within_a_step(chunk_size, positions):
    pair = Pair(chunk_size).warmed()
    saved = Device()
    pair.step(saved)
    assert saved.peak > pair.need.bytes  # it saves something
    assert (
        through(
            pair,
            lambda at: Device(shrinks_at=at, later_limit=pair.need.bytes + MAX_WITNESS_BYTES),
            positions,
        )
        == []
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("chunk_size", "positions"),
    [(5, 3), pytest.param(5, 24, marks=FULL_MARK), pytest.param(LENGTH, 24, marks=FULL_MARK)],
)
def test_errors_at_any_operation(chunk_size, positions):
    pair, begun = Pair(chunk_size).warmed(), []
    pair.model.model.rotary_emb.register_forward_hook(
        lambda *_: begun.append(pair.device.operations)
    )
    raised = through(pair, lambda at: Device(fails_at=at), positions)
    assert all(at <= begun[0] for at in raised)  # before the first layer, where nothing is saved


@pytest.mark.full
@pytest.mark.parametrize(
    "family", ["lfm2", pytest.param("qwen3_5_text", marks=needs_states), "deepseek_v32"]
)
def test_errors_where_a_chunk_reads_what_another_left(family):
    """States and their gradients, and the keys that an indexer picked, are there for the second
    attempt as well."""
    changes = {"index_topk": 4} if family == "deepseek_v32" else {}
    pair = Pair(5, models=[zoo.build(family, torch.float32, **changes) for _ in range(2)]).warmed()
    raised = through(pair, lambda at: Device(fails_at=at), 16)
    assert len(raised) <= 3  # where nothing was saved yet, or any more


@pytest.mark.full
def test_a_limit_that_shrinks_between_steps():
    pair = Pair(5).warmed()
    expected, _ = pair.reference()
    for headroom in (AMPLE_BYTES, 60_000, 30_000, 10_000, 0, 30_000):
        device = Device(limit=pair.need.bytes + headroom)
        assert_same(pair.step(device), expected)
        assert device.peak <= device.limit
        assert not device.failed


@pytest.mark.full
@pytest.mark.parametrize("steps", [pytest.param(50, marks=pytest.mark.full), 4])
def test_random_lengths_and_limits_do_not_grow(steps):
    pair, draw = Pair(5).warmed(), random.Random(seed_of(7))
    references = {}
    for length in (2, 7, LENGTH, 2 * LENGTH - 1):
        batch = make_batch("plain", length=length)
        references[length] = batch, *pair.reference(**batch)
    for _ in range(steps):
        batch, expected, reference_device = references[draw.choice(list(references))]
        pair.need.bytes = reference_device.peak
        limit = reference_device.peak + draw.choice((0, 5_000, 40_000, AMPLE_BYTES))
        device = Device(limit, draw.randint(1, reference_device.operations), reference_device.peak)
        assert_same(pair.step(device, **batch), expected)
        gc.collect()
        assert (
            device.live
            <= sum(p.grad.nbytes for p in pair.model.parameters()) + ALLOCATOR_REST_BYTES
        )
    del device
    pair.device = None
    assert not [saved for saved in pair.chooser._waiting if saved.saves]
    assert len(pair.chooser.figures.costs) == 2


FREE_BYTES = (
    200_000,
    70_000,
    40_000,
)  # bytes: for Linears and attention, for fewer and fewer of them


def exact_pair(chunk_size, batch):
    """A pair without anything random, in float64, and the unpatched model's gradients."""
    pair = Pair(chunk_size, attention_dropout=0.0, dtype=torch.float64).warmed(**batch)
    _, expected = gradients(build("qwen3", torch.float64), **batch)
    pair.reference(**batch)
    return pair, expected


def exact_or_without_memory(pair, expected, device, batch):
    """Whether a step on this device came to its end, with the right gradients; it may raise for
    want of memory alone."""
    try:
        _, gradients_found = pair.step(device, **batch)
    except torch.OutOfMemoryError:
        return False
    assert gradients_found.keys() == expected.keys()
    assert worst_error(gradients_found, expected) <= 1e-10
    return True


def scan(chunk_size, length, headroom, stride):
    """Pairs of steps: the first lacks memory at one place, and within the second memory shrinks at
    another; how many steps came to an end.

    Every `stride`-th place is tried. A lack of memory anywhere else shows at the next place.
    """
    batch, ended, draw = make_batch("plain", length=length), 0, random.Random(seed_of(5))
    pair, expected = exact_pair(chunk_size, batch)
    limit, small_limit = pair.need.bytes + headroom, pair.need.bytes + MAX_WITNESS_BYTES
    pair.forget()
    pair.step(full_device := Device(limit), **batch)
    places = sorted(full_device.places)[draw.randrange(stride) :: stride]
    middle = full_device.operations // 2
    ended += exact_or_without_memory(pair, expected, Device(limit, fails_at=middle), batch)
    later_device = Device(limit)
    ended += exact_or_without_memory(pair, expected, later_device, batch)
    later_places = draw.sample(sorted(later_device.places), len(later_device.places))
    for at, later in zip(places, itertools.cycle(later_places), strict=False):
        pair.forget()
        ended += exact_or_without_memory(pair, expected, Device(limit, fails_at=at), batch)
        ended += exact_or_without_memory(pair, expected, Device(limit, later, small_limit), batch)
    return ended


@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize(
    ("chunk_size", "length", "headroom", "stride"),
    [
        *thinned(
            [(LENGTH, LENGTH, headroom, 1) for headroom in FREE_BYTES]
            + [(5, LENGTH, headroom, 10) for headroom in FREE_BYTES]
            + [(LENGTH, 2 * LENGTH - 1, headroom, 4) for headroom in FREE_BYTES]
            + [(2 * LENGTH - 1, 2 * LENGTH - 1, headroom, 2) for headroom in FREE_BYTES],
            lambda *_: False,
        ),
        (5, LENGTH, FREE_BYTES[0], 700),
        (LENGTH, LENGTH, FREE_BYTES[0], 35),
    ],
)
def test_each_place_in_turn(chunk_size, length, headroom, stride):
    assert scan(chunk_size, length, headroom, stride)


@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize("chunk_size", [pytest.param(5, marks=FULL_MARK), LENGTH])
def test_each_activation_in_turn(chunk_size):
    """Attention is behind it, the chunk's end is not: its keys and values are written a second
    time."""
    batch = make_batch("plain")
    pair, expected = exact_pair(chunk_size, batch)
    chunks, layers = -(-LENGTH // chunk_size), 2
    failed = 0
    for headroom in FREE_BYTES[:2]:
        for call in range(1, 2 * chunks * layers + 1):  # in forward and in backward
            pair.forget()
            with broken_activation(call, torch.OutOfMemoryError):
                failed += not exact_or_without_memory(
                    pair, expected, Device(pair.need.bytes + headroom), batch
                )
            assert exact_or_without_memory(pair, expected, Device(), batch)
    # before the first layer has saved something, and when all is let go of
    assert failed <= 2 * len(FREE_BYTES[:2])


@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize("chunk_size", [5, LENGTH])
def test_against_the_unpatched_model(chunk_size):
    """In float64: where all is kept and where nothing is."""
    batch = make_batch("plain")
    pair, expected = exact_pair(chunk_size, batch)
    for device in (Device(), Device(pair.need.bytes + MAX_WITNESS_BYTES)):
        assert exact_or_without_memory(pair, expected, device, batch)
    assert pair.chooser.latest.bytes == {}


def keys_written_over(patch):
    """Those of an attempt before, which keep the versions that they had."""
    patch.setattr(KVBuffer, "lent", False)


@pytest.mark.usefixtures("float64_oracle")
def test_keys_that_are_written_over_are_found(monkeypatch):
    keys_written_over(monkeypatch)
    with pytest.raises(BackwardError, match="writes in place"):
        test_each_activation_in_turn(LENGTH)
    with pytest.raises(BackwardError, match="writes in place"):
        scan(LENGTH, LENGTH, FREE_BYTES[0], 35)


def added_again(patch):
    patch.setattr(GradientSum, "begin", lambda self, is_retry=False: None)


def keys_added_again(patch):
    patch.setattr(KVBuffer, "add_once", lambda self, total, part: total.add_(part))


def nothing_let_go(patch):
    patch.setattr(SavesPolicy, "drop_saves", lambda self, saved=None: False)


@pytest.mark.full
@pytest.mark.parametrize("mutant", [added_again, keys_added_again, nothing_let_go])
def test_mutant_turns_a_test_red(monkeypatch, mutant):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_errors_at_any_operation(5, 8)
