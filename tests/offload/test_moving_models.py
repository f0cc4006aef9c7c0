"""Models on a CPU that move saved tensors to the host by default, because the policy is told that
the device has no room. No forward draws other dropout masks for that. [Note: host by seconds]

covers: offload/host_choice.py, offload/policy.py, offload/manager.py, model/state.py,
model/wrappers.py
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import streambp
from streambp.model.state import ForwardContext
from streambp.offload import manager as managers
from streambp.offload import policy
from streambp.offload.costs import HostStepFigures, Shortage
from streambp.offload.free_memory import UNLIMITED_BYTES
from streambp.offload.host_choice import HostChoice
from streambp.offload.manager import OffloadManager
from tests.families import LENGTH, build, make_batch
from tests.offload.runs import assert_same, step
from tests.offload.test_limits import MemoryNeed
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch

ROWS = 2
AMPLE_BYTES = 10**9
ON_DEVICE, ON_HOST = 4, 16  # positions of a chunk


@pytest.fixture(autouse=True)
def few_chunk_sizes(monkeypatch):
    monkeypatch.setattr(policy, "CHUNK_TOKENS", (ROWS * ON_HOST, ROWS * ON_DEVICE))


def full_device_model(rate=0.0, **settings):
    """A model without room on its device for a step that moves nothing, after a first step."""
    model = build("qwen3", attention_dropout=rate)
    config = {"unpatched_runs": False, "rows": "as_given", **settings}
    streambp.patch(model, streambp.StreamConfig(**config))
    step(model)
    chooser = chooser_of(model)
    chooser.learn()
    figures, need = chooser.figures, MemoryNeed()
    figures.need, figures.seconds, figures.products = MemoryNeed(), lambda *_: 1.0, 1e9
    figures.need.bytes = 2 * AMPLE_BYTES
    on_host = HostStepFigures(need, lambda *_: (0.3, 0.7, 1.0), 1e9, 1.0, 1e9)
    figures.on_host = lambda: on_host
    chooser.free = lambda _: AMPLE_BYTES
    return model


def chooser_of(model):
    return model._streambp.saves_policy


def moves(model):
    return chooser_of(model).moving is not None


def little_room(model):
    """Have inputs leave, too: the device has no room beside a step that moves."""
    chooser = chooser_of(model)
    chooser.figures.on_host().need.bytes = AMPLE_BYTES
    return model


def test_a_step_without_room_moves_and_is_exact():
    plain = build("qwen3")
    model = little_room(full_device_model())
    _, actual = gradients(model, **make_batch("plain"))
    assert moves(model)
    assert streambp.last_step(model).host.out > 0
    assert chooser_of(model).moving.shape.chunk == ROWS * ON_HOST
    assert worst_error(actual, gradients(plain, **make_batch("plain"))[1]) <= 1e-5


def both_forwards(model):
    """Hidden states of a forward without gradients, and of one with gradients that follows from the
    same random state, as GradCache computes them."""
    ids = make_batch("plain")["input_ids"]
    seed_torch(4)
    with torch.no_grad():
        first = model.model(ids, use_cache=False).last_hidden_state  # [B, T, h]
    seed_torch(4)
    return first, model.model(ids, use_cache=False).last_hidden_state  # [B, T, h]


@pytest.mark.parametrize("unpatched_runs", [False, True])
def test_a_forward_without_gradients_draws_as_the_one_with(unpatched_runs):
    model = little_room(full_device_model(0.3, unpatched_runs=unpatched_runs))
    for _ in range(2):
        first, second = both_forwards(model)
        assert torch.equal(first, second)
        assert not moves(model)


def test_without_draws_the_forward_with_gradients_moves():
    model = little_room(full_device_model())
    first, second = both_forwards(model)
    assert moves(model)
    torch.testing.assert_close(first, second)


def in_a_checkpoint(rate, reentrant):
    """A step whose whole model is a checkpoint moves nothing, neither in forward nor in
    backward."""
    model = little_room(full_device_model(rate))
    batch = make_batch("plain")
    hidden = model.get_input_embeddings()(batch["input_ids"])
    moves_seen = []

    def run(x):
        return model(inputs_embeds=x, labels=batch["labels"]).loss

    model.model.layers[-1].register_forward_hook(lambda *_: moves_seen.append(moves(model)))
    seed_torch(4)
    loss = checkpoint(run, hidden, use_reentrant=reentrant)
    loss.backward()
    assert len(moves_seen) > 1
    assert not any(moves_seen)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_programs_checkpoint_draws_twice_alike(rate, reentrant):
    in_a_checkpoint(rate, reentrant)


def test_where_nothing_leaves_nothing_moves():
    """The device has room, and what similar steps lacked on it is no reason to move."""
    model = full_device_model()
    step(model)
    assert not moves(model)


def test_memory_that_steps_on_the_device_lacked_is_left_free_by_those_that_move():
    model = full_device_model()
    chooser = chooser_of(model)
    chooser.figures.on_host().need.bytes = 0.5 * AMPLE_BYTES
    key = torch.device("cpu"), ROWS * LENGTH, ROWS * ON_HOST
    shortage = Shortage(key, 0.0, 0.0, {}, margin=0.5 * AMPLE_BYTES)
    chooser.margins[shortage.key] = shortage
    step(model)
    assert moves(model)  # only because of the margin
    assert chooser.moving.free_bytes == 0


def test_a_copy_made_during_a_forward_has_no_forward():
    """A count copies the model in a step; the batch would stay on the device with the copy."""
    model = full_device_model(chunk_size=5, offload="none")
    copies = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda *_: copies.append(copy.deepcopy(model))
    )
    assert_same(step(model), step(model))
    hook.remove()
    assert copies
    for model_copy in copies:
        assert model_copy._streambp.running == ForwardContext()


def host_limit(requested_bytes, set_aside=0, part=0.9):
    return int(part * 1000) - set_aside if requested_bytes is None else requested_bytes


@pytest.mark.parametrize(
    ("host_memory", "on_demand", "headroom"),
    [(None, True, 490), (None, False, 890), (700, True, 700), (5000, True, 890)],
)
def test_the_default_pins_half_of_the_host(host_memory, on_demand, headroom, monkeypatch):
    monkeypatch.setattr(managers, "host_limit", host_limit)
    manager = OffloadManager(host_memory, "keep", 4, on_demand=on_demand)
    manager.other_use.set_aside = 10
    assert manager.host_room() == headroom
    arena, _ = manager.start(torch.device("cpu"))
    assert arena.limit == headroom


def test_a_host_of_unknown_memory_is_not_used(monkeypatch):
    monkeypatch.setattr(
        managers, "host_limit", lambda requested_bytes, set_aside=0, part=0.9: UNLIMITED_BYTES
    )
    assert OffloadManager(None, "keep", 4, on_demand=True).host_room() == 0
    assert OffloadManager(2000, "keep", 4, on_demand=True).host_room() == 2000
    assert OffloadManager(None, "keep", 4).host_room() == UNLIMITED_BYTES


def test_half_of_the_host_is_described():
    model = little_room(full_device_model())
    step(model)
    description = streambp.describe(model).offload
    assert "at most half of the host memory available" in description
    assert "would not fit" in description
    assert math.isinf(chooser_of(model).host.gain)


def test_host_memory_that_is_not_available_is_described(monkeypatch):
    monkeypatch.setattr(managers, "host_limit", lambda *_, **__: 2**30)
    model = little_room(full_device_model(host_memory="4GiB"))
    step(model)
    description = streambp.describe(model).offload
    assert "at most 4.0 GiB of host memory, of which 1.0 GiB are available" in description


def looks_at_draws_alone(patch):
    patch.setattr(HostChoice, "must_draw_alike", lambda self: self.drew)


def never_watches(patch):
    patch.setattr(HostChoice, "watch_draws", lambda self, run, device: run())


def copies_the_batch(patch):
    patch.delattr(ForwardContext, "__deepcopy__")


def nine_tenths(patch):
    patch.setattr(managers, "DEFAULT_HOST_FRACTION", 0.9)


MUTANTS = {
    "without gradients": (
        looks_at_draws_alone,
        lambda patch: test_a_forward_without_gradients_draws_as_the_one_with(False),
    ),
    "reentrant": (looks_at_draws_alone, lambda patch: in_a_checkpoint(0.3, True)),
    "checkpoint": (looks_at_draws_alone, lambda patch: in_a_checkpoint(0.3, False)),
    "unwatched": (
        never_watches,
        lambda patch: test_a_forward_without_gradients_draws_as_the_one_with(False),
    ),
    "copies": (
        copies_the_batch,
        lambda patch: test_a_copy_made_during_a_forward_has_no_forward(),
    ),
    "nine tenths": (
        nine_tenths,
        lambda patch: test_the_default_pins_half_of_the_host(None, True, 490, patch),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_turns_a_test_red(mutant, monkeypatch):
    change, run = MUTANTS[mutant]
    change(monkeypatch)
    with pytest.raises(AssertionError):
        run(monkeypatch)
