"""Weight gradients that products add up themselves: exact wherever a weight sits and whatever else
is frozen.

covers: layer/gradients.py, layer/recompute.py
"""

from __future__ import annotations

import collections
import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import streambp
from tests.families import build, make_batch
from tests.oracle import assert_as_precise, gradients, relative_l2, worst_error


def check(stock, bar=1e-10, **settings):
    batch = make_batch("plain")
    _, expected = gradients(stock, **batch)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5, **settings))
    _, our_gradients = gradients(ours, **batch)
    assert our_gradients.keys() == expected.keys()
    assert worst_error(our_gradients, expected) <= bar
    return our_gradients


SAVES = [(), ("attn_out", "kv"), ("mlp.*",), ("mlp.down_proj", "self_attn.q_proj")]


@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize("saves", SAVES, ids=lambda saves: "+".join(saves) or "none")
def test_sums_of_products(saves):
    check(build("qwen3", torch.float64), saves=saves)


@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize(
    "trained_name", ["layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"]
)
def test_a_weight_whose_input_wants_no_gradient(trained_name):
    """Nothing before it is trained, so that it alone makes a graph."""
    stock = build("qwen3", torch.float64)
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_(name.endswith(trained_name))
    assert check(stock).keys() == {f"model.{trained_name}"}


@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize("also", ["another Linear", "an expression"])
def test_a_weight_in_two_places(also, monkeypatch):
    """Its gradient has a part that its Linears add up and, in an expression, one that autograd
    returns."""
    stock = build("qwen3", torch.float64)
    for layer in stock.model.layers:
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
    if also == "an expression":
        mlp = type(stock.model.layers[0].mlp)
        monkeypatch.setattr(
            mlp,
            "forward",
            lambda self, x, real=mlp.forward: real(self, x) * self.up_proj.weight.mean().cos(),
        )
    check(stock)


@pytest.mark.usefixtures("float64_oracle")
def test_biases_and_a_linear_that_runs_twice(monkeypatch):
    stock = build("qwen3", torch.float64)
    for layer in stock.model.layers:
        layer.mlp.gate_proj.bias = nn.Parameter(
            torch.randn(layer.mlp.gate_proj.out_features, dtype=torch.float64)
        )
    mlp = type(stock.model.layers[0].mlp)
    monkeypatch.setattr(
        mlp, "forward", lambda self, x, real=mlp.forward: real(self, x + real(self, x))
    )
    check(stock)


@pytest.mark.full
def test_gradients_under_autocast_are_as_precise_as_unpatched_ones():
    assert_as_precise(map(autocast_errors, itertools.count()))


def autocast_errors(seed):
    stock, batch = build("qwen3", seed=seed), make_batch("plain", length=128, seed=seed)
    _, truth = gradients(stock, **batch)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=17))
    with torch.autocast("cpu", torch.bfloat16):
        (_, plain), (_, our_gradients) = gradients(stock, **batch), gradients(ours, **batch)
    assert all(gradient.dtype == torch.float32 for gradient in our_gradients.values())
    return relative_l2(our_gradients, truth), relative_l2(plain, truth)


class Casts(TorchDispatchMode):
    """Counts casts of matrices to half precision, by shape."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].dim() == 2
            and kwargs.get("dtype") == torch.bfloat16
        ):
            self.counts[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_autocast_casts_a_weight_once_for_all_chunks():
    """As autocast's own cache does, which a Linear that adds up its gradient goes past. A refill
    casts k and v, too."""
    model = streambp.patch(
        build("qwen3", num_hidden_layers=1), streambp.StreamConfig(chunk_size=5, saves=())
    )
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    with torch.autocast("cpu", torch.bfloat16):
        model(**make_batch("plain"), use_cache=False).loss.backward()  # traces are over
        loss = model(**make_batch("plain"), use_cache=False).loss
    with Casts() as casts:
        loss.backward()
    expected = collections.Counter(
        tuple(m.weight.shape) for m in (*linears(attention), *linears(mlp))
    )
    expected += collections.Counter(
        tuple(m.weight.shape) for m in (attention.k_proj, attention.v_proj)
    )
    assert {shape: casts.counts[shape] for shape in expected} == expected


def linears(module):
    return [m for m in module.modules() if type(m) is nn.Linear]


def test_forwards_come_back_after_a_step_that_broke_off(monkeypatch):
    model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=5))
    act_fn, armed = type(model.model.layers[0].mlp.act_fn), []
    real = act_fn.forward

    def failing(self, x):
        if armed:
            raise ValueError("injected")
        return real(self, x)

    monkeypatch.setattr(act_fn, "forward", failing)
    loss = model(**make_batch("plain"), use_cache=False).loss
    armed.append(True)
    with pytest.raises(ValueError, match="injected"):
        loss.backward()
    assert not [
        name
        for name, m in model.named_modules()
        if type(m) is nn.Linear and "forward" in m.__dict__ and "layers" in name
    ]
