"""A decoder layer's own forward on the instance is part of what the layer computes, whoever comes
first.

covers: foreign.py, instance_forward.py
"""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch

import streambp
from streambp import foreign
from tests import zoo
from tests.families import build, make_batch
from tests.model.test_contract import CONFIG
from tests.oracle import gradients, worst_error
from tests.versions import HYBRID_PATHS

pytestmark = pytest.mark.usefixtures("float64_oracle")


def halved(output, factor=0.5):
    return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor


def closure(layer):
    real_forward = layer.forward
    return lambda *args, **kwargs: halved(real_forward(*args, **kwargs))


def wrapped(layer):
    real_forward = layer.forward

    @functools.wraps(real_forward)
    def around(*args, **kwargs):
        return halved(real_forward(*args, **kwargs))

    return around


def bound(layer):
    def forward(self, hidden_states, **kwargs):
        return halved(type(self).forward(self, hidden_states * 1.5, **kwargs))

    return types.MethodType(forward, layer)


def partial(layer):
    def forward(real_forward, factor, hidden_states, attention_mask=None, **kwargs):
        return halved(real_forward(hidden_states, attention_mask=attention_mask, **kwargs), factor)

    return functools.partial(forward, layer.forward, 3.0)


def replace_forward(model, kind):
    layers = getattr(model, "model", None) or model.transformer
    layers = getattr(layers, "layers", None) or layers.h
    layers[1].forward = kind(layers[1])
    return model


KINDS = (closure, wrapped, bound, partial)


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("kind", "order", "family"),
    [
        pytest.param(
            kind,
            order,
            family,
            marks=() if f == 0 or number % 4 == 2 * order_index + f - 1 else pytest.mark.full,
        )
        for number, kind in enumerate(KINDS)
        for order_index, order in enumerate(["before", "after"])
        for f, family in enumerate(["qwen3", "gptj", "lfm2"])
    ],
)
def test_a_forward_on_the_instance_is_computed_in_chunks(kind, order, family):
    make = (
        (lambda: build(family, torch.float64)) if family == "qwen3" else lambda: zoo.build(family)
    )
    batch = make_batch("left-padded")
    _, expected = gradients(replace_forward(make(), kind), **batch)
    if order == "before":
        ours = streambp.patch(replace_forward(make(), kind), CONFIG)
    else:
        ours = replace_forward(streambp.patch(make(), CONFIG), kind)
    for _ in range(2):
        assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-10
    expected_paths = HYBRID_PATHS if family == "lfm2" else {"streams"}
    assert {layer.path for layer in streambp.describe(ours).layers} == expected_paths
    if order == "before":
        assert worst_error(gradients(streambp.unpatch(ours), **batch)[1], expected) == 0


def test_a_forward_on_the_instance_of_a_layer_that_runs_whole():
    def shifts(layer):
        real_forward = layer.forward
        return lambda hidden_states, **kwargs: real_forward(
            hidden_states + torch.roll(hidden_states, 1, 1), **kwargs
        )

    batch = make_batch("plain")
    _, expected = gradients(replace_forward(build("qwen3", torch.float64), shifts), **batch)
    ours = streambp.patch(replace_forward(build("qwen3", torch.float64), shifts), CONFIG)
    assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-10
    assert [layer.path for layer in streambp.describe(ours).layers] == ["streams", "checkpoints"]


def test_a_copy_runs_its_own_layers():
    """A bound method is bound to the copy's layer; a closure would hold the original's, unpatched
    as well."""
    ours = streambp.patch(replace_forward(build("qwen3", torch.float64), bound), CONFIG)
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    batch = make_batch("plain")
    expected = gradients(streambp.unpatch(copy.deepcopy(twin)), **batch)[1]
    assert worst_error(gradients(twin, **batch)[1], expected) <= 1e-10
    assert worst_error(gradients(ours, **batch)[1], expected) > 1e-3


def compiled(layer):
    return torch.compile(layer.forward, backend="eager")


def test_a_compiled_forward_stays_eager():
    batch = make_batch("plain")
    _, expected = gradients(build("qwen3", torch.float64), **batch)
    model = replace_forward(build("qwen3", torch.float64), compiled)
    ours = streambp.patch(model, CONFIG)
    assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-10
    around = wrapped(streambp.unpatch(ours).model.layers[1])
    # copied by functools.wraps: it is the forward inside
    assert hasattr(around, "_torchdynamo_orig_callable")
    assert foreign.eager_forward(around) is around
