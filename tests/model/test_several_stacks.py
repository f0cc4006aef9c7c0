"""Models that run two backbones in one forward, or one backbone twice, with batches of other
shapes.

covers: model/steps.py, model/unpatched.py, model/wrappers.py
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import streambp
from streambp.model import unpatched
from streambp.model.steps import Steps
from tests.families import LENGTH, build, make_batch
from tests.offload.test_limits import AMPLE_BYTES
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seeded

SHORT_LENGTH = 11
UNCHUNKED_SETTINGS = {"chunk_size": LENGTH, "rows": "as_given"}
SETTINGS = {
    "unpatched": UNCHUNKED_SETTINGS,
    "unpatched, lazy": {**UNCHUNKED_SETTINGS, "lazy_logits": True},
    "kept graphs": {**UNCHUNKED_SETTINGS, "unpatched_runs": False},
    "chunks": {"chunk_size": 5, "rows": "as_given"},
    "chunks, lazy": {"chunk_size": 5, "lazy_logits": True},
    "offload": {"chunk_size": 5, "saves": ("attn_out", "kv"), "offload": "cpu"},
}


class TwoModels(nn.Module):
    """Two language models of other families and depths, for forwards that run both."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.first = build("qwen3", dtype=dtype)
        self.second = build("llama", dtype=dtype, seed=1, num_hidden_layers=3)

    def forward(self, losses):
        return losses(self.first, self.second)


@pytest.fixture(autouse=True)
def headroom(monkeypatch):
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", 0.25)


def patched(plain, separately=False, **settings):
    """A copy of `plain`, patched as one model or each language model apart, on a device with plenty
    of memory."""
    model = copy.deepcopy(plain)
    for part in (model.first, model.second) if separately else (model,):
        streambp.patch(part, streambp.StreamConfig(**settings))
        for wrapper in part._streambp.wrappers:
            policy = getattr(getattr(wrapper, "layer_state", None), "saves_policy", None)
            if policy is not None:
                policy.free = lambda _: AMPLE_BYTES
    return model


def long_batch():
    return make_batch("right-padded")


def short_batch():
    batch = make_batch("left-padded", seed=1, length=SHORT_LENGTH)
    return {name: torch.cat([value, value[:1].roll(2, -1)]) for name, value in batch.items()}


def loss_of(model, batch):
    return model(**batch, use_cache=False).loss


def loss_outside(model, batch):
    """The loss as a program computes it, from logits."""
    labels = batch["labels"][:, 1:].flatten()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels)


