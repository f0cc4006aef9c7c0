"""A config object's attention implementation while several threads stream with it.

covers: attention/interface.py
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaConfig

import streambp
from streambp.attention import interface
from streambp.attention.interface import IMPLEMENTATION_NAME, own_implementation, route_attention
from streambp.errors import UnsupportedModelError
from tests.families import build, make_batch
from tests.hangs import HANG
from tests.oracle import gradients, worst_error
from tests.tiers import thinned

STEPS = 4


def name_of(config):
    return config._attn_implementation_internal


def test_the_name_is_there_within_and_the_own_one_after():
    config = LlamaConfig(attn_implementation="eager")
    with route_attention([config]):
        assert name_of(config) == IMPLEMENTATION_NAME
        assert own_implementation(config) == "eager"
        with route_attention([config, LlamaConfig()]):
            assert name_of(config) == IMPLEMENTATION_NAME
        assert name_of(config) == IMPLEMENTATION_NAME
    assert (name_of(config), type(name_of(config)), own_implementation(config)) == (
        "eager",
        str,
        "eager",
    )


def test_threads_leave_in_any_order():
    """The second enters before the first leaves and leaves after it: neither finds the other's name
    in between."""
    config = LlamaConfig(attn_implementation="sdpa")
    second_entered, first_left = threading.Event(), threading.Event()

    def first():
        with route_attention([config]):
            assert second_entered.wait(HANG)
        first_left.set()

    def second():
        with route_attention([config]):
            second_entered.set()
            assert first_left.wait(HANG)
            return name_of(config), own_implementation(config)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(second), pool.submit(first)]
        assert futures[0].result() == (IMPLEMENTATION_NAME, "sdpa")
        futures[1].result()
    assert name_of(config) == "sdpa"


def test_an_exception_gives_the_own_name_back():
    config = LlamaConfig(attn_implementation="sdpa")
    with contextlib.suppress(ValueError), route_attention([config]), route_attention([config]):
        raise ValueError
    assert name_of(config) == "sdpa"


def test_what_is_set_meanwhile_stays():
    config = LlamaConfig(attn_implementation="sdpa")
    with route_attention([config]):
        config._attn_implementation = "eager"
    assert name_of(config) == "eager"


def test_copies_have_the_own_name():
    config = LlamaConfig(attn_implementation="sdpa")
    with route_attention([config]):
        copies = [copy.deepcopy(config), pickle.loads(pickle.dumps(config)), copy.copy(config)]
        assert json.loads(config.to_json_string()) == json.loads(
            LlamaConfig(attn_implementation="sdpa").to_json_string()
        )
    assert [name_of(c) for c in copies[:2]] == ["sdpa", "sdpa"]
    with route_attention([copies[2]]):  # a shallow copy has the name of that moment
        pass
    assert name_of(copies[2]) == name_of(config) == "sdpa"
    nameless = LlamaConfig()
    nameless._attn_implementation_internal = None
    with route_attention([nameless]):
        assert name_of(copy.deepcopy(nameless)) is None


def models_of_one_config(count, attention="sdpa"):
    """And the gradients that each gives by itself, unpatched."""
    models = [build("qwen3", torch.float64, seed=seed) for seed in range(count)]
    for model in models:
        model.config = models[0].config
        for module in model.modules():
            if hasattr(module, "config"):
                module.config = models[0].config
    models[0].config._attn_implementation = attention
    batches = [make_batch("left-padded", seed=seed) for seed in range(count)]
    return models, batches, [gradients(m, **b)[1] for m, b in zip(models, batches, strict=True)]


@pytest.fixture
def often_switching():
    previous_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(previous_interval)


def worst_of_threads(models, batches, expected):
    start = threading.Barrier(len(models))

    def train(model, batch, reference):
        start.wait(HANG)
        return max(worst_error(gradients(model, **batch)[1], reference) for _ in range(STEPS))

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(train, models, batches, expected))


@pytest.mark.fast("patched3-eager")
@pytest.mark.parametrize(
    ("patched", "attention"),
    thinned(
        itertools.product([(True, True), (True, False)], ["sdpa", "eager"]),
        lambda patched, attention: all(patched) == (attention == "sdpa"),
    ),
)
def test_two_threads_train_models_of_one_config(
    patched, attention, often_switching, float64_oracle
):
    """Both patched, or one of them beside an unpatched model."""
    models, batches, expected = models_of_one_config(2, attention)
    for model, ours in zip(models, patched, strict=True):
        if ours:
            streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    assert max(worst_of_threads(models, batches, expected)) <= 1e-10
    assert name_of(models[0].config) == attention
    assert streambp.unpatch(models[0]).config._attn_implementation == attention


@pytest.mark.full
def test_a_thread_that_fails_leaves_the_other_alone(often_switching, float64_oracle):
    models, batches, expected = models_of_one_config(2)
    for model in models:
        streambp.patch(model, streambp.StreamConfig(chunk_size=5))
        gradients(model, **batches[0])
    models[1].model.layers[1].mlp.act_fn.forward = lambda x: (_ for _ in ()).throw(
        ValueError("injected")
    )

    def fail():
        for _ in range(STEPS):
            with pytest.raises(ValueError, match="injected"):
                gradients(models[1], **batches[1])

    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(fail)
        assert (
            max(
                worst_error(gradients(models[0], **batches[0])[1], expected[0])
                for _ in range(STEPS)
            )
            <= 1e-10
        )
        failing.result()
    assert name_of(models[0].config) == "sdpa"


def test_a_thread_beside_ours_attends_as_its_config_says():
    """Whatever it asks our entries for: its own mask, and attention by its own function."""
    models, batches, _ = models_of_one_config(1)
    expected = models[0](**batches[0], use_cache=False).logits
    entered, release = threading.Event(), threading.Event()

    def stream():
        with route_attention([models[0].config]):
            entered.set()
            assert release.wait(HANG)

    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(stream)
        assert entered.wait(HANG)
        try:
            logits = models[0](**batches[0], use_cache=False).logits
            cached = (
                models[0]
                .eval()
                .generate(batches[0]["input_ids"][:1], max_new_tokens=3, do_sample=False)
            )
        finally:
            release.set()
        streaming.result()
    assert torch.equal(logits, expected)
    assert torch.equal(
        models[0].generate(batches[0]["input_ids"][:1], max_new_tokens=3, do_sample=False), cached
    )


class ForgetfulSet(set):
    """Forgets all of its elements with the first that leaves."""

    def discard(self, _):
        self.clear()


@pytest.mark.parametrize("mutant", ["_thread_implementation", "holders"])
def test_its_mutants(mutant, monkeypatch):
    """Nobody is sent on; the first to leave takes the name away."""
    if mutant == "_thread_implementation":
        monkeypatch.setattr(interface, mutant, lambda config: None)
        with pytest.raises((AssertionError, UnsupportedModelError)):
            test_a_thread_beside_ours_attends_as_its_config_says()
        return
    monkeypatch.setattr(interface, "set", ForgetfulSet, raising=False)
    with pytest.raises(AssertionError):
        test_threads_leave_in_any_order()
