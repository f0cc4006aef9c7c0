"""The part of a step that one of several devices takes, against the count of a model that has only
this device's layers.

covers: planner/device_parts.py, planner/auto.py, layer/arguments.py
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch

from streambp.offload.costs import Cost, LayerCost
from streambp.planner import auto, device_parts
from streambp.planner.layer_costs import observed_layer_costs
from streambp.planner.skeleton import Skeleton
from streambp.planner.step import EMBEDDING_BACKWARD
from streambp.planner.survey import streamed_recipe, survey
from tests.planner.test_default_choice import config_of

DEVICES = [torch.device("meta", number) for number in range(3)]
HEAD_PHASES = ("head", "head backward")
EMBEDDING_PHASES = ("embedding", EMBEDDING_BACKWARD)
# tokens of a row, tokens of a chunk, and the fraction of gradients that exist before
STEPS = (16384, 65536), (2048, 8192), (0.0, 1.0)


def skeleton_of(layers):
    """A model of so many layers whose weights and activations are both seen."""
    config = config_of(24)
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    config.hidden_size, config.intermediate_size, config.vocab_size = 512, 1536, 16384
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 2, 64
    return Skeleton(config, torch.bfloat16, None, 16, "cuda")


def method_of(skeleton):
    return survey(skeleton, [streamed_recipe()], tree=False).methods[0]


@functools.cache
def stage(layers, first, last):
    """Costs of a model with `layers` layers that is a stage: with or without the embedding and the
    head."""
    skeleton = skeleton_of(layers)
    if not last:  # the gradients of the head are elsewhere
        for module in (skeleton.model.model.norm, skeleton.model.lm_head):
            module.requires_grad_(False)
    method = method_of(skeleton)
    left_out = (() if first else EMBEDDING_PHASES) + (() if last else HEAD_PHASES)
    fields = {
        name: tuple(phase for phase in getattr(method, name) if phase.name not in left_out)
        for name in ("first", "accumulating")
    }
    return auto.StepNeed(dataclasses.replace(method, **fields))


@pytest.fixture(scope="module")
def model_parts():
    """A model of six layers: its need, its layers' costs, and its parts."""
    skeleton = skeleton_of(6)
    model = skeleton.model
    costs, _ = observed_layer_costs(skeleton_of(6), auto.StreamConfig(), range(6))
    return model, costs, method_of(skeleton_of(6))


def need_of(model_parts, split):
    """The need of a model whose layers are split like this, and its layers' costs."""
    model, costs, method = model_parts
    layers = dict(enumerate(model.model.layers))
    devices = [DEVICES[number] for number, count in enumerate(split) for _ in range(count)]
    modules = [
        (model.model.embed_tokens, DEVICES[0]),
        (model.model.norm, DEVICES[len(split) - 1]),
        (model.lm_head, DEVICES[len(split) - 1]),
        *zip(layers.values(), devices, strict=True),
    ]
    places = {id(p): device for module, device in modules for p in module.parameters()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_parts, "device_of", lambda p: places[id(p)])
        layout = device_parts.find_layout(model, layers)
    costs = {i: costs[i]._replace(device=device, arguments=0.0) for i, device in enumerate(devices)}
    return auto.StepNeed(method, layout=layout), costs


@pytest.mark.full
@pytest.mark.parametrize("split", ["2, 4", "3, 3", "2, 1, 3"])
def test_a_devices_part_is_what_its_layers_alone_would_take(split, model_parts):
    split = [int(count) for count in split.split(",")]
    need, costs = need_of(model_parts, split)
    start = 0
    for number, count in enumerate(split):
        part = need.on_device(DEVICES[number], costs)
        ends = number == 0, number == len(split) - 1
        for step in itertools.product(*STEPS):
            expected = dict(stage(count, *ends).bytes_by_layer(*step))
            actual = dict(part.bytes_by_layer(*step))
            for index, size in expected.items():
                own_index = index + start if 0 <= index < math.inf else index
                # a device without the first layer takes the gradient of its input as well
                assert size * (1 - 1e-6) <= actual[own_index] <= 1.06 * size, (number, index, step)
        start += count


def test_one_device_takes_the_whole_step(model_parts):
    model, _, _ = model_parts
    assert device_parts.find_layout(model, dict(enumerate(model.model.layers))) is None


def test_copies_of_arguments_count_on_other_devices_than_the_inputs():
    cost = LayerCost(DEVICES[1], Cost(x=100.0), 0.0, 10, 10, 1, arguments=30.0)
    assert cost.held_bytes(20, DEVICES[0]) == 260.0
    assert cost.held_bytes(20, DEVICES[1]) == 200.0
