"""Subclasses of nn.Linear among `saves`: those that compute as a Linear does are saved, others keep
their own gradients.

covers: layer/products.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import streambp
from streambp.errors import ConfigError
from streambp.layer import products
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error

pytestmark = pytest.mark.usefixtures("float64_oracle")
SAVES_CONFIG = streambp.StreamConfig(chunk_size=5, saves=("mlp.*",))


class Tagged(nn.Linear):
    """Another class, and nothing else."""


class Rounded(nn.Linear):
    """As torchao's for quantisation in training: input and weight are rounded, straight through."""

    def forward(self, x):
        rounded = lambda t: t + (t.mul(8).round().div(8) - t).detach()  # noqa: E731
        return nn.functional.linear(rounded(x), rounded(self.weight), self.bias)


class Doubled(nn.Linear):
    """Its weight is not what it is stored as."""

    @property
    def weight(self):
        return self._parameters["weight"] * 2.0

    @weight.setter
    def weight(self, value):
        self._parameters["weight"] = value


def model_of(kind, names):
    model = build("llama", torch.float64)
    for layer in model.model.layers:
        for name in names:
            layer.get_submodule(name).__class__ = kind
    return model


ALL_LINEARS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("kind", "names", "saved"),
    [
        (Tagged, ALL_LINEARS, 3),
        (Rounded, ALL_LINEARS[:1], 2),
        (Doubled, ALL_LINEARS[:1], 2),
        (Rounded, ("self_attn.q_proj",), 3),
    ],
)
def test_gradients_with_saves(kind, names, saved, monkeypatch):
    saved_names = set()
    real = products.tap_linears
    monkeypatch.setattr(
        "streambp.layer.saved_tensors.tap_linears",
        lambda linears, linear_names, *args: (
            saved_names.update(linear_names) or real(linears, linear_names, *args)
        ),
    )
    batch = make_batch("left-padded")
    expected = gradients(model_of(kind, names), **batch)[1]
    ours = streambp.patch(model_of(kind, names), SAVES_CONFIG)
    assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-10
    assert len(saved_names) == saved


@pytest.mark.parametrize("kind", [Rounded, Doubled])
def test_linears_that_compute_in_their_own_way_are_named(kind):
    with pytest.raises(
        ConfigError, match=rf"compute in their own way \({kind.__name__}\).* saved: .*q_proj"
    ):
        streambp.patch(model_of(kind, ALL_LINEARS), SAVES_CONFIG)


def test_mutant_a_subclass_is_taken_for_a_linear(monkeypatch):
    monkeypatch.setattr(products, "computes_plainly", lambda module: isinstance(module, nn.Linear))
    with pytest.raises(AssertionError):
        test_gradients_with_saves(Rounded, ALL_LINEARS[:1], 2, monkeypatch)
