"""What layers, forwards and hooks keep without a graph is what they keep unpatched, in training and
in evaluation.

covers: admission/kept_values.py, fingerprint/holders.py, fingerprint/memory.py
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import itertools
import queue
import threading
import time
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

import streambp
from streambp.admission import entry, kept_values
from streambp.errors import UnsupportedModelError
from streambp.fingerprint import memory
from streambp.layer import function
from streambp.model import wrappers
from tests import zoo
from tests.families import build, make_batch
from tests.oracle import worst_error
from tests.tiers import thinned

pytestmark = pytest.mark.usefixtures("float64_oracle")
LENGTH = 31
CONFIG = streambp.StreamConfig(chunk_size=5)
STORED_VALUES: dict = {}
SETTINGS = types.SimpleNamespace(deep={"recorder": types.SimpleNamespace(on=True)})


def paths(model):
    return [layer.path for layer in streambp.describe(model).layers]


def copy_of(out):
    return out.detach().clone()


# Ways to keep what passes: each puts a recorder on a layer, and gives what reads it.


def attribute(layer):
    def hook(module, args, out):
        module.store = copy_of(out)

    layer.mlp.register_forward_hook(hook)
    return lambda: layer.mlp.store


def attribute_of_a_module_inside(layer):
    def hook(module, args, out):
        module.act_fn.store = copy_of(out)

    layer.mlp.register_forward_hook(hook)
    return lambda: layer.mlp.act_fn.store


def cell(layer):
    store = None

    def hook(module, args):
        nonlocal store
        store = copy_of(args[0])

    layer.mlp.register_forward_pre_hook(hook)
    return lambda: store


def entry_of_a_dict(layer):
    store = {}

    def hook(module, args, out):
        store["mlp"] = copy_of(out)

    layer.mlp.register_forward_hook(hook)
    return lambda: store["mlp"]


def end_of_a_list(layer):
    store = []
    layer.mlp.register_forward_hook(lambda module, args, out: store.append(copy_of(out)))
    return lambda: list(store)


def deque_of_the_last(layer):
    store = collections.deque(maxlen=2)
    layer.mlp.register_forward_hook(lambda module, args, out: store.append(copy_of(out)))
    return lambda: list(store)


def set_of_numbers(layer):
    store = set()
    layer.mlp.register_forward_hook(
        lambda module, args, out: store.add(round(float(out.detach().norm()), 9))
    )
    return lambda: sorted(store)


def default_argument(layer):
    def hook(module, args, out, store=[]):  # noqa: B006 - it is the idiom
        store[:] = [copy_of(out)]

    layer.mlp.register_forward_hook(
        hook := types.FunctionType(hook.__code__, globals(), argdefs=([],))
    )
    return lambda: hook.__defaults__[0][0]


def attribute_of_a_function(layer):
    def hook(module, args, out):
        hook.store = copy_of(out)

    layer.mlp.register_forward_hook(hook)
    return lambda: hook.store


def global_dict(layer):
    name = f"kept of {id(layer)}"

    def hook(module, args, out):
        STORED_VALUES[name] = copy_of(out)

    layer.mlp.register_forward_hook(hook)
    return lambda: STORED_VALUES[name]


class Recorder:
    """With what it keeps on itself."""

    __slots__ = ("store",)
    shared: dict = {}  # noqa: RUF012 - it is the idiom

    def __init__(self):
        self.store = None

    def __call__(self, module, args, out):
        self.store = copy_of(out)

    def of_class(self, module, args, out):
        type(self).shared[id(self)] = copy_of(out)


def slot_of_an_object(layer):
    layer.mlp.register_forward_hook(recorder := Recorder())
    return lambda: recorder.store


def entry_of_a_class(layer):
    layer.mlp.register_forward_hook((recorder := Recorder()).of_class)
    return lambda: Recorder.shared[id(recorder)]


def bound_by_a_partial(layer):
    def hook(store, module, args, out):
        store.out = copy_of(out)

    store = types.SimpleNamespace()
    layer.mlp.register_forward_hook(functools.partial(hook, store))
    return lambda: store.out


def value_of_a_thread(layer):
    store = threading.local()

    def hook(module, args, out):
        store.out = copy_of(out)

    layer.mlp.register_forward_hook(hook)
    return lambda: store.out


def without_gradients(layer):
    store = []

    @torch.no_grad()
    def hook(module, args, out):
        store[:] = [out.clone()]

    layer.mlp.register_forward_hook(hook)
    return lambda: store[0]


def called_by_the_hook(layer):
    store = {}

    def record(name, out):
        store[name] = copy_of(out)

    layer.mlp.register_forward_hook(lambda module, args, out: record("out", out))
    return lambda: store["out"]


def buffer_of_ones_own(layer):
    store = torch.zeros(2, LENGTH, 32, dtype=torch.float64)

    def hook(module, args, out):
        store[:, : out.shape[1]] = out.detach()

    layer.mlp.register_forward_hook(hook)
    return lambda: store.clone()


def array(layer):
    store = np.zeros((2, LENGTH, 32))

    def hook(module, args, out):
        store[:, : out.shape[1]] = out.detach().numpy()

    layer.mlp.register_forward_hook(hook)
    return lambda: store.copy()


def generator(layer):
    store = []

    def collect():
        while True:
            store.append((yield))

    collector = collect()
    next(collector)
    layer.mlp.register_forward_hook(lambda module, args, out: collector.send(copy_of(out)))
    return lambda: list(store)


def variable_of_the_context(layer):
    variable = contextvars.ContextVar("recorded", default=None)

    def hook(module, args, out):
        variable.set(copy_of(out))

    layer.mlp.register_forward_hook(hook)
    return lambda: variable.get()


def bound_append(layer):
    store = []
    append = store.append
    layer.mlp.register_forward_hook(lambda module, args, out: append(copy_of(out)))
    return lambda: list(store)


def numbers(layer):
    store = {}

    def hook(module, args, out):
        store["tokens"], store["norm"] = out.shape[1], float(out.detach().norm())

    layer.mlp.register_forward_hook(hook)
    return lambda: dict(store)


def counted_calls(layer):
    layer.mlp.calls = 0

    def hook(module, args, out):
        module.calls += 1

    layer.mlp.register_forward_hook(hook)
    return lambda: layer.mlp.calls


def running_mean(layer):
    layer.mlp.mean = torch.zeros(32, dtype=torch.float64)

    def hook(module, args, out):
        module.mean.mul_(0.9).add_(out.detach().mean((0, 1)), alpha=0.1)

    layer.mlp.register_forward_hook(hook)
    return lambda: layer.mlp.mean.clone()


def sum_of_all(layer):
    store = {"sum": 0}

    def hook(module, args, out):
        store["sum"] = store["sum"] + out.detach().sum((0, 1))

    layer.mlp.register_forward_hook(hook)
    return lambda: store["sum"]


def gradient(layer):
    store = {}

    def hook(module, grad_input, grad_output):
        store["grad"] = copy_of(grad_output[0])

    layer.mlp.register_full_backward_hook(hook)
    return lambda: store.get("grad")


def gradient_of_a_tensor(layer):
    store = []

    def hook(module, args, out):
        if out.requires_grad:
            out.register_hook(lambda grad: store.append(copy_of(grad)))

    layer.mlp.register_forward_hook(hook)
    return lambda: list(store)


def instance_forward(layer):
    real_forward, store = layer.mlp.forward, []

    def forward(x):
        out = real_forward(x)
        store[:] = [copy_of(out)]
        return out

    layer.mlp.forward = forward
    return lambda: store[0]


def forward_of_the_layer(layer):
    real_forward, store = layer.forward, []

    def forward(hidden_states, **kwargs):
        store.append(hidden_states.detach().mean((0, 1)))
        return real_forward(hidden_states, **kwargs)

    layer.forward = forward
    return lambda: list(store)


def class_of_its_own(layer):
    class Recording(type(layer.mlp)):
        def forward(self, x):
            out = super().forward(x)
            if self.training or not torch.is_grad_enabled():
                self.last = copy_of(out)
            return out

    layer.mlp.__class__ = Recording
    return lambda: getattr(layer.mlp, "last", None)


def all_modules(layer):
    store = {}
    mlp = layer.mlp

    def hook(module, args, out):
        if module is mlp:
            store["out"] = copy_of(out)

    handle = nn.modules.module.register_module_forward_hook(hook)
    REMOVED_VALUES.append(handle)
    return lambda: store["out"]


def forward_of_a_class(layer):
    mlp_class, real_forward, store = type(layer.mlp), type(layer.mlp).forward, {}

    def forward(self, x):
        store[id(self)] = x.detach().amax((0, 1))
        return real_forward(self, x)

    def put_back():
        mlp_class.forward = real_forward

    mlp_class.forward = forward
    REMOVED_VALUES.append(types.SimpleNamespace(remove=put_back))
    return lambda: store[id(layer.mlp)]


REMOVED_VALUES: list = []
STORE_FUNCTIONS = {
    way.__name__: way
    for way in (
        attribute, attribute_of_a_module_inside, cell, entry_of_a_dict, end_of_a_list, deque_of_the_last, set_of_numbers,
        default_argument, attribute_of_a_function, global_dict, slot_of_an_object, entry_of_a_class, bound_by_a_partial,
        value_of_a_thread, without_gradients, called_by_the_hook, buffer_of_ones_own, array, numbers, counted_calls,
        running_mean, sum_of_all, gradient, gradient_of_a_tensor, instance_forward, forward_of_the_layer, class_of_its_own,
        all_modules, generator, variable_of_the_context, bound_append, forward_of_a_class,
    )
}  # fmt: skip
# each token is seen once, or nothing is kept
GRAPHLESS_STORES = ("sum_of_all", "gradient", "gradient_of_a_tensor")


@pytest.fixture(autouse=True)
def _removed():
    yield
    while REMOVED_VALUES:
        REMOVED_VALUES.pop().remove()
    STORED_VALUES.clear()
    Recorder.shared.clear()


def train(model, seed=0):
    model.train()
    model.zero_grad()
    model(**make_batch("plain", LENGTH, seed=seed), use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def evaluate(model, seed=0):
    model.eval()
    with torch.no_grad():
        loss = model(**make_batch("plain", LENGTH, seed=seed), use_cache=False).loss
    return {"loss": loss}


STEPS = {
    "train": (train, train),
    "evaluate": (evaluate, evaluate),
    "both": (train, evaluate, train),
}


def assert_same(expected, actual):
    if isinstance(expected, torch.Tensor | np.ndarray):
        assert tuple(expected.shape) == tuple(actual.shape)
        torch.testing.assert_close(
            torch.as_tensor(expected), torch.as_tensor(actual), rtol=1e-9, atol=1e-12
        )
    elif isinstance(expected, dict | list):
        assert len(expected) == len(actual)
        pairs = (
            zip(expected.values(), actual.values(), strict=True)
            if isinstance(expected, dict)
            else zip(expected, actual, strict=True)
        )
        for pair in pairs:
            assert_same(*pair)
    elif isinstance(expected, float):
        assert expected == pytest.approx(actual, rel=1e-9)
    else:
        assert expected == actual


def check(way, steps, when="before"):
    models, readers = [build("qwen3", torch.float64) for _ in range(2)], []
    results = [[], []]
    for index, model in enumerate(models):
        patched = functools.partial(streambp.patch, model, CONFIG) if index else list
        if when != "before":
            patched()
        if when == "later":
            for step in dict.fromkeys(steps):
                step(model)
        readers.append(way(model.model.layers[1]))
        if when == "before":
            patched()
        for number, step in enumerate(steps):
            gradients = step(model, number)
            results[index].append((gradients, copy.deepcopy(readers[-1]())))
        while REMOVED_VALUES:
            REMOVED_VALUES.pop().remove()
    for (expected, expected_values), (gradients, ours) in zip(*results, strict=True):
        assert worst_error(gradients, expected) <= 1e-10
        assert_same(expected_values, ours)
    return models[1]


@pytest.mark.fast(12)
@pytest.mark.parametrize(
    ("way", "steps", "when"),
    thinned(
        itertools.product(STORE_FUNCTIONS, STEPS, ["before", "after", "later"]),
        lambda way, steps, when: (
            (steps, when) in (("train", "before"), ("both", "later"), ("evaluate", "after"))
        ),
    ),
)
def test_what_is_kept_is_what_the_unpatched_model_keeps(way, steps, when):
    model = check(STORE_FUNCTIONS[way], STEPS[steps], when)
    streams = steps == "evaluate" and way in GRAPHLESS_STORES
    # it stands around ours, and sees the whole
    streams |= way == "forward_of_the_layer" and when != "before"
    assert paths(model)[1] == ("streams" if streams else "checkpoints")


# Switched on between two steps.


def by_a_closure(layer):
    on, store = False, []

    def hook(module, args, out):
        if on:
            store[:] = [copy_of(out)]

    def switch():
        nonlocal on
        on = True

    layer.mlp.register_forward_hook(hook)
    return switch, lambda: store


def by_an_attribute(layer):
    layer.mlp.mode, layer.mlp.store = "off", None

    def hook(module, args, out):
        if module.mode == "record":
            module.store = copy_of(out)

    layer.mlp.register_forward_hook(hook)
    return lambda: setattr(layer.mlp, "mode", "record"), lambda: layer.mlp.store


def by_a_global(layer):
    store = []

    def hook(module, args, out):
        if SETTINGS.deep["recorder"].on:
            store.append(copy_of(out))

    SETTINGS.deep["recorder"].on = False
    layer.mlp.register_forward_hook(hook)
    return lambda: setattr(SETTINGS.deep["recorder"], "on", True), lambda: list(store)


def by_an_object(layer):
    class Inner:
        target = None

    class Outer:
        def __init__(self):
            self.inner = {"first": [Inner()]}

        def record(self, module, args):
            if self.inner["first"][0].target is not None:
                self.inner["first"][0].target["x"] = copy_of(args[0])

    outer = Outer()
    layer.mlp.register_forward_pre_hook(outer.record)
    return lambda: setattr(
        outer.inner["first"][0], "target", {}
    ), lambda: outer.inner["first"][0].target


def by_a_length(layer):
    """No look sees it, and a trial is shorter."""
    switch, store = queue.SimpleQueue(), []

    def hook(module, args, out):
        if not switch.empty() and len(store) < 1:
            store.append(copy_of(out))

    layer.mlp.register_forward_hook(hook)
    return lambda: switch.put(1), lambda: list(store)


def by_the_number_of_calls(layer):
    """It records what has a certain name."""
    state = {"name": "warm up", "kept": {}}
    real_forward = layer.mlp.forward

    def forward(x):
        if state["name"].startswith("record"):
            state["kept"][state["name"]] = x.detach().norm(dim=-1)
        return real_forward(x)

    layer.mlp.forward = forward
    return lambda: state.update(name="record 1"), lambda: state["kept"]


SWITCHES = {way.__name__: way for way in (
    by_a_closure, by_an_attribute, by_a_global, by_an_object, by_the_number_of_calls
)}  # fmt: skip


@pytest.mark.parametrize("step", [train, evaluate])
def test_a_switch_out_of_sight(step):
    """One step raises; from then on it is exact."""
    models = [build("qwen3", torch.float64) for _ in range(2)]
    results = []
    for index, model in enumerate(models):
        switch, read = by_a_length(model.model.layers[1])
        if index:
            streambp.patch(model, CONFIG)
        step(model)
        switch()
        if index:
            with pytest.raises(
                streambp.StreamBPError, match=r"stores values of single chunks \(store"
            ):
                step(model)
            _, hook = model.model.layers[1].mlp._forward_hooks.popitem()
            hook.__closure__[0].cell_contents.clear()
            model.model.layers[1].mlp.register_forward_hook(hook)
        results.append((step(model), read()))
    (expected, expected_values), (gradients, ours) = results
    assert worst_error(gradients, expected) <= 1e-10
    assert_same(expected_values, ours)


@pytest.mark.fast(12)
@pytest.mark.parametrize("step", [train, evaluate])
@pytest.mark.parametrize("way", SWITCHES)
def test_a_recorder_that_is_switched_on_later(way, step):
    models = [build("qwen3", torch.float64) for _ in range(2)]
    results = []
    for index, model in enumerate(models):
        switch, read = SWITCHES[way](model.model.layers[1])
        if index:
            streambp.patch(model, CONFIG)
        first = [step(model, number) for number in range(2)]
        if index:
            assert paths(model) == ["streams", "streams"]
        switch()
        results.append([(gradients, None) for gradients in first])
        for number in range(2):
            gradients = step(model, number)
            results[-1].append((gradients, copy.deepcopy(read())))
    for (expected, expected_values), (gradients, ours) in zip(*results, strict=True):
        assert worst_error(gradients, expected) <= 1e-10
        assert_same(expected_values, ours)
    assert paths(models[1]) == ["streams", "checkpoints"]
    assert kept_values.REASON_STORED_VALUES in streambp.describe(models[1]).layers[1].reason


# Routes that are recorded in one call and replayed in others.


def recorded_whole(store, index, top):
    store[index] = top


def replayed_whole(store, index, top):
    return store[index] if index in store and len(store[index]) == len(top) else top


def recorded_as_array(store, index, top):
    store[index] = top.numpy().copy()


def replayed_from_array(store, index, top):
    return (
        torch.from_numpy(store[index]) if index in store and len(store[index]) == len(top) else top
    )


def recorded_by_row(store, index, top):
    store[index] = [row.clone() for row in top.view(2, -1, top.shape[-1])]


def replayed_by_row(store, index, top):
    rows = store.get(index, [])
    return torch.cat(rows) if sum(map(len, rows)) == len(top) else top


MODULE_STORES = {
    "tensor": (recorded_whole, replayed_whole),
    "array": (recorded_as_array, replayed_from_array),
    "rows": (recorded_by_row, replayed_by_row),
}


def replaying(model, store, signal):
    """Puts a forward on each router. told: "mode" has the mode in a string, "grad" replays where
    there are gradients, "flag" where an attribute of the model's config says so."""
    record, replay = MODULE_STORES[store]
    state = {"mode": "off", "kept": {}}

    def router(gate, index):
        def forward(hidden_states):
            hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
            logits = F.linear(hidden_states, gate.weight)
            probs = logits.softmax(-1)
            top = probs.topk(2).indices  # [B * T, k]
            mode = state["mode"]
            if signal == "grad" and mode != "off":
                mode = "replay" if torch.is_grad_enabled() else "record"
            if mode == "record":
                record(state["kept"], index, top)
            elif mode == "replay":
                top = replay(state["kept"], index, top)
            return logits, probs.gather(-1, top), top

        gate.forward = forward

    for index, layer in enumerate(model.model.layers):
        router(layer.mlp.gate, index)
    return state


