"""Caches that a training step is asked for: as unpatched, or an error at their first use.

covers: model/absent_cache.py, model/state.py, model/wrappers.py
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import CheckpointError
from transformers import PreTrainedModel
from transformers.utils import generic

import streambp
from streambp.cache_arguments import cache_parameters
from streambp.model import causal_lm, state, wrappers
from streambp.model.absent_cache import AbsentCache, NoCacheError
from tests import zoo
from tests.families import build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.versions import needs_states

FAMILIES = (
    "qwen3",
    pytest.param("gemma2", marks=pytest.mark.full),
    pytest.param("gpt2", marks=pytest.mark.full),
    pytest.param("falcon", marks=pytest.mark.full),
    pytest.param("lfm2", marks=needs_states),
    pytest.param("mamba2", marks=[needs_states, pytest.mark.full]),
)
HALF_LENGTH = 16
needs_defaults = pytest.mark.skipif(
    not hasattr(generic, "merge_with_config_defaults"),
    reason="this transformers fills in no arguments from a config",
)


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def patched(stock, **settings):
    return streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5, **settings))


def grads_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def cache_of(output):
    return output.cache if hasattr(output, "cache") else getattr(output, "past_key_values", None)


def on_top(model, cache):
    return {cache_parameters(type(model).forward)[0]: cache}


def truncated(model, ids, **asks):
    """The second half goes on from the first, through its cache."""
    first = model(input_ids=ids[:, :HALF_LENGTH], labels=ids[:, :HALF_LENGTH], **asks)
    second = model(
        input_ids=ids[:, HALF_LENGTH:],
        labels=ids[:, HALF_LENGTH:],
        **on_top(model, cache_of(first)),
        **asks,
    )
    (first.loss + second.loss).backward()


def without_labels(model, ids, **asks):
    """A prefix that nobody scores, and what comes after it."""
    prefix = model(input_ids=ids[:, :HALF_LENGTH], **asks)
    second = model(
        input_ids=ids[:, HALF_LENGTH:],
        labels=ids[:, HALF_LENGTH:],
        **on_top(model, cache_of(prefix)),
    )
    second.loss.backward()


def of_the_backbone(model, ids, **asks):
    """The same by the model below the head."""
    backbone = model.base_model
    prefix = backbone(input_ids=ids[:, :HALF_LENGTH], **asks)
    second = backbone(input_ids=ids[:, HALF_LENGTH:], **on_top(backbone, cache_of(prefix)))
    second.last_hidden_state.square().mean().backward()


PROGRAMS = (truncated, without_labels, of_the_backbone)


def compare(name, program, **settings):
    stock = zoo.build(name)
    ours, ids = (
        patched(stock, **settings),
        make_batch("plain", length=2 * HALF_LENGTH + 1)["input_ids"],
    )
    for model in (stock, ours):
        program(model, ids, use_cache=True)
    assert worst_error(grads_of(ours), grads_of(stock)) <= MAX_FLOAT64_ERROR
    assert "asked for a cache (use_cache=True) ran unpatched" in str(streambp.describe(ours))
    return ours


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_that_is_asked_for_is_the_unpatched_one(name, program):
    if name == "mamba2" and program is not of_the_backbone:
        pytest.skip("unpatched, Mamba 2 goes on from a cache with a single token alone")
    compare(name, program)


@pytest.mark.parametrize("settings", [{"lazy_logits": True}, {"head": False}], ids=str)
def test_with_other_heads(settings):
    compare("qwen3", without_labels, **settings)
    compare("qwen3", truncated, **settings)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_cache_that_the_config_alone_asks_for_streams_and_raises_when_it_is_used(program):
    ours, ids = (
        patched(zoo.build("qwen3")),
        make_batch("plain", length=2 * HALF_LENGTH + 1)["input_ids"],
    )
    assert ours.config.use_cache
    with pytest.raises(NoCacheError, match=r"Pass use_cache=True to the call"):
        program(ours, ids)
    ours.zero_grad()
    ours(input_ids=ids, labels=ids).loss.backward()  # the model is as it was
    stock = streambp.unpatch(copy.deepcopy(ours))
    stock.zero_grad()
    stock(input_ids=ids, labels=ids).loss.backward()
    assert worst_error(grads_of(ours), grads_of(stock)) <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
    assert "asked for a cache" not in str(streambp.describe(ours))


def test_programs_that_never_use_it_do_not_see_it():
    ours, ids = patched(zoo.build("qwen3")), make_batch("plain")["input_ids"]
    output = ours(input_ids=ids, labels=ids)
    absent = cache_of(output)
    assert isinstance(absent, AbsentCache)
    assert not hasattr(absent, "get_seq_length")
    assert isinstance(copy.deepcopy(absent), AbsentCache)
    assert isinstance(pickle.loads(pickle.dumps(absent)), AbsentCache)
    for use in (len, list, lambda cache: cache[0], lambda cache: cache.update):
        with pytest.raises(NoCacheError):
            use(absent)
    assert cache_of(ours(input_ids=ids, labels=ids, use_cache=False)) is None
    ours.config.use_cache = False
    assert cache_of(ours(input_ids=ids, labels=ids)) is None


@pytest.mark.parametrize("asks", [{}, {"use_cache": True}], ids=str)
def test_under_checkpointing_there_is_none_unpatched_either(asks):
    """So a Trainer's model streams."""
    ours, ids = build("qwen3", torch.float64), make_batch("plain")["input_ids"]
    ours.gradient_checkpointing_enable()
    streambp.patch(ours, streambp.StreamConfig(chunk_size=5))
    for _ in range(2):
        output = ours(input_ids=ids, labels=ids, **asks)
        output.loss.backward()
        assert cache_of(output) is None
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
    assert "asked for a cache" not in str(streambp.describe(ours))


