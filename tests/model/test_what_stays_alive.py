"""A patch keeps nothing alive, and a copied part of what was patched has that part alone.

covers: instance_forward.py, model/state.py, model/installed_patch.py, model/patching.py
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import streambp
from streambp import instance_forward
from streambp.model import installed_patch
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error

pytestmark = pytest.mark.usefixtures("float64_oracle")
CONFIGS = {
    "chunks": streambp.StreamConfig(chunk_size=5),
    "defaults": streambp.StreamConfig(),
    "offload": streambp.StreamConfig(chunk_size=5, saves=("attn_out", "kv"), offload="cpu"),
    "weights": streambp.StreamConfig(chunk_size=5, saves=(), weights="cpu"),
}


class Engine(nn.Module):
    """Holds a model and what cannot be copied, as DDP and DeepSpeed's engine do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def __deepcopy__(self, memo):
        raise AttributeError("_parameters")

    def __reduce_ex__(self, protocol):
        raise AttributeError("_parameters")


class TwoModels(nn.Module):
    """A policy and another model, as TRL's PPO wraps them."""

    def __init__(self, module, second):
        super().__init__()
        self.module, self.second = module, second


def with_adapters(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )


WRAPPERS = {
    "engine": lambda model: (Engine(model), model),
    "engine around an engine": lambda model: (Engine(Engine(model)), model),
    "wrapper": lambda model: (nn.Sequential(model), model),
    "two models": lambda model: (TwoModels(model, build("qwen3", torch.float64)), model),
    "adapters": lambda model: ((wrapped := with_adapters(model)), wrapped.get_base_model()),
    "adapters in an engine": lambda model: (Engine(wrapped := with_adapters(model)), wrapped),
}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


def layers_alive():
    """All decoder layers of the process; what earlier tests left may go at any time."""
    gc.collect()
    return weakref.WeakSet(o for o in gc.get_objects() if type(o).__name__.endswith("DecoderLayer"))


def count_new(layers_before):
    return len(layers_alive() - layers_before)


def streams(model):
    return {layer.path for layer in streambp.describe(model).layers} == {"streams"}


def check(around, config, how):
    layers_before = layers_alive()
    wrapper, inner = WRAPPERS[around](build("llama", torch.float64))
    stock = copy.deepcopy(inner)
    batch = make_batch("plain")
    _, expected = gradients(stock, **batch)
    layers = count_new(layers_before)
    streambp.patch(wrapper, CONFIGS[config])
    _, grads = gradients(inner, **batch)
    assert worst_error(grads, expected) <= 1e-10
    inner.zero_grad()
    # A copy of the inner model is that model, patched as it is.
    twin = COPIES[how](inner)
    assert not any(
        isinstance(o, Engine) and o is not wrapper and o not in wrapper.modules()
        for o in gc.get_objects()
    )
    assert count_new(layers_before) - layers == 2
    assert installed_patch.is_patched(twin)
    _, grads = gradients(twin, **batch)
    assert worst_error(grads, expected) <= 1e-10
    assert streams(twin)
    streambp.unpatch(twin)
    assert not installed_patch.is_patched(twin)
    _, grads = gradients(twin, **batch)
    assert worst_error(grads, expected) <= 1e-10
    # Nothing but the program keeps what was given to `patch`.
    wrapper_refs = [
        weakref.ref(module) for module in wrapper.modules() if module not in set(inner.modules())
    ]
    del wrapper, twin, stock
    gc.collect()
    assert not any(ref() is not None for ref in wrapper_refs)
    _, grads = gradients(inner, **batch)
    assert worst_error(grads, expected) <= 1e-10
    assert streams(inner)
    assert count_new(layers_before) == 2
    streambp.patch(inner, CONFIGS["chunks"])
    streambp.unpatch(inner)
    assert not installed_patch.is_patched(inner)
    assert not any("forward" in module.__dict__ for module in inner.modules())


@pytest.mark.fast(6)
@pytest.mark.parametrize("around", WRAPPERS)
def test_a_copied_part_has_that_part_alone(around):
    check(around, "chunks", "deepcopy")


@pytest.mark.full
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("around", WRAPPERS)
def test_each_setting(around, config, how):
    check(around, config, how)


def test_two_models_are_copied_together():
    pair = TwoModels(build("llama", torch.float64), build("qwen3", torch.float64))
    streambp.patch(pair, CONFIGS["chunks"])
    twin = copy.deepcopy(pair)
    del pair
    gc.collect()
    assert streams(twin)
    assert len(streambp.describe(twin).layers) == 4
    streambp.unpatch(twin)
    assert not installed_patch.is_patched(twin)


class Strong:
    """A reference that keeps what it refers to."""

    def __init__(self, item):
        self.item = item

    def __call__(self):
        return self.item


@pytest.mark.parametrize("around", ["engine", "two models"])
def test_mutant_references_that_keep(around, monkeypatch):
    monkeypatch.setattr(instance_forward, "weakref", SimpleNamespace(ref=Strong))
    monkeypatch.setattr(
        instance_forward.WeakSequence,
        "__reduce__",
        lambda self: (instance_forward.WeakSequence, (list(self),)),
    )
    monkeypatch.setattr(
        instance_forward.PatchedModuleRef,
        "__reduce__",
        lambda self: (instance_forward.PatchedModuleRef, (self(),)),
    )
    with pytest.raises((AssertionError, AttributeError)):
        check(around, "chunks", "deepcopy")