def check_replay(store, signal, when):
    models, results = [zoo.build("qwen3_moe") for _ in range(2)], []
    for index, model in enumerate(models):
        state = replaying(model, store, signal) if when != "after" else None
        if index:
            streambp.patch(model, CONFIG)
        state = state or replaying(model, store, signal)
        if when == "later":
            train(model, 3)
        state["mode"] = "record"
        results.append([evaluate(model, 1), copy.deepcopy(state["kept"])])
        state["mode"] = "replay"
        for _ in range(2):  # as updates between them do, which make other routes
            results[-1].append(train(model, 1))
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.mlp.gate.weight.neg_()
    (loss, expected_values, *expected), (our_loss, our_kept, *gradients) = results
    assert_same(loss, our_loss)
    assert_same(expected_values, our_kept)
    for expected_grads, grads in zip(expected, gradients, strict=True):
        assert worst_error(grads, expected_grads) <= 1e-10
    assert set(paths(models[1])) == {"checkpoints"}


@pytest.mark.fast(9)
@pytest.mark.parametrize(
    ("store", "signal", "when"),
    thinned(
        itertools.product(MODULE_STORES, ["mode", "grad"], ["before", "after", "later"]),
        lambda store, signal, when: store == "tensor" or (signal, when) == ("mode", "before"),
    ),
)
def test_routes_that_are_replayed(store, signal, when):
    """Where the weights are those of the record, live routes are the same, and a trial of these
    tokens tells nothing."""
    check_replay(store, signal, when)


