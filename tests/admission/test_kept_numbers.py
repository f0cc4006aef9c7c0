"""Numbers of numpy, and numbers that are kept in configs, parameters, queues, arrays and text
files, are what they are unpatched; so is what is kept in some calls alone, or of the last token.

covers: fingerprint/memory.py, admission/kept_values.py
"""

from __future__ import annotations

import array
import collections
import ctypes
import io
import itertools
import queue
import types

import numpy as np
import pytest

from streambp.admission import kept_values
from streambp.fingerprint import memory
from tests.admission.test_kept_values import STEPS, check, evaluate, paths, train
from tests.tiers import thinned

pytestmark = pytest.mark.usefixtures("float64_oracle")
Memory = memory.ReachableValues


def norm(out):
    return float(out.detach().norm())


def recorder(layer, record):
    layer.mlp.register_forward_hook(lambda module, args, out: record(out))


def number_of_numpy(layer):
    store = {}
    recorder(layer, lambda out: store.update(norm=np.float32(norm(out))))
    return lambda: float(store["norm"])


def count_of_numpy(layer):
    store = {}
    recorder(layer, lambda out: store.update(positive=(out.detach().numpy() > 0).sum()))
    return lambda: int(store["positive"])


def attribute_of_the_config(layer):
    config = layer.self_attn.config
    recorder(layer, lambda out: setattr(config, "last_norm", norm(out)))
    return lambda: config.last_norm


def attribute_of_a_weight(layer):
    weight = layer.mlp.up_proj.weight
    recorder(layer, lambda out: setattr(weight, "norm_of_tokens", norm(out)))
    return lambda: weight.norm_of_tokens


def attribute_of_the_weight_in_use(layer):
    """While chunks are differentiated, other tensors are in the place of the weights."""
    weight = layer.mlp.up_proj.weight

    def hook(module, args, out):
        module.up_proj.weight.norm_of_tokens = norm(out)

    layer.mlp.register_forward_hook(hook)
    return lambda: weight.norm_of_tokens


def numbers_in_a_queue(layer):
    store = queue.Queue()
    recorder(layer, lambda out: store.put(norm(out)))
    return lambda: list(store.queue)


def numbers_in_an_array(layer):
    store = array.array("d")
    recorder(layer, lambda out: store.append(norm(out)))
    return lambda: list(store)


def bytes_in_an_array(layer):
    store = bytearray()
    recorder(layer, lambda out: store.append(out.shape[1]))
    return lambda: list(store)


def lines_of_text(layer):
    file = io.StringIO()
    recorder(layer, lambda out: print(f"{norm(out):.6f}", file=file))
    return file.getvalue


def number_of_c(layer):
    store = ctypes.c_double(0)
    recorder(layer, lambda out: setattr(store, "value", norm(out)))
    return lambda: store.value


def number_in_memory(layer):
    store = memoryview(bytearray(8)).cast("d")
    recorder(layer, lambda out: store.__setitem__(0, norm(out)))
    return lambda: store[0]


def chain_of_dicts(layer):
    store = collections.ChainMap({})
    recorder(layer, lambda out: store.__setitem__("norm", norm(out)))
    return lambda: store["norm"]


STORE_FUNCTIONS = {
    way.__name__: way
    for way in (
        number_of_numpy, count_of_numpy, attribute_of_the_config, attribute_of_a_weight,
        attribute_of_the_weight_in_use, numbers_in_a_queue,
        numbers_in_an_array, bytes_in_an_array, lines_of_text, number_of_c, number_in_memory, chain_of_dicts,
    )
}  # fmt: skip


@pytest.mark.fast(24)
@pytest.mark.parametrize(
    ("way", "steps", "when"),
    thinned(
        itertools.product(STORE_FUNCTIONS, STEPS, ["before", "after"]),
        lambda way, steps, when: (steps, when) in (("train", "before"), ("evaluate", "after")),
    ),
)
def test_what_is_kept_is_what_the_unpatched_model_keeps(way, steps, when):
    model = check(STORE_FUNCTIONS[way], STEPS[steps], when)
    assert paths(model)[1] == "checkpoints"


def without_configs(monkeypatch):
    monkeypatch.setattr(memory, "PreTrainedConfig", types.NoneType)


def without_numpy(monkeypatch):
    real = Memory._visit

    def visit(self, path, value):
        if not isinstance(value, np.generic):
            real(self, path, value)

    monkeypatch.setattr(Memory, "_visit", visit)


