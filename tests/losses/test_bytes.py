"""Memory of the objectives with their head, counted on meta: h = 4096, a vocabulary of 151,936,
bf16.

covers: head/__init__.py, head/one_pass.py, head/recipe.py, lazy/dispatch.py, lazy/lazy_hidden.py
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from examples.objectives import dpo_loss, grpo_loss, sft_loss
from streambp.head import token_log_probs
from streambp.head.one_pass import PendingGradients
from streambp.head.recipe import HeadRequest, LogitsExpression
from streambp.lazy.dispatch import lazy_logits
from streambp.lazy.lazy_hidden import LazyHidden
from streambp.losses import ppo_loss
from streambp.planner.count import LiveBytes
from tests.head import losses_on_logits
from tests.layer.test_bytes import KB, empty, slope

WIDTH, VOCABULARY = 4096, 151936


def like(log_probs):
    return torch.empty_like(log_probs)


def sft(v, mask):
    return sft_loss(v.log_probs, mask, label_smoothing=0.1, mean_log_probs=v.mean_log_probs)


def dpo(v, mask):
    return dpo_loss(v.log_probs, like(v.log_probs), mask)


def grpo(v, mask):
    advantages = torch.empty(v.log_probs.shape[0], device="meta")
    return grpo_loss(
        v.log_probs, advantages, mask, old_log_probs=like(v.log_probs), ref_log_probs=like(v.log_probs), beta=0.1,
        entropy=v.entropy, entropy_coef=0.01,
    )  # fmt: skip


def ppo(v, mask):
    values = (like(v.log_probs) for _ in range(5))
    return ppo_loss(
        v.log_probs, next(values), next(values), mask, *values, entropy=v.entropy, entropy_coef=0.1
    ).loss


OBJECTIVES = {"sft": sft, "dpo": dpo, "grpo": grpo, "ppo": ppo}


def step(objective, length, rows=2):
    """Peak bytes of a head's forward and backward beyond its input and weight."""
    hidden = empty(rows, length, WIDTH).requires_grad_()
    weight = empty(VOCABULARY, WIDTH).requires_grad_()
    labels = torch.empty(rows, length, dtype=torch.long, device="meta")
    mask = torch.empty(rows, length, dtype=torch.bool, device="meta")
    with LiveBytes() as count:
        values = token_log_probs(hidden, weight, labels, entropy=True, mean_log_probs=True)
        objective(values, mask).backward()
    return count


@pytest.mark.full
@pytest.mark.parametrize("name", OBJECTIVES)
def test_slope_a_token(name):
    growth = slope(lambda length: step(OBJECTIVES[name], length // 2).peak)
    print(f"{name}: head and objective beyond their input: {growth / KB:.3f} KB a token")
    assert growth <= 8.5 * KB


LOGITS_LOSSES = {
    name: getattr(losses_on_logits, name)
    for name in ("dpo_by_log_softmax", "kto", "dft", "label_smoothing", "entropy_from_softmax")
} | {"grpo": lambda logits, ids: losses_on_logits.grpo(logits.float(), ids, ids.shape[1] - 1, 2048)}


def step_on_logits(loss, length, rows=2):
    """The same where a program computes its objective from logits, without them; and what was
    computed."""
    hidden = empty(rows, length, WIDTH).requires_grad_()
    weight = empty(VOCABULARY, WIDTH).requires_grad_()
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    request = HeadRequest(PendingGradients())
    with LiveBytes() as count:
        logits = lazy_logits(
            LazyHidden.make(hidden, LogitsExpression(request, weight=weight, logits=True)), request
        )
        loss(logits, ids).backward()
    assert hidden.grad.shape == hidden.shape
    return count, request


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", LOGITS_LOSSES)
def test_slope_a_token_on_logits(name):
    short, long = 2048, 4096
    (short_step, request), (long_step, _) = (
        step_on_logits(LOGITS_LOSSES[name], length) for length in (short, long)
    )
    growth = (long_step.peak - short_step.peak) / (2 * (long - short))
    print(f"{name}, on logits: head and objective beyond their input: {growth / KB:.3f} KB a token")
    assert growth <= 8.5 * KB
    assert long_step.largest == VOCABULARY * WIDTH * 4
    assert request.outcome.computed
    assert request.outcome.built_for is None


def test_slope_a_token_of_built_logits():
    """What it is measured against: 297 KB of bf16 for the logits alone."""
    short_step, long_step = (
        step_on_logits(lambda z, ids: z.cumsum(-1).mean(), length)[0] for length in (128, 256)
    )
    assert (long_step.peak - short_step.peak) / 256 > 2 * VOCABULARY


@pytest.mark.full
def test_trls_head_needs_more():
    kernel = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed")

    def measure(length):
        with FakeTensorMode():  # it knows no meta device
            hidden, weight = (
                torch.empty(n, WIDTH, dtype=torch.bfloat16).requires_grad_()
                for n in (length, VOCABULARY)
            )
            labels = torch.empty(length, dtype=torch.long)
            with LiveBytes() as count:
                function = kernel._ChunkedLogProbFunction
                values = function.apply(
                    hidden, weight, None, labels, 1.0, 32768, None, 1.0, ("log_probs",)
                )
                values[0].sum().backward()
        return count.peak

    growth = slope(measure)
    print(f"TRL's head beyond its input: {growth / KB:.3f} KB a token")
    assert growth > 8.5 * KB


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_long_pairs_build_nothing_like_logits(name):
    """[2, 131072] tokens: logits would take 74 GiB in bf16; the largest tensor is dW in float32."""
    count = step(OBJECTIVES[name], 131072)
    logits = 2 * 131072 * VOCABULARY * 2
    assert count.largest == VOCABULARY * WIDTH * 4
    assert count.peak < logits / 10
