"""Models with T5's bias by distance in float32, in bfloat16 and under its autocast: they stream, as
far from float64 as the unpatched model.

covers: admission/t5_bias.py, admission/agreement.py, attention/kernels.py
"""

from __future__ import annotations

import copy
import statistics

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5 import modeling_t5

import streambp
from streambp.attention import kernels
from streambp.attention.spans import Block, BlockKind
from tests.admission.test_biased import MODEL_BUILDERS, SIZES, batch_of, gradients
from tests.oracle import lift_float32_casts, relative_l2
from tests.seeds import seed_torch

pytestmark = pytest.mark.skipif(
    not hasattr(modeling_t5, "eager_attention_forward"),
    reason="T5 of this transformers attends without the interface, and its layers run unchunked",
)


def half_precision_ratio(name, autocast, seed):
    """Our error over the unpatched model's, both against float64; all layers stream."""
    seed_torch(seed)
    stock = MODEL_BUILDERS[name]().train()
    for parameter in stock.parameters():  # weights that fit in bfloat16
        parameter.data = parameter.data.bfloat16().float()
    batch = batch_of(19, "right")
    _, expected = gradients(copy.deepcopy(stock).double(), batch)
    if not autocast:
        stock = stock.bfloat16()
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=7))
    errors = []
    for model in (ours, stock):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            _, grads = gradients(model, batch)
        errors.append(relative_l2({n: g.double() for n, g in grads.items()}, expected))
    assert [layer.path for layer in streambp.describe(ours).layers] == ["streams"] * 6
    return errors[0] / errors[1]


@pytest.mark.fast(2)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16"])
def test_flipped_relus_are_rounding(autocast):
    """Rounding flips ReLUs of T5 in the test of a first call. This changes few outputs, but more of
    the gradients."""
    for seed in range(6):
        assert half_precision_ratio("t5", autocast, seed) < 2


@pytest.mark.full
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16"])
@pytest.mark.parametrize("name", list(MODEL_BUILDERS))
def test_the_error_is_the_unpatched_models(name, autocast):
    ratios = [half_precision_ratio(name, autocast, seed) for seed in range(16)]
    print(f"{name}: {statistics.mean(ratios):.3f} +- {statistics.stdev(ratios) / 4:.3f}")
    assert statistics.mean(ratios) <= 1.05


def float32_ratio(seed):
    """Our error over the unpatched model's, of adapters, whose gradients are few and cancel. A ReLU
    that flips would change them by much more than rounding: T5 1.1 has none."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    seed_torch(seed)
    config = peft.LoraConfig(r=4, target_modules=["q", "v", "wo"], init_lora_weights=False)
    model = T5ForConditionalGeneration(T5Config(**SIZES, feed_forward_proj="gated-gelu"))
    stock = peft.get_peft_model(model.train(), config)
    batch = batch_of(19, "right")
    with pytest.MonkeyPatch.context() as context:
        lift_float32_casts(context)
        _, expected = gradients(copy.deepcopy(stock).double(), batch)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=7))
    errors = []
    for model in (ours, stock):
        _, grads = gradients(model, batch)
        errors.append(relative_l2({n: g.double() for n, g in grads.items()}, expected))
    assert [layer.path for layer in streambp.describe(ours).layers] == ["streams"] * 6
    return errors[0] / errors[1]


@pytest.mark.full
def test_the_error_in_float32_is_the_unpatched_models():
    ratios = [float32_ratio(seed) for seed in range(24)]
    print(f"float32: {statistics.mean(ratios):.3f} +- {statistics.stdev(ratios) / 24**0.5:.3f}")
    assert statistics.mean(ratios) <= 1.05


def kernel_ratio():
    """The error of the forward of plain products over that of softmax and products, if scores are
    as large as T5's, whose attention has no scale."""
    seed_torch(7)
    q, k, v = (torch.randn(2, 4, 128, 32) for _ in range(3))
    block = Block(BlockKind.FULL, 0, 2, 0, 128, 0, 128)
    task = kernels.Task(block, 1.0)
    expected = (q.double() @ k.double().mT).softmax(-1) @ v.double()
    stock = (q @ k.mT).softmax(-1) @ v
    ours, lse = kernels.MathKernel().forward(q, k, v, task)
    torch.testing.assert_close(lse, (q @ k.mT).logsumexp(-1), rtol=1e-5, atol=1e-5)
    return float((ours - expected).norm() / (stock - expected).norm())


def test_plain_products_are_as_precise_as_softmax():
    ratio = kernel_ratio()
    print(f"float32: {ratio:.3f} times softmax' error")
    assert ratio <= 1.05


def weigh_by_logsumexp(self, q, k, v, task):
    """A forward whose weights have the rounding of the logsumexp."""
    scores = self._masked(self._scores(q, k, task), q, k, task)
    lse = scores.logsumexp(-1)
    weights = kernels._weights(scores, lse)
    o = (weights.flatten(2, 3) @ v).unflatten(2, weights.shape[2:4])
    return o.flatten(1, 2), lse.flatten(1, 2)


def test_the_mutant_that_weighs_by_the_logsumexp_is_noticed(monkeypatch):
    monkeypatch.setattr(kernels.MathKernel, "forward", weigh_by_logsumexp)
    with pytest.raises(AssertionError):
        test_plain_products_are_as_precise_as_softmax()