MUTANTS = {
    "number_of_numpy": without_numpy,
    "count_of_numpy": without_numpy,
    "attribute_of_the_config": without_configs,
    "attribute_of_a_weight": lambda m: m.setattr(Memory, "_visit_parameter", lambda *_: None),
    "attribute_of_the_weight_in_use": lambda m: m.setattr(
        kept_values, "stored_attributes", lambda _: {}
    ),
    "numbers_in_a_queue": lambda m: m.setattr(memory, "HOLDER_TYPE_NAMES", frozenset()),
    "chain_of_dicts": lambda m: m.setattr(memory, "HOLDER_TYPE_NAMES", frozenset()),
    "numbers_in_an_array": lambda m: m.setattr(Memory, "_visit_array", lambda *_: None),
    "number_of_c": lambda m: m.setattr(Memory, "_visit_memory", lambda *_: None),
    "number_in_memory": lambda m: m.setattr(Memory, "_visit_memory", lambda *_: None),
    "lines_of_text": lambda m: m.setattr(Memory, "_visit_text", lambda *_: None),
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("way", MUTANTS)
def test_mutants_turn_these_red(way, monkeypatch):
    MUTANTS[way](monkeypatch)
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        check(STORE_FUNCTIONS[way], (train,))


# What depends on the order of chunks, and what is kept in some calls alone.


def last_token(layer):
    store = {}
    recorder(layer, lambda out: store.update(last=out[:, -1].detach().clone()))
    return lambda: store["last"]


def norm_of_the_last_token(layer):
    recorder(layer, lambda out: setattr(layer.mlp, "norm", norm(out[:, -1])))
    return lambda: layer.mlp.norm


def largest_norm(layer):
    """It seldom grows after the first step."""
    store = {"largest": 0.0}
    recorder(layer, lambda out: store.update(largest=max(store["largest"], norm(out))))
    return lambda: store["largest"]


def every_second_call(layer):
    """The number of the step is the program's."""
    step, store = {"number": 0}, {}

    def record(out):
        if step["number"] % 2 == 0:
            store["norm"] = norm(out)

    recorder(layer, record)

    def read():
        step["number"] += 1
        return dict(store)

    return read


LATER_STORES = {
    way.__name__: way
    for way in (last_token, norm_of_the_last_token, largest_norm, every_second_call)
}
THREE_STEPS = (train, train, train)


@pytest.mark.fast(4)
@pytest.mark.parametrize("way", LATER_STORES)
def test_later_steps_keep_what_the_unpatched_model_keeps(way):
    model = check(LATER_STORES[way], THREE_STEPS)
    assert paths(model)[1] == "checkpoints"


def test_the_last_token_streams_in_evaluation():
    model = check(last_token, (evaluate, evaluate))
    assert paths(model)[1] == "streams"


def recomputed_in_order(monkeypatch):
    monkeypatch.setattr(kept_values, "reversed", lambda chunks: chunks, raising=False)


def no_kind_remembers(monkeypatch):
    monkeypatch.setattr(kept_values, "_why_kept_before", lambda layer_state, roots: None)


@pytest.mark.parametrize(
    ("way", "mutant"),
    [
        ("last_token", recomputed_in_order),
        ("largest_norm", no_kind_remembers),
        ("every_second_call", no_kind_remembers),
    ],
)
def test_mutants_of_later_steps_turn_these_red(way, mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(LATER_STORES[way], THREE_STEPS)


# What a chunk has by chance.


def largest_input(layer):
    store = {}

    def hook(module, args):
        store["largest"] = float(args[0].detach().abs().max())

    layer.input_layernorm.register_forward_pre_hook(hook)
    return lambda: store["largest"]


@pytest.mark.parametrize(("step", "loudest"), [(train, 0), (evaluate, -1)])
def test_a_maximum_in_the_chunk_that_runs_last(step, loudest, monkeypatch):
    """The last one in evaluation, and the first one in a step, whose backward ends with it."""
    real = kept_values.random_like

    def random_like(x):
        tokens = real(x)
        tokens[..., loudest, :] *= 100
        return tokens

    monkeypatch.setattr(kept_values, "random_like", random_like)
    model = check(largest_input, (step, step))
    assert paths(model)[1] == "checkpoints"


@pytest.mark.parametrize(("step", "loudest"), [(train, 0), (evaluate, -1)])
def test_the_mutant_that_leaves_tokens_in_their_order(step, loudest, monkeypatch):
    monkeypatch.setattr(kept_values, "TOKEN_ROLLS", (0,))
    with pytest.raises(AssertionError):
        test_a_maximum_in_the_chunk_that_runs_last(step, loudest, monkeypatch)
