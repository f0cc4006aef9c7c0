"""Layers whose attention reads ahead, in bfloat16 and under its autocast: as far from float64 as
the unpatched model.

covers: sharded/bidirectional.py
"""

from __future__ import annotations

import copy
import statistics

import pytest
import torch

import streambp
from tests.oracle import relative_l2
from tests.seeds import seed_torch
from tests.sharded.test_bidirectional import CHUNK, LENGTH, MODEL_BUILDERS, in_halves, padding

__all__ = ["in_halves"]  # a fixture

SEEDS = 16
MAX_ERROR_RATIO = 1.05


def gradients(model, ids, mask, weights, autocast):
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    (states.to(weights.dtype) * weights).sum().backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def ratio(name, autocast, seed):
    """Our error over the unpatched model's, both against float64."""
    seed_torch(seed)
    stock = MODEL_BUILDERS[name]().train()
    for parameter in stock.parameters():  # weights that fit in bfloat16
        parameter.data = parameter.data.bfloat16().float()
    ids, mask = torch.randint(3, 60, (3, LENGTH)), padding("right")
    weights = torch.randn(3, LENGTH, 32) * mask[..., None]
    truth = gradients(copy.deepcopy(stock).double(), ids, mask, weights.double(), False)
    if not autocast:
        stock = stock.bfloat16()
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=CHUNK))
    errors = [
        relative_l2(gradients(model, ids, mask, weights, autocast), truth)
        for model in (ours, stock)
    ]
    return errors[0] / errors[1]


@pytest.mark.full
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "embedding_gemma", "modernbert", "bert"])
def test_the_error_is_the_unpatched_models(name, autocast, in_halves):
    ratios = [ratio(name, autocast, seed) for seed in range(SEEDS)]
    print(f"{name}: {statistics.mean(ratios):.3f} +- {statistics.stdev(ratios) / SEEDS**0.5:.3f}")
    assert in_halves
    assert statistics.mean(ratios) <= MAX_ERROR_RATIO