def test_weights_of_attention_are_refused_by_name():
    """Streamed layers make none, whole or in chunks."""
    model, store = build("qwen3", torch.float64), {}
    model.set_attn_implementation("eager")

    def hook(module, args, out):
        if out[1] is not None:
            store["weights"] = copy_of(out[1])

    model.model.layers[1].self_attn.register_forward_hook(hook)
    streambp.patch(model, CONFIG)
    with pytest.raises(UnsupportedModelError, match=r"such as attention weights: .*\['weights'\]"):
        train(model)
    assert store == {}
    model(**make_batch("plain", LENGTH), output_attentions=True, use_cache=False).loss.backward()
    assert store["weights"].shape[-2:] == (LENGTH, LENGTH)


def check_out_of_sight():
    """A hook puts what it sees into a queue: the trial's stay there, and the layer runs whole."""
    models, queues = (
        [build("qwen3", torch.float64) for _ in range(2)],
        [queue.SimpleQueue() for _ in range(2)],
    )
    for model, records in zip(models, queues, strict=True):
        model.model.layers[1].mlp.register_forward_hook(
            lambda m, args, out, record=records.put: record(copy_of(out))
        )
    streambp.patch(models[1], CONFIG)
    for model, records in zip(models, queues, strict=True):
        evaluate(model)
        while not records.empty():
            last = records.get()
        assert last.shape == (2, LENGTH, 32)
    assert paths(models[1]) == ["streams", "checkpoints"]


