"""What stands outside of an objective's mask (NaN, infinities) changes neither its value nor a
gradient.

covers: losses/masked.py, losses/ppo.py
"""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch

import examples.objectives as objectives
from examples.objectives import (
    DPO_LOSSES,
    F_DIVERGENCES,
    GRPO_LOSSES,
    dpo_loss,
    grpo_loss,
    sft_loss,
)
from streambp.losses import gae, ppo, ppo_loss, whiten
from tests.seeds import seeded

ROWS, LENGTH = 4, 7
MASKED_VALUES = (math.nan, math.inf, -math.inf)
LOSS_ARGUMENTS = {
    "beta": 0.1, "max_completion_length": 9, "num_items": 11, "entropy_coef": 0.1, "label_smoothing": 0.1,
    "value_coef": 0.5,
}  # fmt: skip


def sft_of(loss_type):
    return lambda **kwargs: sft_loss(**kwargs, loss_type=loss_type)


def dpo_of(loss_type, divergence="reverse_kl"):
    def loss(label_smoothing, **arguments):
        smoothing = {"label_smoothing": label_smoothing} if loss_type in objectives.SMOOTHED else {}
        return dpo_loss(**arguments, **smoothing, loss_type=loss_type, f_divergence=divergence)

    return loss


def grpo_of(loss_type, **options):
    return lambda **kwargs: grpo_loss(**kwargs, **options, loss_type=loss_type)


TOKENS = {  # of each function, the arguments [B, T]
    "sft": ("log_probs", "mean_log_probs"),
    "dpo": ("log_probs", "ref_log_probs"),
    "grpo": ("log_probs", "advantages", "old_log_probs", "ref_log_probs", "entropy"),
    "ppo": (
        "log_probs",
        "old_log_probs",
        "advantages",
        "values",
        "old_values",
        "returns",
        "entropy",
    ),
    "gae": ("rewards", "values"),
    "whiten": ("values",),
}
SIGNATURES = {
    "sft": sft_loss,
    "dpo": dpo_loss,
    "grpo": grpo_loss,
    "ppo": ppo_loss,
    "gae": gae,
    "whiten": whiten,
}
FUNCTIONS = {
    **{f"sft {kind}": sft_of(kind) for kind in objectives.SFT_LOSSES},
    **{f"dpo {kind}": dpo_of(kind) for kind in DPO_LOSSES},
    **{f"dpo {kind}": dpo_of("sigmoid", kind) for kind in F_DIVERGENCES},
    **{f"grpo {kind}": grpo_of(kind) for kind in GRPO_LOSSES},
    "grpo sequence": grpo_of("grpo", level="sequence"),
    "grpo weighted": grpo_of("dapo", weighted_kl=True, delta=1.1),
    "ppo": lambda **kwargs: ppo_loss(**kwargs).loss,
    "gae": lambda **kwargs: torch.stack(gae(**kwargs)).square().sum(),
    "whiten": lambda **kwargs: whiten(**kwargs).pow(3).sum(),
    "whiten, mean kept": lambda **kwargs: whiten(**kwargs, shift_mean=False).pow(3).sum(),
}


def kind_of(name):
    return name.split(",")[0].split()[0]


def masks():
    """Return a mask [B, T] of completions, one of which has no token."""
    mask = torch.rand(ROWS, LENGTH, generator=seeded(1)) < 0.6
    mask[:, 2] = True
    mask[3] = False
    return mask


def result(name, mask, spoiled=None, outside=0.0):
    """Return the value and the gradients of all arguments, one of which holds `outside` where the
    mask is false."""
    generator = seeded(2)
    leaves = {}
    for argument in TOKENS[kind_of(name)]:
        values = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
        values = torch.where(mask, values, outside if argument == spoiled else 0.0)
        leaves[argument] = values.requires_grad_()
    parameters = inspect.signature(SIGNATURES[kind_of(name)]).parameters
    settings = {key: value for key, value in LOSS_ARGUMENTS.items() if key in parameters}
    value = FUNCTIONS[name](**leaves, mask=mask, **settings)
    return value, torch.autograd.grad(value, list(leaves.values()), allow_unused=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_outside_of_the_mask_do_not_count(name):
    check(name)


def check(name):
    mask = masks()
    expected, gradients = result(name, mask)
    for spoiled, outside in itertools.product(TOKENS[kind_of(name)], MASKED_VALUES):
        value, gradient = result(name, mask, spoiled, outside)
        assert torch.equal(value, expected), (spoiled, outside)
        for ours, theirs in zip(gradient, gradients, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs), (spoiled, outside)


def test_advantages_of_a_row_without_tokens():
    """One advantage a completion, NaN for a completion that is masked out."""
    mask = masks()
    advantages = torch.randn(ROWS, generator=seeded(5), dtype=torch.float64)
    results = []
    for value in (0.0, math.nan):
        advantages[3] = value
        log_probs = torch.randn(
            ROWS, LENGTH, generator=seeded(6), dtype=torch.float64
        ).requires_grad_()
        loss = grpo_loss(log_probs, advantages, mask)
        results.append((loss, *torch.autograd.grad(loss, log_probs)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", ["ppo", "grpo grpo", "sft dft", "whiten"])
def test_without_masked_inputs_that_is_red(name, monkeypatch):
    monkeypatch.setattr(ppo, "within", lambda mask, values: values)
    monkeypatch.setattr(objectives, "within", lambda mask, values: values)
    with pytest.raises(AssertionError):
        check(name)
