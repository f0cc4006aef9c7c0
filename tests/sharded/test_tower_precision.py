"""Towers under bfloat16's autocast: as far from float64 as the unpatched model.

covers: sharded/bidirectional.py
"""

from __future__ import annotations

import copy
import math
import statistics

import pytest
import torch

import streambp
from tests.oracle import relative_l2
from tests.seeds import seed_torch
from tests.sharded.test_bidirectional import in_halves
from tests.sharded.test_towers import CHUNK, gradients, llava, whisper

__all__ = ["in_halves"]  # a fixture

SEEDS = {llava: 64, whisper: 16}  # LLaVA's ratios scatter by a fifth
MAX_ERROR_RATIO = 1.05


def converted(batch, dtype):
    return {n: v.to(dtype) if v.is_floating_point() else v for n, v in batch.items()}


def both_errors(make, seed):
    """Our error and the unpatched model's, both against float64."""
    seed_torch(seed)
    stock, batch = make()
    for parameter in stock.train().parameters():  # weights that fit in bfloat16
        parameter.data = parameter.data.bfloat16().float()
    truth = gradients(copy.deepcopy(stock).double(), converted(batch, torch.float64))[1]
    config = streambp.StreamConfig(chunk_size=CHUNK, towers=True)
    ours = streambp.patch(copy.deepcopy(stock), config)
    errors = []
    for model in (ours, stock):
        with torch.autocast("cpu", torch.bfloat16):
            grads = gradients(model, converted(batch, torch.float32))[1]
        errors.append(relative_l2({n: g.double() for n, g in grads.items()}, truth))
    return errors


@pytest.mark.full
@pytest.mark.parametrize("make", [llava, whisper], ids=lambda make: make.__name__)
def test_the_error_is_the_unpatched_models(make, in_halves):
    errors = [both_errors(make, seed) for seed in range(SEEDS[make])]
    # A mean of ratios lies above 1 where two errors scatter alike.
    ours, stock = (
        statistics.fmean(error**2 for error in column) for column in zip(*errors, strict=True)
    )
    ratio = math.sqrt(ours / stock)
    print(f"{make.__name__}: {ratio:.3f}")
    assert in_halves
    assert ratio <= MAX_ERROR_RATIO
