"""Final norms that the head's blocks may not call: they mix tokens, count, draw, or train more than
their parameters.

covers: model/head_deferral.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import streambp
from streambp.model import wrappers
from streambp.model.head_deferral import can_be_deferred
from tests.families import build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch

pytestmark = pytest.mark.usefixtures("float64_oracle")


class NormWrapper(nn.Module):
    """A norm of a user's own, around the model's."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.extra = norm, []

    def forward(self, x):
        return self.norm(x)


class Mixing(NormWrapper):
    def forward(self, x):
        return self.norm(x - 0.3 * x.mean(-2, keepdim=True))


class Placed(NormWrapper):
    """Reads the shape [B, T, h]."""

    def forward(self, x):
        return self.norm(x) * torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype)[:, None]


class Counting(NormWrapper):
    def __init__(self, norm):
        super().__init__(norm)
        self.register_buffer("mean", torch.zeros(32, dtype=torch.float64))

    def forward(self, x):
        self.mean.mul_(0.5).add_(x.detach().mean((0, -2)))
        return self.norm(x) - self.mean.clone()


class Steered(NormWrapper):
    """Trains a tensor that is none of its parameters."""

    def __init__(self, norm):
        super().__init__(norm)
        self.extra = [torch.full((32,), 1.1, dtype=torch.float64, requires_grad=True)]

    def forward(self, x):
        return self.norm(x) * self.extra[0]


class Auxiliary(NormWrapper):
    """Leaves a loss behind."""

    def forward(self, x):
        y = self.norm(x)
        self.loss = y.square().mean()
        return y


class Dropped(nn.Sequential):
    """Of torch's modules alone."""

    def __init__(self, norm):
        super().__init__(norm, nn.Dropout(0.4))


def own_forward(norm):
    forward = norm.forward
    norm.forward = lambda x: forward(x - 0.3 * x.mean(-2, keepdim=True))
    return norm


NORMS = {
    "mixes": Mixing, "reads the shape": Placed, "counts": Counting, "trains a tensor": Steered,
    "leaves a loss behind": Auxiliary, "drops out": Dropped, "has a forward of its own": own_forward,
}  # fmt: skip


def results(streamed, change, when, length=23):
    model = build("qwen3", torch.float64)
    if when == "before patch":
        model.model.norm = change(model.model.norm)
    if streamed:
        streambp.patch(model, streambp.StreamConfig(chunk_size=5, lazy_logits=when == "lazily"))
    if when != "before patch":
        model(**make_batch("plain"), use_cache=False).loss.backward()
        model.model.norm = change(model.model.norm)
    steps = []
    for seed in (1, 2):
        model.zero_grad(set_to_none=True)
        seed_torch(3)
        loss = model(**make_batch("plain", length, seed=seed), use_cache=False).loss
        loss = loss + getattr(model.model.norm, "loss", 0.0)
        loss.backward()
        trained = {
            **dict(model.named_parameters()),
            **dict(enumerate(getattr(model.model.norm, "extra", ()))),
        }
        steps.append({name: p.grad.clone() for name, p in trained.items() if p.grad is not None})
        steps[-1] |= {name: b.clone() for name, b in model.named_buffers()} | {
            "loss": loss.detach()
        }
    return steps


def check(change, when="before patch"):
    ours, expected = (results(streamed, change, when) for streamed in (True, False))
    for our_step, expected_step in zip(ours, expected, strict=True):
        assert our_step.keys() == expected_step.keys()
        assert worst_error(our_step, expected_step) <= MAX_FLOAT64_ERROR


@pytest.mark.fast(3)
@pytest.mark.parametrize("when", ["before patch", "after patch", "lazily"])
@pytest.mark.parametrize("kind", NORMS)
def test_a_final_norm_of_others(kind, when):
    check(NORMS[kind], when)


@pytest.mark.parametrize("kind", NORMS)
def test_mutant_turns_it_red(kind, monkeypatch):
    """Deferred whatever it is."""
    monkeypatch.setattr(wrappers, "can_be_deferred", lambda _: True)
    with pytest.raises((AssertionError, RuntimeError)):
        check(NORMS[kind])


def test_what_is_deferred():
    model = build("qwen3")
    assert can_be_deferred(model.model.norm)
    assert can_be_deferred(nn.LayerNorm(4))
    assert not can_be_deferred(nn.BatchNorm1d(4))
    model.model.norm.register_buffer("mean", torch.zeros(()))
    assert not can_be_deferred(model.model.norm)


def test_adapters_norms_are_deferred_but_for_hooks_inside():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    norm = peft.get_peft_model(build("qwen3"), config).base_model.model.model.norm
    assert can_be_deferred(norm)
    norm.original_module.register_forward_hook(lambda *_: None)
    assert not can_be_deferred(norm)
