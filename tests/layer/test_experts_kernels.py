"""Kernels of experts (`set_experts_implementation`, hub kernels): they stay as they are, with each
value of `kernels`, and the trial of a layer decides if they run in chunks.

The stand-ins are autograd Functions that write through pointers, which no dispatcher sees.

covers: model/chosen_kernels.py, admission/probe.py
"""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers.integrations import moe

import streambp
from streambp.admission import entry, third_party
from streambp.admission.probe import Verdict
from tests import zoo
from tests.layer.test_expert_adapters import batch_of, streamed
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch
from tests.tiers import thinned

FAMILIES = ("qwen3_moe", "mixtral")
STAND_IN = "stand_in"
CAPACITY = 9  # rows of an expert in a call, beyond which a kernel drops them
calls = []


def product(rows, weight):
    """rows [n, in] @ weight [out, in]^T, written through numpy's pointers."""
    out = torch.empty(len(rows), len(weight), dtype=rows.dtype)
    out.numpy()[...] = rows.detach().numpy() @ weight.detach().numpy().T
    return out


class Product(torch.autograd.Function):
    """The kernel of an expert's product."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return product(rows, weight)

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        return product(grad, weight.mT.contiguous()), product(
            grad.mT.contiguous(), rows.mT.contiguous()
        )


def experts_forward(self, hidden_states, top_k_index, top_k_weights, capacity=None):
    """The experts' output, expert by expert."""
    calls.append(len(hidden_states))
    out = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        tokens, places = torch.where(top_k_index == expert)
        tokens, places = tokens[:capacity], places[:capacity]
        gate, up = Product.apply(hidden_states[tokens], self.gate_up_proj[expert]).chunk(2, -1)
        rows = Product.apply(self.act_fn(gate) * up, self.down_proj[expert])
        out = out.index_add(0, tokens, rows * top_k_weights[tokens, places, None])
    return out


def drops_rows(self, *args):
    """As kernels with a capacity: which rows an expert drops depends on all tokens of a call."""
    return experts_forward(self, *args, capacity=CAPACITY)


def scales_by_call(self, hidden_states, *args):
    """The output is divided by the largest of the call's values, as dynamic quantisation does."""
    return experts_forward(self, hidden_states, *args) / (1 + hidden_states.abs().max())


def model_with(monkeypatch, family, forward):
    calls.clear()
    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, STAND_IN, forward)
    seed_torch(1)
    model = zoo.build(family, torch.float64)
    model.set_experts_implementation(STAND_IN)
    return model


def check(monkeypatch, family, forward, kernels):
    """Two steps against the unpatched model with the same kernel. Return the last description and
    the lengths of the last step's calls."""
    stock = model_with(monkeypatch, family, forward)
    batch = batch_of(64)
    expected = gradients(stock, **batch)
    assert calls
    assert set(calls) == {64}
    ours = streamed(stock, chunk_size=16, kernels=kernels)
    gradients(ours, **batch)
    calls.clear()
    computed = gradients(ours, **batch)
    assert abs(computed[0] - expected[0]) <= 1e-10 * abs(expected[0])
    assert worst_error(computed[1], expected[1]) <= 1e-10
    return streambp.describe(ours), set(calls)


ROWS = tuple(itertools.product(FAMILIES, ("auto", "own")))


@pytest.mark.parametrize(
    ("family", "kernels"), thinned(ROWS, lambda *row: row == ("qwen3_moe", "auto"))
)
def test_a_kernel_of_experts_streams(family, kernels, float64_oracle, monkeypatch):
    described, lengths = check(monkeypatch, family, experts_forward, kernels)
    assert {layer.path for layer in described.layers} == {"streams"}
    assert lengths == {16}


@pytest.mark.parametrize("forward", [drops_rows, scales_by_call])
@pytest.mark.parametrize(
    ("family", "kernels"), thinned(ROWS, lambda *row: row == ("qwen3_moe", "auto"))
)
def test_a_kernel_that_mixes_tokens_runs_whole(
    family, kernels, forward, float64_oracle, monkeypatch
):
    described, lengths = check(monkeypatch, family, forward, kernels)
    assert {layer.path for layer in described.layers} == {"checkpoints"}
    assert lengths == {64}
    for layer in described.layers:
        print(layer.reason)
        assert STAND_IN in layer.reason


@pytest.mark.parametrize("forward", [drops_rows, scales_by_call])
def test_mutant_without_a_trial(forward, float64_oracle, monkeypatch):
    monkeypatch.setattr(entry, "can_stream", lambda call: Verdict(True))
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_a_kernel_that_mixes_tokens_runs_whole(
            "qwen3_moe", "auto", forward, float64_oracle, monkeypatch
        )


def test_mutant_of_a_short_trial_alone(float64_oracle, monkeypatch):
    """A few tokens do not reach a kernel's capacity."""
    monkeypatch.setattr(third_party, "foreign_experts", lambda layer: [])
    with pytest.raises(AssertionError):
        test_a_kernel_that_mixes_tokens_runs_whole(
            "mixtral", "own", drops_rows, float64_oracle, monkeypatch
        )


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_kernels_of_transformers_need_no_further_trial(implementation):
    model = zoo.build("qwen3_moe", torch.float32)
    model.set_experts_implementation(implementation)
    assert third_party.foreign_parts(model.model.layers[0]) == []