def test_what_is_kept_out_of_sight():
    check_out_of_sight()


# What streams as before.


class Adding:
    """What K-FAC and calibration add up, where a recomputation has its graph."""

    def __init__(self):
        self.tokens, self.product = 0, 0

    def forward(self, module, args, out):
        if torch.is_grad_enabled():
            x = args[0].detach().flatten(0, -2)
            self.tokens, self.product = self.tokens + len(x), self.product + x.T @ x

    def backward(self, module, grad_input, grad_output):
        self.product = self.product + grad_output[0].square().sum()


def test_sums_over_tokens_stream():
    models, sums = [build("qwen3", torch.float64) for _ in range(2)], [Adding(), Adding()]
    for model, adding in zip(models, sums, strict=True):
        model.model.layers[1].mlp.up_proj.register_forward_hook(adding.forward)
        model.model.layers[1].mlp.up_proj.register_full_backward_hook(adding.backward)
    streambp.patch(models[1], CONFIG)
    for seed in range(2):
        expected, gradients = (train(model, seed) for model in models)
        assert worst_error(gradients, expected) <= 1e-10
        assert sums[1].tokens == sums[0].tokens
        assert_same(sums[0].product, sums[1].product)
    assert paths(models[1]) == ["streams", "streams"]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_without_code_of_others_nothing_is_looked_at(family, monkeypatch):
    looked = []
    monkeypatch.setattr(kept_values, "ReachableValues", looked.append)
    monkeypatch.setattr(kept_values, "undo_changes", looked.append)
    model = streambp.patch(build(family, torch.float64), CONFIG)
    for step in (train, evaluate, train):
        step(model)
    assert looked == []
    assert set(paths(model)) == {"streams"}