class Outer(PreTrainedModel):
    """A model without a head around a language model, which says what its config says where its
    caller says nothing."""

    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.model = build("qwen3", torch.float64).model

    def forward(self, input_ids, use_cache=None, **kwargs):
        return self.model(input_ids=input_ids, use_cache=use_cache, **kwargs)


if hasattr(generic, "merge_with_config_defaults"):
    Outer.forward = generic.merge_with_config_defaults(Outer.forward)


@needs_defaults
def test_a_model_around_that_hands_on_its_config_has_not_asked():
    ours = Outer(build("qwen3").config).train()
    streambp.patch(ours, streambp.StreamConfig(chunk_size=5))
    output = ours(make_batch("plain")["input_ids"])
    output.last_hidden_state.square().mean().backward()
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
    assert "asked for a cache" not in str(streambp.describe(ours))
    assert isinstance(cache_of(output), AbsentCache)


def asks_for_nothing(monkeypatch):
    for module in (state, causal_lm, wrappers):
        monkeypatch.setattr(module, "names_cache", lambda model, kwargs: False)


MUTANTS = {
    "what a caller asks for is not heard": (
        asks_for_nothing,
        lambda: test_a_cache_that_is_asked_for_is_the_unpatched_one("qwen3", truncated),
    ),
    "None in the place of a cache": (
        lambda patch: patch.setattr(wrappers, "with_absent_cache", lambda output: output),
        lambda: test_a_cache_that_the_config_alone_asks_for_streams_and_raises_when_it_is_used(
            truncated
        ),
    ),
    "checkpointing makes caches": (
        lambda patch: [
            patch.setattr(
                module, "names_cache", lambda model, kwargs: bool(kwargs.get("use_cache"))
            )
            for module in (state, causal_lm, wrappers)
        ],
        lambda: test_under_checkpointing_there_is_none_unpatched_either({"use_cache": True}),
    ),
    "a model around has asked": (
        lambda patch: patch.setattr(wrappers, "fills_in_defaults", lambda model: False),
        test_a_model_around_that_hands_on_its_config_has_not_asked,
    ),
}


@needs_defaults
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(mutant, monkeypatch):
    change, test = MUTANTS[mutant]
    change(monkeypatch)
    with pytest.raises((AssertionError, NoCacheError, CheckpointError, pytest.fail.Exception)):
        test()
