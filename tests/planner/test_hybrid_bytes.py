"""Bytes a token of one layer's backward beyond its input, counted on meta between T = 128k and 256k
on real shapes of layers with states, by their kernels' memory; plain checkpointing's beside them
(`-s -m ""` prints all ten).

A streamed layer holds its incoming gradient, its input's, and one start state a chunk. One that
attends as well holds keys, values and their gradients in float32, and the rotary angles that it is
called with.

covers: admission/stacks.py, layer/saved_tensors.py, planner/mixers.py, planner/step.py,
recurrent/states.py
"""

from __future__ import annotations

import contextlib
import gc
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoModel

import streambp
from streambp.admission.stacks import find_stacks
from streambp.layer.saved_tensors import SavedForBackward
from streambp.planner.count import StepCount
from streambp.planner.mixers import replace_mixers
from streambp.planner.step import fused_attention
from streambp.recurrent.states import StateCache
from tests.layer.test_bytes import Source
from tests.planner.shapes import one_layer
from tests.versions import needs_states

pytestmark = needs_states

LENGTHS = (128 * 1024, 256 * 1024)
CHUNK = 8192
KB = 1024
SHAPES = one_layer()
FAST_CASES = ("Qwen3.5-9B", "Nemotron-H-8B")
# K and V of two heads with gradients, cos and sin
ATTENTION_BYTES = {"Falcon-H1-7B": 2 * 2 * 128 * (2 + 4) + 2 * 128 * 2}


@pytest.fixture(autouse=True)
def no_garbage_collection():
    """What waits for the collector would look as if it were freed, or not, by chance."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def build(name):
    """The backbone with its one layer, without a norm behind it."""
    with torch.device("meta"):
        model = AutoModel.from_config(SHAPES[name], dtype=torch.bfloat16).train()
    for child in [child for child, _ in model.named_children() if "norm" in child]:
        setattr(model, child, nn.Identity())
    return model


def backward_peak(model, length, streams):
    """Bytes beyond the layer's input, and beyond the states of a chunk."""
    (layer,) = find_stacks(model).stacks[0].layers
    inputs = []
    layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.device("meta"), replace_mixers(model, "kernels"), contextlib.ExitStack() as stack:
        if not streams:
            stack.enter_context(fused_attention(model))
        x = torch.empty(
            1, length, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True
        )
        with StepCount(None) as count:
            loss = Source.apply(model(inputs_embeds=x, use_cache=False).last_hidden_state)
            storage = inputs.pop().untyped_storage()
            # by the embedding's multiplier
            scaled = 0 if storage._cdata == x.untyped_storage()._cdata else storage.nbytes()
            count.reset_peak()
            loss.backward()
    model.zero_grad(set_to_none=True)
    return count.peak - scaled


def slope(name, streams):
    """KB a token, and those of the states that chunks start from."""
    states = []

    def keep(self, chunk, layer_states, real=SavedForBackward.keep_states):
        states.append(sum(state.nbytes for state in layer_states.values()))
        real(self, chunk, layer_states)

    model = build(name)
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        patched.setattr(SavedForBackward, "keep_states", keep)
        if streams:
            streambp.patch(model, streambp.StreamConfig(chunk_size=CHUNK))
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        short, long = (backward_peak(model, length, streams) for length in LENGTHS)
    return (long - short) / (LENGTHS[1] - LENGTHS[0]), max(states, default=0) / CHUNK


@pytest.mark.fast("Nemotron-H-8B")
@pytest.mark.parametrize(
    "name",
    [name if name in FAST_CASES else pytest.param(name, marks=pytest.mark.full) for name in SHAPES],
)
def test_a_layers_backward_grows_by_its_gradients_and_states(name):
    hidden = 2 * SHAPES[name].hidden_size
    streamed, states = slope(name, True)
    plain, _ = slope(name, False)
    bound = 1.05 * (2 * hidden + states) + ATTENTION_BYTES.get(name, 0)
    print(
        f"{name}: hidden {hidden / KB:.1f}, states {states / KB:.2f}, streamed {streamed / KB:.2f} "
        f"of at most {bound / KB:.2f}, checkpointed {plain / KB:.1f} KB a token"
    )
    assert states > 0
    assert hidden < streamed <= bound
    assert plain > 8 * streamed


def check_views_are_seen(name="Bamba-9B"):
    """End states that are views keep the chunk's whole convolution input: one convolution's width a
    token."""
    streamed, states = slope(name, True)
    hidden = 2 * SHAPES[name].hidden_size
    assert streamed <= 1.05 * (2 * hidden + states)


def test_states_that_are_views_are_seen(monkeypatch):
    real = StateCache.update_conv_state

    def view(self, conv_states, layer_idx, *args, **kwargs):
        joined = real(self, conv_states, layer_idx, *args, **kwargs)
        key, state = next(
            (key, state) for key, state in self.end_states.items() if key.kind == "conv"
        )
        self.end_states[key] = joined[..., -state.shape[-1] :]
        return joined

    monkeypatch.setattr(StateCache, "update_conv_state", view)
    with pytest.raises(AssertionError):
        check_views_are_seen()