def hidden(model, batch):
    """A sum over the backbone's output, padding left out."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    states = model.model(**inputs, use_cache=False).last_hidden_state
    weights = torch.randn(states.shape, generator=seeded(2), dtype=states.dtype)
    return (states * weights * batch["attention_mask"][..., None]).sum() / 100


FORWARDS = {
    "two": lambda value, a, b: [value(a, long_batch()), value(b, short_batch())],
    "one twice": lambda value, a, b: [value(a, long_batch()), value(a, short_batch())],
    "first, second, first": lambda value, a, b: [
        value(a, long_batch()),
        value(b, short_batch()),
        value(a, short_batch()),
    ],
}
VALUES = {"hidden states": hidden, "loss": loss_of, "loss outside": loss_outside}
BACKWARDS = {"together": lambda losses: [sum(losses)], "in order": list, "reversed": reversed}


def gradients(model, forward, value, backward):
    model.zero_grad(set_to_none=True)
    losses = model(functools.partial(FORWARDS[forward], VALUES[value]))
    for loss in BACKWARDS[backward](losses):
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return sum(loss.detach() for loss in losses), grads


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "separately",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["one patch", "patched apart"],
)
@pytest.mark.parametrize(
    "settings",
    [
        name if name in ("unpatched", "chunks") else pytest.param(name, marks=pytest.mark.full)
        for name in SETTINGS
    ],
)
def test_gradients_are_the_unpatched_models(settings, separately, float64_oracle):
    """In the first step and in a later one, whatever the order of backwards."""
    plain = TwoModels()
    model = patched(plain, separately, **SETTINGS[settings])
    for value in VALUES:
        for number, forward in enumerate(FORWARDS):
            for backward in ("together", ("reversed", "in order")[number % 2]):
                expected = gradients(plain, forward, value, backward)
                result = gradients(model, forward, value, backward)
                torch.testing.assert_close(result[0], expected[0], rtol=1e-11, atol=0.0)
                assert worst_error(result[1], expected[1]) <= MAX_FLOAT64_ERROR, (
                    value,
                    forward,
                    backward,
                )


def notes_after(settings, forward, value=loss_of):
    """Records before and after the backward of the step that follows a step of both models."""
    model = patched(TwoModels(torch.float32), **SETTINGS[settings])
    records = []
    for function in (FORWARDS["two"], FORWARDS[forward]):
        losses = model(functools.partial(function, value))
        records.append(streambp.last_step(model))
        sum(losses).backward()
    assert (records[0].number, records[0].tokens, records[0].way) == (1, TOTAL_TOKENS, "streamed")
    return [records[1], streambp.last_step(model)]


TOTAL_TOKENS = 2 * LENGTH + 3 * SHORT_LENGTH


@pytest.mark.parametrize("settings", ["unpatched", "chunks"])
def test_a_step_is_told_with_the_tokens_of_both_backbones(settings):
    record_before, record_after = notes_after(settings, "two")
    for record in (record_before, record_after):
        assert (record.number, record.tokens, record.rows) == (2, TOTAL_TOKENS, 3)
    way = ("ran unpatched", 1) if settings == "unpatched" else ("streamed", 0)
    assert (record_after.way, record_after.unpatched_steps) == way


@pytest.mark.parametrize("settings", ["unpatched", "chunks"])
def test_one_backbone_twice_is_two_micro_batches(settings):
    record_before, record_after = notes_after(settings, "one twice")
    assert (record_before.number, record_after.number, record_after.tokens) == (
        3,
        3,
        3 * SHORT_LENGTH,
    )
    assert record_after.unpatched_steps == (2 if settings == "unpatched" else 0)


@pytest.mark.parametrize("part", ["first", "second"])
def test_a_model_whose_run_does_not_fit_streams_in_the_same_step(part):
    """The other model runs unpatched, and the step is told with what streamed."""
    model = patched(TwoModels(torch.float32), **SETTINGS["unpatched"])
    sum(model(functools.partial(FORWARDS["two"], loss_of))).backward()
    head = getattr(model, part).lm_head

    def fails(*_):
        handle.remove()
        raise torch.OutOfMemoryError("no memory left, says a test")

    handle = head.register_forward_pre_hook(fails)  # its backbone has ended by then
    losses = model(functools.partial(FORWARDS["two"], loss_of))
    assert not head._forward_pre_hooks
    record = streambp.last_step(model)
    assert (record.number, record.tokens, record.rows) == (2, TOTAL_TOKENS, 3)
    assert record.way != "ran unpatched"
    sum(losses).backward()
    record_after = streambp.last_step(model)
    assert (record_after.number, record_after.tokens, record_after.unpatched_steps) == (
        2,
        TOTAL_TOKENS,
        0,
    )


def loses_shapes(self, backbone, tokens, shared, unpatched=False, real=Steps.record_forward_end):
    """As it was: an unpatched forward is followed by its own repetition."""
    if self.last is not None and self.last.unpatched and not self.last.in_backward:
        self.last.shapes.clear()
    real(self, backbone, tokens, shared, unpatched)


MUTANTS = {
    "shapes": (
        "record_forward_end",
        loses_shapes,
        lambda: test_a_step_is_told_with_the_tokens_of_both_backbones("unpatched"),
    ),
    "discarded": (
        "forget_since",
        lambda self, last: None,
        lambda: test_a_model_whose_run_does_not_fit_streams_in_the_same_step("second"),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_turns_a_test_red(mutant, monkeypatch):
    name, value, test = MUTANTS[mutant]
    monkeypatch.setattr(Steps, name, value)
    with pytest.raises(AssertionError):
        test()
