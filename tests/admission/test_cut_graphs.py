"""Layers whose output has no gradient: for the input, at some lengths, or because their backward
raises on a trial's tokens.

covers: admission/agreement.py, admission/own_run.py, admission/probe.py, admission/trials.py
"""

from __future__ import annotations

import functools

import pytest
import torch

import streambp
from streambp.admission import own_run, probe, trials
from streambp.admission.own_run import REASON_NO_GRADIENT, UnpatchedRun
from streambp.admission.probe import REASON_PARTIAL_GRAPH
from tests.families import LENGTH, build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error
from tests.tiers import thinned


def first_of(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def with_first(output, first):
    return first if isinstance(output, torch.Tensor) else (first, *output[1:])


def without_graph(real, x, run):
    with torch.no_grad():
        return run(x)


def detached(real, x, run):
    output = run(x)
    return with_first(output, first_of(output).detach())


def detached_input(real, x, run):
    return run(x.detach())


def long_alone(real, x, run):
    """A graph for sequences that are longer than a trial's chunks."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and x.shape[1] > probe.TRIAL_CHUNK_SIZE):
        return run(x)


def short_alone(real, x, run):
    with torch.set_grad_enabled(torch.is_grad_enabled() and x.shape[1] <= probe.TRIAL_CHUNK_SIZE):
        return run(x)


def inference(real, x, run):
    with torch.inference_mode():
        output = run(x)
    return with_first(output, first_of(output).clone())


class OfTheBatch(torch.autograd.Function):
    """A kernel whose backward takes one length alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if grad.shape[1] != LENGTH:
            raise ValueError(f"the kernel takes {LENGTH} tokens")
        return grad


def raising(real, x, run):
    output = run(x)
    return with_first(output, OfTheBatch.apply(first_of(output)))


def changed_model(model, module_name, change):
    """The model, whose second layer computes `module_name` as `change` says."""
    layer = model.model.layers[1]
    module = getattr(layer, module_name) if module_name else layer
    real = module.forward

    @functools.wraps(real)
    def forward(*args, **kwargs):
        if args:
            return change(real, args[0], lambda x: real(x, *args[1:], **kwargs))
        x = kwargs.pop("hidden_states")
        return change(real, x, lambda x: real(hidden_states=x, **kwargs))

    module.forward = forward
    return model


def compared(module_name, change, chunk_size=5):
    """Gradients of three steps against the unpatched model's; the description of the changed
    layer."""
    plain = changed_model(build("qwen3", dtype=torch.float64), module_name, change)
    model = changed_model(build("qwen3", dtype=torch.float64), module_name, change)
    streambp.patch(model, streambp.StreamConfig(chunk_size=chunk_size, rows="as_given"))
    for seed in (1, 2, 3):
        batch = make_batch("right-padded", seed=seed)
        loss, expected = gradients(plain, **batch)
        found_loss, grads = gradients(model, **batch)
        torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0.0)
        assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    return streambp.describe(model).layers[1]


REASON_CHUNKS_FAIL = "its forward does not work on chunks (ValueError: the kernel takes 23 tokens)"
CASES = [  # where, what, and why the layer runs whole; None: it streams
    ("", without_graph, REASON_NO_GRADIENT),
    ("", detached, REASON_NO_GRADIENT),
    ("", detached_input, REASON_NO_GRADIENT),
    ("", long_alone, REASON_PARTIAL_GRAPH),
    ("", short_alone, REASON_NO_GRADIENT),
    ("", inference, REASON_NO_GRADIENT),
    ("", raising, REASON_CHUNKS_FAIL),
    ("mlp", without_graph, None),
    ("mlp", raising, REASON_CHUNKS_FAIL),
    ("self_attn", detached, None),
    ("self_attn", inference, None),
    ("self_attn", raising, REASON_CHUNKS_FAIL),
]


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("module_name", "change", "reason"),
    thinned(CASES, lambda module_name, change, reason: not module_name or change is inference),
)
def test_layers_whose_output_has_no_gradient(module_name, change, reason, float64_oracle):
    layer = compared(module_name, change)
    assert layer.path == ("streams" if reason is None else "checkpoints")
    assert layer.reason == (reason or "")


def test_an_evaluation_says_nothing_of_gradients(float64_oracle):
    model = changed_model(build("qwen3", dtype=torch.float64), "", without_graph)
    streambp.patch(model, streambp.StreamConfig(chunk_size=5, rows="as_given"))
    with torch.no_grad():
        model.eval()(**make_batch("plain"), use_cache=False)
    assert streambp.describe(model).layers[1].path == "streams"
    _, grads = gradients(model.train(), **make_batch("plain"))
    plain = changed_model(build("qwen3", dtype=torch.float64), "", without_graph)
    assert worst_error(grads, gradients(plain, **make_batch("plain"))[1]) <= MAX_FLOAT64_ERROR


def fails_outside(self, call, x, upstream, shadows, real=UnpatchedRun.__init__):
    """As it was: the unpatched run's backward raises its own error."""
    try:
        real(self, call, x, upstream, shadows)
    except own_run.StreamingMismatchError as error:
        raise error.__cause__ from None


MUTANTS = {
    "input": (UnpatchedRun, "why_whole", lambda self: None, ("", detached, REASON_NO_GRADIENT)),
    "lengths": (probe, "REASON_PARTIAL_GRAPH", None, ("", long_alone, REASON_PARTIAL_GRAPH)),
    "backward": (UnpatchedRun, "__init__", fails_outside, ("", raising, REASON_CHUNKS_FAIL)),
    "inference": (
        trials,
        "_counts_no_writes",
        lambda tensor: False,
        ("self_attn", inference, None),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_turns_a_test_red(mutant, monkeypatch, float64_oracle):
    owner, name, value, case = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, value)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        test_layers_whose_output_has_no_gradient(*case, None)
