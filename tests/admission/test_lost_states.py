"""Layers that lose states between chunks run whole, however little of it shows in half precision,
and so say counts.

covers: admission/stacks.py, planner/skeleton.py, recurrent/states.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.admission import entry, stacks
from streambp.admission.stacks import find_stacks
from streambp.planner.count import StepCount
from streambp.planner.skeleton import Skeleton
from streambp.recurrent.states import StateCache, StateKey
from tests import zoo
from tests.families import make_batch
from tests.oracle import gradients, relative_l2
from tests.tiers import thinned

REASON_MIXES_TOKENS = "it mixes tokens outside of its attention"
# What their mixers are: convolutions alone, Mamba 1 and 2, a delta rule, Mamba 2 and attention in
# one layer.
HYBRIDS = (
    "lfm2",
    "jamba",
    "bamba",
    "nemotron_h",
    "qwen3_next",
    "falcon_h1",
    "zamba2",
    "recurrent_gemma",
    "qwen3",
)


def verdicts(model, monkeypatch, step):
    """Which layers of a patched model stream: what its step finds out."""
    streams_by_layer = {}
    real = entry.can_stream

    def record_verdict(call):
        verdict = real(call)
        streams_by_layer[id(call.layer_state.layer)] = verdict.streams
        return verdict

    with monkeypatch.context() as patch:
        patch.setattr(entry, "can_stream", record_verdict)
        step()
    streambp.unpatch(model)
    return [
        streams_by_layer.get(id(layer), False)
        for stack in find_stacks(model).stacks
        for layer in stack.layers
    ]


def of_a_step(name, monkeypatch, dtype=torch.bfloat16):
    model = streambp.patch(zoo.build(name, dtype), streambp.StreamConfig(chunk_size=5))
    return verdicts(model, monkeypatch, lambda: gradients(model, **make_batch("plain")))


def of_a_count(name, monkeypatch):
    config = zoo.tiny_config(name)
    config._experts_implementation = None  # the eager one looks at values
    skeleton = Skeleton(config, torch.bfloat16, None, 16, "cuda")
    streambp.patch(skeleton.model, streambp.StreamConfig(chunk_size=5))

    def step():
        with skeleton.running(), StepCount(None):
            ids = torch.empty(2, 23, dtype=torch.long)
            skeleton.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return verdicts(skeleton.model, monkeypatch, step)


# One of each mixer: Mamba 2, Mamba 1, a delta rule, a recurrence, a convolution.
SIMILAR_FAMILIES = ("falcon_h1", "jamba", "qwen3_next", "recurrent_gemma", "lfm2")


@pytest.mark.fast("lfm2")
@pytest.mark.parametrize("name", thinned(HYBRIDS, lambda name: name in SIMILAR_FAMILIES))
def test_layers_stream_alike_in_half_precision_in_float64_and_in_counts(name, monkeypatch):
    by_half = of_a_step(name, monkeypatch)
    assert by_half == of_a_step(name, monkeypatch, torch.float64)
    counted = of_a_count(name, monkeypatch)
    # A layer that does not mix tokens at all may be counted whole.
    assert all(streams or not counts for streams, counts in zip(by_half, counted, strict=True))
    assert counted[0] == by_half[0]


@pytest.mark.parametrize("name", ["lfm2", "bamba", "falcon_h1"])
def test_whole_layers_are_as_near_as_the_unpatched_model(name):
    """Where a state is lost and nobody sees it, half precision's errors are several times as
    large."""
    wide, batch = zoo.build(name, torch.float32).bfloat16().float(), make_batch("plain", length=40)
    stock = copy.deepcopy(wide).to(torch.bfloat16)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=12))
    _, truth = gradients(wide, **batch)
    our_error, expected = (
        relative_l2(gradients(model, **batch)[1], truth) for model in (ours, stock)
    )
    assert our_error <= 2 * expected  # one draw; lost states give 5 and more


def lost(self, conv_states, layer_idx, state_idx=0, real=StateCache.update_conv_state, **kwargs):
    """As if the convolution started from nothing in every chunk."""
    joined = real(self, conv_states, layer_idx, state_idx, **kwargs)
    if StateKey("conv", layer_idx, state_idx) not in self.start_states:
        return joined
    width = joined.shape[-1] - conv_states.shape[-1]
    return torch.cat((torch.zeros_like(joined[..., :width]), conv_states), -1)


def is_whole(model, batch):
    gradients(model, **batch)
    layer = streambp.describe(model).layers[0]
    return layer.path == "checkpoints" and layer.reason.startswith(REASON_MIXES_TOKENS)


def test_a_state_that_is_not_read(monkeypatch):
    monkeypatch.setattr(StateCache, "update_conv_state", lost)
    assert is_whole(streambp.patch(zoo.build("lfm2", torch.bfloat16)), make_batch("plain"))
    assert not of_a_count("lfm2", monkeypatch)[0]


def test_a_convolution_whose_state_is_nowhere(monkeypatch):
    monkeypatch.setattr(stacks, "states_argument", lambda layer: None)
    for name in ("lfm2", "falcon_h1"):
        assert is_whole(streambp.patch(zoo.build(name, torch.bfloat16)), make_batch("plain"))
        assert not of_a_count(name, monkeypatch)[0]


def test_an_unread_state_in_inference_mode(monkeypatch):
    monkeypatch.setattr(StateCache, "update_conv_state", lost)
    ours = streambp.patch(zoo.build("lfm2", torch.bfloat16))
    with torch.inference_mode():
        ours(**make_batch("plain"), use_cache=False)
    layer = streambp.describe(ours).layers[0]
    assert (layer.path, layer.reason[: len(REASON_MIXES_TOKENS)]) == (
        "checkpoints",
        REASON_MIXES_TOKENS,
    )
