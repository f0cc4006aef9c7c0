"""The one-pass loss expects the upstream gradient that came the last time.

covers: head/log_probs.py, head/recipe.py
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

import streambp
from streambp.head.log_probs import HeadGradients
from tests.families import build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error


@pytest.fixture
def late_factors(monkeypatch):
    """What gradients taken in forward were multiplied by in backward."""
    return record_late_factors(monkeypatch)


def record_late_factors(monkeypatch):
    factors, real = [], HeadGradients.results

    def results(self, factor, buffers):
        factors.append(float(factor))
        return real(self, factor, buffers)

    monkeypatch.setattr(HeadGradients, "results", results)
    return factors


def test_the_late_factor_is_one_from_the_second_backward_on(late_factors):
    check_late_factors(late_factors)


def check_late_factors(factors):
    model = streambp.patch(
        build("qwen3", torch.get_default_dtype()), streambp.StreamConfig(chunk_size=5)
    )
    for step in range(3):
        gradients(model, scale=1 / 3, **make_batch("left-padded", length=23 + step, seed=step))
    assert factors[0] == pytest.approx(1 / 3)
    assert factors[1:] == pytest.approx([1.0, 1.0])
    gradients(copy.deepcopy(model), **make_batch("plain"))
    assert factors[3] == 1.0  # a copy has learnt nothing yet


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_count_of_labels_may_be_a_tensor_of_any_shape(shape, float64_oracle):
    stock = build("qwen3", torch.float64)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    batch = make_batch("plain") | {"num_items_in_batch": torch.full(shape, 7)}
    for _ in range(2):
        results = [gradients(model, **batch) for model in (stock, ours)]
        (loss, expected), (found_loss, our_gradients) = results
        assert found_loss.shape == loss.shape == shape
        assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR


def test_gradients_are_exact_whatever_came_before(float64_oracle):
    stock = build("qwen3", torch.float64)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    for step, scale in enumerate((1 / 3, 1 / 3, 0.0, 5.0, -2.0, 1e-20, 1.0)):
        batch = make_batch("plain", seed=step)
        _, expected = gradients(stock, scale, **batch)
        _, our_gradients = gradients(ours, scale, **batch)
        assert all(g.isfinite().all() for g in our_gradients.values()), scale
        assert scale == 0 or worst_error(our_gradients, expected) <= 1e-10, scale
        assert scale != 0 or not any(g.any() for g in our_gradients.values())


@pytest.mark.parametrize("scale", [math.inf, math.nan, 0.0, 1e-37, 1e37])
def test_a_loss_of_no_usual_size_does_not_reach_the_next_step(scale):
    ours = streambp.patch(build("qwen3", torch.float32), streambp.StreamConfig(chunk_size=5))
    batch = make_batch("plain")
    _, expected = gradients(ours, **batch)
    gradients(ours, scale, **batch)
    _, our_gradients = gradients(ours, **batch)
    assert all(torch.equal(our_gradients[name], gradient) for name, gradient in expected.items())
