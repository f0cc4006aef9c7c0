"""Offloaded tensors: the same gradients to the bit, host bytes to the formula, models and copies
kept apart.

covers: offload/__init__.py, offload/arena.py, offload/engines.py, offload/transfers.py
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import streambp
from streambp import offload
from streambp.offload import arena, engines, manager_of, transfers
from tests import zoo
from tests.families import build, make_batch
from tests.offload.runs import (
    BOTH_SAVES,
    SAVES,
    SCHEDULES,
    assert_same,
    expected_host_bytes,
    forward,
    model_with,
    offloaded,
    run,
    sampled,
    step,
)
from tests.oracle import worst_error


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("mode", "saves"),
    sampled(
        lambda mode, saves: (mode == "packed") == (saves == BOTH_SAVES) and mode != "left-padded",
        ["plain", "left-padded", "packed"],
        SAVES,
    ),
)
def test_gradients_are_bitwise_the_same(mode, saves):
    expected = step(model_with(saves), mode)
    model = offloaded(saves)
    for _ in range(2):  # the second step finds a stack that was used
        assert_same(step(model, mode), expected)
    stats = manager_of(model).stats()
    assert stats["bytes_out"] > 0
    assert stats["bytes_back"] > 0
    assert "to the host" in str(streambp.describe(model))


@pytest.mark.parametrize("name", ["jamba", "qwen3_moe", "deepseek_v3"])
def test_families(name):
    expected = step(model_with(("kv",), zoo.build(name, torch.float32)))
    assert_same(step(offloaded(("kv",), zoo.build(name, torch.float32))), expected)


@pytest.mark.full
def test_hidden_states_that_are_not_contiguous(float64_oracle):
    """Gemma 3n's are views with other strides than what comes back from the host. The values are
    the same, but BLAS chooses its product by strides, and not the same on every CPU: equal but for
    rounding."""
    (loss, expected), (actual_loss, actual) = (
        step(make(("kv",), zoo.build("gemma3n_text", torch.float64)))
        for make in (model_with, offloaded)
    )
    assert torch.equal(actual_loss, loss)
    assert worst_error(actual, expected) <= 1e-10


FAST_CASES = ("1F1B", "last first", "evaluation in between")  # the other two are parts of these


@pytest.mark.fast("last first-attn_out+kv")
@pytest.mark.parametrize(
    ("schedule", "saves"),
    sampled(
        lambda schedule, saves: saves == BOTH_SAVES and schedule in FAST_CASES, SCHEDULES, SAVES
    ),
)
def test_schedules(schedule, saves):
    expected, actual = (
        run(model_with(saves), SCHEDULES[schedule]),
        run(offloaded(saves), SCHEDULES[schedule]),
    )
    assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items())


def test_host_bytes_are_the_formulas_to_the_byte():
    model = offloaded()
    expected = expected_host_bytes(model)
    loss = forward(model, 1)
    assert manager_of(model)._current().stack.used_bytes == expected
    assert manager_of(model).transfers.bytes[engines.TO_HOST_QUEUE] <= expected
    loss.backward()
    forward(model, 1).backward()
    assert manager_of(model).host_bytes <= 1.2 * expected


def sources(model):
    """How many are kept for their copies."""
    return len(manager_of(model).transfers._in_flight)


@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("gpu_memory", [pytest.param(None, marks=pytest.mark.full), 1])
def test_many_steps_do_not_grow(gpu_memory, steps):
    model = offloaded(gpu_memory=gpu_memory)
    sizes = []
    for seed in range(steps):
        forward(model, seed).backward()
        sizes.append(
            (manager_of(model).host_bytes, sources(model), len(manager_of(model)._holdings))
        )
    assert len(set(sizes[1:])) == 1
    assert sizes[-1][2] == 0
    assert sources(model) <= transfers.GROUPS_IN_FLIGHT * 5  # x, attn_out, lse, k, v


@pytest.mark.full
def test_longer_sequences_in_the_next_step():
    for lengths in ((11, 40, 23), (40, 11, 64)):
        ours, theirs = offloaded(), model_with(("attn_out", "kv"))
        for length in lengths:
            batch = make_batch("plain", length=length)
            assert_same(step(ours, **batch), step(theirs, **batch))


def test_two_models_keep_apart():
    first, second = offloaded(), offloaded(model=build("llama", num_hidden_layers=3))
    expected = step(model_with(("attn_out", "kv")))
    loss = forward(second, 1)
    assert_same(step(first), expected)
    loss.backward()
    assert manager_of(first) is not manager_of(second)


@pytest.mark.full
def test_copies_and_pickles_start_empty():
    model = offloaded()
    expected = step(model)
    for model_copy in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert manager_of(model_copy) is not manager_of(model)
        assert manager_of(model_copy).host_bytes == 0
        layer_states = [
            w.layer_state for w in model_copy._streambp.wrappers if hasattr(w, "layer_state")
        ]
        assert all(layer_state.offloader is manager_of(model_copy) for layer_state in layer_states)
        assert_same(step(model_copy), expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [("offload", "disk"), ("on_host_full", "ignore"), ("host_memory", "many"), ("gpu_memory", -1)],
)
def test_settings(field, value):
    with pytest.raises(streambp.StreamBPError, match=field):
        streambp.StreamConfig(**{field: value})


@pytest.mark.parametrize("field", ["host_memory", "gpu_memory"])
def test_budgets_without_offloading_are_refused(field):
    with pytest.raises(streambp.StreamBPError, match=f"{field} is set, but offload='none'"):
        streambp.StreamConfig(offload="none", **{field: "1GiB"})
    with pytest.raises(streambp.StreamBPError, match=f"{field} is set, but offload='if_faster'"):
        streambp.StreamConfig(saves=(), **{field: "1GiB"})


def test_a_budget_of_the_host_holds_for_steps_that_may_move():
    assert streambp.StreamConfig(host_memory="1GiB").host_memory == 2**30
    with pytest.raises(streambp.StreamBPError, match="gpu_memory is set"):
        streambp.StreamConfig(gpu_memory="1GiB")


def test_sizes_are_parsed():
    sizes = {"96GiB": 96 * 2**30, "1.5 TB": 1.5e12, "512MiB": 2**29, "1000B": 1000, 77: 77}
    for text, size in sizes.items():
        assert streambp.StreamConfig(offload="cpu", host_memory=text).host_memory == size


@pytest.mark.full
def test_close_gives_the_memory_back():
    model = offloaded()
    expected = step(model)
    manager_of(model).close()
    assert manager_of(model).host_bytes == 0
    assert_same(step(model), expected)


@pytest.mark.parametrize("part", ["model", "model.layers", "model.layers.1"])
def test_manager_of_a_part(part):
    """Of a model that was patched as a whole, its parts that stream have the same manager; others
    have none."""
    model = offloaded()
    assert (
        manager_of(model.get_submodule(part))
        is manager_of(model)
        is manager_of(torch.nn.Sequential(model))
    )
    with pytest.raises(streambp.StreamBPError, match="offload='cpu'"):
        manager_of(model.lm_head)


def test_a_manager_that_is_looked_for_on_the_whole_alone_is_not_found(monkeypatch):
    monkeypatch.setattr(offload, "forwards", lambda module: ())
    with pytest.raises(streambp.StreamBPError, match="offload='cpu'"):
        test_manager_of_a_part("model")


def test_manager_of_a_model_that_keeps_everything():
    with pytest.raises(streambp.StreamBPError, match="offload='cpu'"):
        manager_of(model_with())


def poisoned(self, size):
    return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN in every float dtype


def test_nothing_is_read_that_was_not_written(monkeypatch):
    monkeypatch.setattr(engines.Engine, "host_buffer", poisoned)
    assert_same(step(offloaded()), step(model_with(("attn_out", "kv"))))


def test_arena_hands_out_aligned_ranges_that_do_not_overlap():
    pool = arena.Arena(1000, lambda size: torch.zeros(size, dtype=torch.uint8))
    stack = pool.take()
    assert stack.push(10) is None
    assert pool.grow(stack, 128)
    first, second = stack.push(10), stack.push(64)
    first.fill_(1)
    assert second.sum() == 0
    assert (second.data_ptr() - first.data_ptr()) % arena.ALIGNMENT_BYTES == 0
    assert stack.push(1) is None
    assert not pool.grow(stack, 1000)
    pool.give_back(stack)
    assert pool.take() is stack
    assert stack.used_bytes == 0
