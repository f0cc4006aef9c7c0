"""Modules around decoder layers: refused by `patch` where they are there first, exact where they
come after it.

covers: admission/stacks.py
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

import streambp
from streambp.admission import stacks
from streambp.errors import UnsupportedModelError
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error

NO_REENTRANT = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


class TimedModule(nn.Module):
    """What a program may put around each layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


class Scaled(TimedModule):
    """With weights and modules of its own."""

    def __init__(self, layer):
        super().__init__(layer)
        self.identity, self.scale = nn.Identity(), nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, hidden_states, *args, **kwargs):
        return self.layer(self.identity(hidden_states), *args, **kwargs) * self.scale


class CheckpointedModule(TimedModule):
    def forward(self, *args, **kwargs):
        return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


WRAPPERS = {
    "checkpoint_wrapper": NO_REENTRANT,
    "a wrapper in a wrapper": lambda layer: NO_REENTRANT(TimedModule(layer)),
    "a module": TimedModule,
    "a module with weights": Scaled,
    "a module that checkpoints": CheckpointedModule,
}


def wrap(model, wrapper, is_wrapped=lambda index: True):
    layers = model.model.layers
    for index, layer in enumerate(layers):
        if is_wrapped(index):
            layers[index] = wrapper(layer)
    return model


def as_accelerate(model):
    """What accelerate's FSDP activation checkpointing does: FSDP1 and FSDP2 wrap each layer by its
    class."""
    layer_class = type(model.model.layers[0])
    apply_activation_checkpointing(
        model, NO_REENTRANT, check_fn=lambda module: isinstance(module, layer_class)
    )
    return model


@pytest.mark.parametrize("choice", ["all", "the first", "all but the first"])
@pytest.mark.parametrize("name", [*WRAPPERS, "offload_wrapper"])
def test_a_model_whose_layers_are_wrapped_is_refused(name, choice):
    is_wrapped = {
        "all": lambda i: True,
        "the first": lambda i: i == 0,
        "all but the first": lambda i: i > 0,
    }[choice]
    model = wrap(build("qwen3"), {**WRAPPERS, "offload_wrapper": offload_wrapper}[name], is_wrapped)
    outer = type(model.model.layers[1 if choice == "all but the first" else 0]).__name__
    with pytest.raises(
        UnsupportedModelError,
        match=rf"{outer} around some or all of its Qwen3DecoderLayer.*after streambp.patch",
    ):
        streambp.patch(model)
    assert not streambp.model.installed_patch.is_patched(model)
    assert "forward" not in model.model.__dict__


def test_what_accelerate_does_first_is_refused():
    with pytest.raises(UnsupportedModelError, match="CheckpointWrapper"):
        streambp.patch(as_accelerate(build("llama")))


def test_layers_of_a_model_that_transformers_does_not_checkpoint_itself(monkeypatch):
    """Known by what is inside them, as in models written outside of transformers."""

    class Block(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.self_attn, self.mlp = layer.self_attn, layer.mlp

        def forward(self, hidden_states, **kwargs):
            return hidden_states + self.mlp(
                hidden_states + self.self_attn(hidden_states, **kwargs)[0]
            )

    model = wrap(build("llama"), Block)
    assert not any(isinstance(m, GradientCheckpointingLayer) for m in model.modules())
    streambp.unpatch(streambp.patch(model))  # not wrapped
    with pytest.raises(UnsupportedModelError, match="TimedModule around some or all of its Block"):
        streambp.patch(wrap(model, TimedModule))


@pytest.mark.parametrize("name", [*WRAPPERS, "as accelerate"])
def test_wrapped_after_patch_it_is_exact(name, float64_oracle):
    wrap_layers = (
        as_accelerate
        if name == "as accelerate"
        else functools.partial(wrap, wrapper=WRAPPERS[name])
    )
    stock = build("qwen3", torch.float64)
    expected = gradients(wrap_layers(copy.deepcopy(stock)), **make_batch("left-padded"))[1]
    model = wrap_layers(streambp.patch(stock, streambp.StreamConfig(chunk_size=5)))
    grads = gradients(model, **make_batch("left-padded"))[1]
    assert worst_error(grads, expected) <= 1e-10
    assert all(layer.path == "streams" for layer in streambp.describe(model).layers)
    unpatched_model = streambp.unpatch(model)
    assert (
        worst_error(gradients(unpatched_model, **make_batch("left-padded"))[1], expected) <= 1e-10
    )


def test_without_the_look_a_first_step_breaks(monkeypatch):
    """The mutant."""
    monkeypatch.setattr(stacks, "_wrapped_layer", lambda module: None)
    model = streambp.patch(wrap(build("qwen3"), NO_REENTRANT), streambp.StreamConfig(chunk_size=5))
    with pytest.raises(UnsupportedModelError, match="without a name"):
        model(**make_batch("plain"), use_cache=False)