def test_a_time_is_no_difference(monkeypatch):
    """What is another at each run tells nothing."""
    model = build("qwen3", torch.float64)
    model.model.layers[1].mlp.register_forward_hook(
        lambda m, a, out: setattr(m, "ended", time.perf_counter())
    )
    streambp.patch(model, CONFIG)
    train(model)
    assert paths(model) == ["streams", "streams"]


@pytest.mark.parametrize("step", [train, evaluate])
def test_a_recorder_that_comes_after_a_warm_up(step):
    """It is told by name, and runs whole from then on."""
    models, results = [build("qwen3", torch.float64) for _ in range(2)], []
    for index, model in enumerate(models):
        if index:
            streambp.patch(model, CONFIG)
            model.train(step is train)
            with torch.set_grad_enabled(step is train):
                streambp.warm_up(model, **make_batch("plain", LENGTH), use_cache=False)
        read = end_of_a_list(model.model.layers[1])
        if index:
            with pytest.raises(
                streambp.StreamBPError, match=r"stores values of single chunks \(store"
            ):
                step(model)
            model.model.layers[1].mlp._forward_hooks.clear()
            read = end_of_a_list(model.model.layers[1])
        results.append((step(model), read()))
    (expected, expected_values), (gradients, ours) = results
    assert worst_error(gradients, expected) <= 1e-10
    assert_same(expected_values, ours)


