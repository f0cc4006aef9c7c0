"""Plans of mixtures of experts: any dtype of grouped products, and bytes of packed weights.

covers: planner/count.py, planner/skeleton.py, planner/survey.py
"""

from __future__ import annotations

import pytest
import torch

from streambp.errors import StreamBPError
from streambp.planner import count
from streambp.planner.skeleton import Skeleton
from tests import zoo
from tests.planner.measured import RECIPES, measure, predict
from tests.seeds import seed_torch
from tests.tiers import thinned

LAYERS = 3


def mixture(family, dtype=torch.float32, layers=LAYERS):
    pattern = zoo.tiny_config(family).to_dict().get("layer_types")
    changes = {"num_hidden_layers": layers}
    if pattern:
        changes["layer_types"] = (list(pattern) * layers)[:layers]
    model = zoo.build(family, dtype, **changes)
    model.set_experts_implementation("grouped_mm")
    return model


@pytest.mark.parametrize(
    ("family", "recipe"),
    thinned(
        [(family, recipe) for family in ("qwen3_moe", "gpt_oss", "mixtral") for recipe in RECIPES],
        lambda *row: row == ("qwen3_moe", "saves"),
    ),
)
def test_float32_is_predicted_within_one_percent(family, recipe):
    seed_torch(1)
    phases, *_ = predict(mixture(family), RECIPES[recipe], 129, 32)
    predicted = max(phase.peak - phase.gradients for phase in phases)
    spans = measure(mixture(family), RECIPES[recipe], 129, 32)
    before = [0, *(span.gradients for span in spans[:-1])]
    measured = max(span.peak - old for span, old in zip(spans, before, strict=True))
    print(f"{family}, {recipe}: {100 * (predicted / measured - 1):+.3f} %")
    assert abs(predicted / measured - 1) <= 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_of_a_gpu(dtype):
    """A step on meta tensors, whose products and routed pairs are those of bfloat16."""
    config = zoo.tiny_config("gpt_oss")
    config._experts_implementation = "grouped_mm"
    found = []
    for one in (dtype, torch.bfloat16):
        skeleton = Skeleton(config, one, None, 16, "cuda")
        with skeleton.running(), count.StepCount(None) as counted:
            skeleton.loss(torch.empty(1, 33, dtype=torch.long)).backward()
        found.append((counted.work.products, counted.routed))
    assert found[0] == found[1]


def test_mutant_without_the_rule(monkeypatch):
    monkeypatch.setattr(count, "GROUPED_DTYPES", ())
    with pytest.raises((AssertionError, StreamBPError, RuntimeError)):
        test_dtypes_of_a_gpu(torch.float32)


def test_mutant_of_half_the_rows(monkeypatch):
    real = count.StepCount._grouped

    def narrow(self, a, *args, **kwargs):
        return real(self, a[..., : a.shape[-2] // 2, :], *args, **kwargs)

    monkeypatch.setattr(count.StepCount, "_grouped", narrow)
    with pytest.raises((AssertionError, StreamBPError, RuntimeError)):
        test_float32_is_predicted_within_one_percent("qwen3_moe", "saves")
