"""An exception in a checkpointed function leaves none of checkpoint's hooks behind, while the caller
refers to the exception: later steps of any model are exact.

covers: checkpoints.py, admission/layer_checkpoint.py, integrations/trl/values.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import streambp
from streambp import checkpoints
from streambp.integrations.trl.values import blockwise_values
from tests.families import LENGTH, build, make_batch
from tests.seeds import seed_torch

pytestmark = pytest.mark.usefixtures("float64_everywhere")


class MixesTokens(nn.Module):
    """Adds the mean of all tokens, so that its layer runs under checkpoint; raises on request."""

    def __init__(self, inner, error):
        super().__init__()
        self.inner, self.error, self.raises = inner, error, False

    def forward(self, hidden_states):
        output = self.inner(hidden_states)
        if self.raises:
            raise self.error
        return output + hidden_states.mean(1, keepdim=True)


class CheckpointBefore213:
    """torch's checkpoint without the cure of torch 2.13: the generator that holds the hooks is not
    closed if the function raises."""

    def __init__(self):
        self.generators = []

    def __call__(self, function, *args, use_reentrant, early_stop, **kwargs):
        hooks = torch_checkpoint._checkpoint_without_reentrant_generator(
            function, True, torch_checkpoint.noop_context_fn, "default", False, early_stop,
            *args, **kwargs,
        )  # fmt: skip
        self.generators.append(hooks)
        next(hooks)
        result = function(*args, **kwargs)
        for _ in hooks:
            raise AssertionError("checkpoint yields once")
        return result


@pytest.fixture
def before_2_13(monkeypatch):
    checkpoint = CheckpointBefore213()
    monkeypatch.setattr(checkpoints, "checkpoint", checkpoint)
    yield
    for hooks in checkpoint.generators:  # a mutant's hooks would reach other tests
        hooks.close()


@pytest.fixture
def installed():
    """torch's checkpoint as it is installed."""


def gradients(model):
    model.zero_grad(set_to_none=True)
    seed_torch(1)
    batch = make_batch("llama")
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def layer_that_raises(error):
    seed_torch(0)
    stock = build("llama").double()
    stock.model.layers[1].mlp = MixesTokens(stock.model.layers[1].mlp, error)
    config = streambp.StreamConfig(chunk_size=LENGTH // 4, unpatched_runs=False)
    return stock, streambp.patch(copy.deepcopy(stock), config)


def errors_after_an_exception(error):
    """The worst errors of an unpatched model's and of the patched model's gradients, computed after
    a step of the patched model has raised, while the exception lives."""
    stock, ours = layer_that_raises(error)
    expected = gradients(stock)
    gradients(ours)
    module = ours.model.layers[1].mlp
    assert "1 of 2 layers ran whole" in str(streambp.describe(ours))
    module.raises = True
    with pytest.raises(type(error)) as caught:
        gradients(ours)
    module.raises = False
    worst = []
    for model in (stock, ours):
        pairs = zip(gradients(model), expected, strict=True)
        worst.append(max((a - b).abs().max().item() for a, b in pairs))
    assert caught.value.__traceback__ is not None
    return worst


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), KeyboardInterrupt(), torch.OutOfMemoryError("none left")],
    ids=["error", "interrupt", "memory"],
)  # fmt: skip
@pytest.mark.parametrize("version", ["before_2_13", "installed"])
def test_a_layer_that_runs_unchunked_raises(error, version, request):
    request.getfixturevalue(version)
    assert max(errors_after_an_exception(error)) <= 1e-10


def test_the_mutant_whose_exception_passes_through_checkpoint(before_2_13, monkeypatch):
    monkeypatch.setattr(checkpoints._ErrorHolder, "__call__", passes_exceptions)
    with pytest.raises(torch_checkpoint.CheckpointError):
        errors_after_an_exception(MemoryError("none left"))


def passes_exceptions(holder, *args, **kwargs):
    return holder._function(*args, **kwargs)


class RaisesOnce(nn.Linear):
    has_raised = False

    def forward(self, states):
        if not self.has_raised:
            self.has_raised = True
            super().forward(states)
            raise MemoryError("none left")
        return super().forward(states)


def test_a_value_head_raises(before_2_13):
    seed_torch(0)
    head = RaisesOnce(8, 1).double()
    states = torch.randn(2, 12, 8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(MemoryError) as caught:
        blockwise_values(states, None, head)
    upstream = torch.randn(2, 12, dtype=torch.float64)
    streamed = torch.autograd.grad((blockwise_values(states, None, head) * upstream).sum(), states)
    expected = torch.autograd.grad((head(states)[..., 0] * upstream).sum(), states)
    assert (streamed[0] - expected[0]).abs().max() <= 1e-12
    assert caught.value.__traceback__ is not None