def nothing_is_tried(monkeypatch):
    monkeypatch.setattr(entry, "why_kept", lambda call: (None, None))


def tokens_of_the_call(monkeypatch):
    """They are the call's own, of which live routes are the recorded ones."""
    monkeypatch.setattr(torch.Tensor, "neg_", lambda x: x)
    monkeypatch.setattr(kept_values, "_why_kept_before", lambda layer_state, roots: None)


def kinds_are_not_told(monkeypatch):
    monkeypatch.setattr(
        entry, "extend_kind", lambda layer_state, snapshot, kind, hidden_states: kind
    )
    monkeypatch.setattr(
        kept_values, "extend_kind", lambda layer_state, snapshot, kind, hidden_states: kind
    )


def nothing_is_out_of_sight(monkeypatch):
    monkeypatch.setattr(memory.InPlaceWrites, "shapes_outside", lambda self, memory_after: "")


def test_fsdp2_is_no_third_party_code():
    """`fully_shard` changes the layer's class: one more trial in each first step, and Linears of
    bitsandbytes, which wrap a gathered weight again in each forward, ran whole."""
    layer = build("llama").model.layers[0]
    names = {"__module__": FSDPModule.__module__}
    layer.__class__ = type("FSDPLlamaDecoderLayer", (FSDPModule, type(layer)), names)
    assert kept_values._third_party_code(layer) == []


