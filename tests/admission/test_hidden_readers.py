"""Products that are read where no trace of saved tensors sees it must not be left out of a
recomputation.

covers: admission/trials.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import streambp
from streambp.admission import trials
from tests.distributed.one_rank import split_over_one_rank, with_shifted_labels
from tests.families import build, make_batch
from tests.model.test_contract import CONFIG, check_agree
from tests.oracle import gradients, worst_error

pytestmark = pytest.mark.usefixtures("float64_oracle")


class Product(torch.autograd.Function):
    """a * b, which keeps both by itself, as hand-written kernels' Functions do."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.factors = a, b
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.factors
        return grad * b, grad * a


def check(monkeypatch, forward):
    stock = build("qwen3", torch.float64)
    mlp = type(stock.model.layers[0].mlp)
    monkeypatch.setattr(mlp, "forward", lambda self, x, real=mlp.forward: forward(self, x, real))
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    for _ in range(2):  # the first leaves out no product
        check_agree(stock, ours, **make_batch("plain"))
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


FORWARDS = {
    "a checkpoint inside": lambda self, x, real: checkpoint(
        lambda y: real(self, y), x, use_reentrant=False
    ),
    "a Function that keeps tensors by itself": lambda self, x, real: Product.apply(
        real(self, x), x
    ),
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS.keys())
def test_hidden_readers(forward, monkeypatch):
    check(monkeypatch, forward)


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS.keys())
def test_hidden_readers_in_halves(forward, monkeypatch):
    stock = build("qwen3", torch.float64)
    mlp = type(stock.model.layers[0].mlp)
    monkeypatch.setattr(mlp, "forward", lambda self, x, real=mlp.forward: forward(self, x, real))
    batch = make_batch("plain")
    _, expected = gradients(stock, **batch)
    split_over_one_rank(monkeypatch)
    ours = streambp.patch(stock, CONFIG)
    assert worst_error(gradients(ours, **with_shifted_labels(batch))[1], expected) <= 1e-10


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS.keys())
def test_the_trace_alone_would_not_see_them(forward, monkeypatch):
    monkeypatch.setattr(trials, "same_gradients", lambda *_: True)
    with pytest.raises(AssertionError):
        check(monkeypatch, forward)
