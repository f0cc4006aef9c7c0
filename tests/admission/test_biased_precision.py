"""Models with T5's bias by distance in bfloat16 and under its autocast: they stream, as far from
float64 as the unpatched model.

covers: admission/t5_bias.py, admission/agreement.py
"""

from __future__ import annotations

import copy
import statistics

import pytest
import torch
from transformers.models.t5 import modeling_t5

import streambp
from tests.admission.test_biased import MODEL_BUILDERS, batch_of, gradients
from tests.oracle import relative_l2
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