def test_a_static_method_of_a_program_is_third_party_code(monkeypatch):
    layer = build("llama").model.layers[0]
    monkeypatch.setattr(
        type(layer.mlp), "keep", staticmethod(lambda x: STORED_VALUES.update(x=x)), raising=False
    )
    assert [path for path, _ in kept_values._third_party_code(layer)] == ["LlamaMLP.keep"]


def recomputations_leave_something(monkeypatch):
    monkeypatch.setattr(
        kept_values, "recomputation_context", lambda layer_state, snapshot: contextlib.nullcontext()
    )


def trials_leave_something(monkeypatch):
    monkeypatch.setattr(entry, "restore_stored_values", lambda call: contextlib.nullcontext())
    monkeypatch.setattr(kept_values, "undo_changes", not_undone)
    untouched = types.SimpleNamespace(rewind=lambda: None)
    monkeypatch.setattr(
        kept_values, "trial_context", lambda call: contextlib.nullcontext(untouched)
    )


@contextlib.contextmanager
def not_undone(roots):
    memory_before = memory.ReachableValues(roots)
    with memory.InPlaceWrites(memory_before) as writes:
        yield memory_before, writes


def shapes_alone(monkeypatch):
    def alike(first, second, tolerance):
        return getattr(first, "shape", None) == getattr(second, "shape", None)

    monkeypatch.setattr(kept_values, "_values_agree", alike)


def chunks_are_not_watched(monkeypatch):
    forward = dataclasses.replace(entry.CHUNK_STRATEGY, forward=function.run_forward)
    monkeypatch.setattr(
        wrappers, "stream_layer", functools.partial(entry.stream_layer, strategy=forward)
    )


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (nothing_is_tried, lambda: check(attribute, (train,))),
        (nothing_is_tried, lambda: check(end_of_a_list, (evaluate,))),
        (nothing_is_out_of_sight, lambda: check_out_of_sight()),
        (shapes_alone, lambda: check(running_mean, (evaluate,))),
        (recomputations_leave_something, lambda: check(end_of_a_list, (train,))),
        (trials_leave_something, lambda: check(counted_calls, (evaluate,))),
        (
            kinds_are_not_told,
            lambda: test_a_recorder_that_is_switched_on_later("by_a_global", evaluate),
        ),
        (tokens_of_the_call, lambda: check_replay("tensor", "mode", "before")),
        (chunks_are_not_watched, lambda: test_a_switch_out_of_sight(evaluate)),
        (chunks_are_not_watched, lambda: test_a_recorder_that_comes_after_a_warm_up(train)),
    ],
)
def test_mutants_turn_these_red(mutant, test, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, streambp.StreamBPError, pytest.fail.Exception)):
        test()
