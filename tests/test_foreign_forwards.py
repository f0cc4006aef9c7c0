"""Forwards that other libraries wrote: nothing is deferred below them, whoever came first
(`streambp/foreign.py`).

covers: foreign.py
"""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto import modeling_auto

import streambp
from streambp.foreign import foreign_forward
from streambp.model import causal_lm
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error

CONFIG = streambp.StreamConfig(chunk_size=5)


class FusedLinearLoss(torch.autograd.Function):
    """Cross-entropy of hidden [N, h] and weight [V, h] with gradients of its own, as fused kernels
    compute it."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        with torch.enable_grad():
            leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
            loss = F.cross_entropy(leaves[0] @ leaves[1].T, labels)
        ctx.gradients = torch.autograd.grad(loss, leaves)
        return loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        return *(upstream * gradient for gradient in ctx.gradients), None


def fused_forward(self, input_ids=None, labels=None, **kwargs):
    hidden = self.model(input_ids=input_ids, **kwargs)[0]
    if labels is None:
        return CausalLMOutput(logits=self.lm_head(hidden))
    shifted = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    return CausalLMOutput(
        loss=FusedLinearLoss.apply(shifted, self.lm_head.weight, labels[:, 1:].reshape(-1))
    )


def wrapped(forward):
    """`functools.wraps` gives a function another's name and `__module__`."""

    @functools.wraps(forward)
    def around(self, *args, **kwargs):
        return fused_forward(self, *args, **kwargs)

    return around


def check(how, monkeypatch):
    """Gradients with a fused loss on the class, on the instance before `patch`, or on it
    afterwards."""
    stock = build("qwen3", torch.float64)
    batch = make_batch("plain")
    _, expected = gradients(stock, **batch)
    ours = copy.deepcopy(stock)
    if how == "class":
        monkeypatch.setattr(Qwen3ForCausalLM, "forward", fused_forward)
    if how == "class under another name":
        monkeypatch.setattr(Qwen3ForCausalLM, "forward", wrapped(Qwen3ForCausalLM.forward))
    if how == "instance":
        ours.forward = types.MethodType(fused_forward, ours)
    streambp.patch(ours, CONFIG)
    if how == "class after a step":
        gradients(ours, **batch)
        monkeypatch.setattr(Qwen3ForCausalLM, "forward", fused_forward)
    if how == "afterwards":
        ours.forward = types.MethodType(fused_forward, ours)
    try:
        _, grads = gradients(ours, **batch)
    except streambp.StreamBPError as error:
        raise AssertionError(str(error)) from error
    assert worst_error(grads, expected) <= 1e-10
    assert streambp.describe(ours).head.startswith("as another library computes it: ")
    return ours


@pytest.mark.usefixtures("float64_oracle")
@pytest.mark.parametrize(
    "how", ["class", "class after a step", "class under another name", "instance", "afterwards"]
)
def test_every_parameter_gets_its_gradient(how, monkeypatch, attended_chunks):
    ours = check(how, monkeypatch)
    assert 5 in attended_chunks
    head = streambp.describe(ours).head
    assert head.startswith(f"as another library computes it: {__name__}.")
    assert ("replaced the model's forward" in head) == (how == "afterwards")
    assert ours(input_ids=make_batch("plain")["input_ids"]).logits.requires_grad


@pytest.mark.usefixtures("float64_oracle")
def test_mutant_a_class_is_asked_once_and_for_all(monkeypatch):
    cached_check = functools.lru_cache(lambda kind: causal_lm.foreign_forward(kind))
    monkeypatch.setattr(causal_lm, "foreign_of_class", lambda kind, forwards: cached_check(kind))
    with pytest.raises(AssertionError):
        check("class after a step", monkeypatch)


def test_per_token_values_are_refused(monkeypatch):
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", fused_forward)
    ours = streambp.patch(build("qwen3"), CONFIG)
    with pytest.raises(
        streambp.StreamBPError,
        match=r"fused_forward replaces the forward of Qwen3ForCausalLM",
    ):
        ours(**make_batch("plain"), output_log_probs=True, use_cache=False)


class OwnForward(Qwen3ForCausalLM):
    """A user's model: this module is one of its class's own."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.usefixtures("float64_oracle")
def test_a_users_own_subclass_is_not_foreign(monkeypatch):
    stock = build("qwen3", torch.float64)
    stock.__class__ = OwnForward
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    batch = make_batch("plain")
    assert worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= 1e-10
    assert streambp.describe(ours).head == "blockwise loss, no logits"
    fused = types.FunctionType(
        fused_forward.__code__, {**globals(), "__name__": "fused_kernels.qwen3"}
    )
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", fused)  # what the subclass calls
    assert foreign_forward(OwnForward) == "fused_kernels.qwen3.fused_forward"


def model_classes():
    names = {
        name
        for mapping in (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )
        for entry in mapping.values()
        for name in ([entry] if isinstance(entry, str) else entry)
    }
    return [getattr(transformers, name) for name in sorted(names) if hasattr(transformers, name)]


@pytest.mark.full
def test_no_class_of_transformers_is_foreign():
    classes = model_classes()
    assert len(classes) > 200
    assert not [name for name in map(foreign_forward, classes) if name is not None]


@pytest.mark.parametrize("first", ["patch", "accelerate"])
def test_accelerates_mixed_precision_is_not_foreign(first):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    try:
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        model = build("qwen3")
        if first == "patch":
            model = accelerator.prepare_model(streambp.patch(model, CONFIG))
        else:
            model = streambp.patch(accelerator.prepare_model(model), CONFIG)
        model(**make_batch("plain"), use_cache=False)
    finally:
        AcceleratorState._reset_state(True)
    assert streambp.describe(model).head == "blockwise loss, no logits"
