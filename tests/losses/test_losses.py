"""Every objective through the blockwise head against full logits in float64: values and all
gradients.

covers: head/blocks.py, losses/ppo.py
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import streambp
from examples.objectives import (
    DPO_LOSSES,
    F_DIVERGENCES,
    GRPO_LOSSES,
    SMOOTHED,
    dpo_loss,
    grpo_loss,
    sft_loss,
)
from streambp.head import blocks, token_log_probs
from streambp.losses import gae, ppo_loss, whiten
from streambp.losses.ppo import WHITEN_EPS
from tests.families import build
from tests.oracle import assert_as_precise, relative_l2
from tests.seeds import seeded

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 9, 8, 29


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "LOGITS_PER_BLOCK", 60)
    monkeypatch.setattr(blocks, "TOKENS_PER_BLOCK", 7)


class Head:
    """Hidden states, norm and weight, as a policy and as a reference model of its own."""

    def __init__(self, seed=0):
        generator = seeded(seed)
        random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.hidden = random(ROWS, LENGTH, WIDTH).requires_grad_()
        self.weight = (0.5 * random(VOCABULARY, WIDTH)).requires_grad_()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6, dtype=torch.float64)
        self.leaves = [self.hidden, self.weight, self.norm.weight]

    def blockwise(self, labels):
        return token_log_probs(
            self.hidden, self.weight, labels, norm=self.norm, entropy=True, mean_log_probs=True
        )

    def full(self, labels):
        """The same fields from logits."""
        log_p = nn.functional.linear(self.norm(self.hidden), self.weight).log_softmax(-1)
        is_labelled = labels != -100
        label_log_probs = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        return {
            "log_probs": label_log_probs * is_labelled,
            "entropy": entropy * is_labelled,
            "mean_log_probs": log_p.mean(-1) * is_labelled,
        }


def make_labels(kind):
    """Prompts without labels; sparse, empty rows, and completions of one token on request."""
    labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=seeded(3))
    for row, prompt in enumerate((2, 4, 1, 3)):
        labels[row, :prompt] = -100
    if kind == "sparse":
        labels[:, ::3] = -100
    if kind == "empty rows":
        labels[1] = labels[2] = -100
    if kind == "one token":
        labels[:, :-1] = -100
    return labels


LABELS = ("dense", "sparse", "empty rows", "one token")


def other_policy(labels, seed, spread=0.3):
    noise = torch.randn(ROWS, LENGTH, generator=seeded(seed), dtype=torch.float64)
    with torch.no_grad():
        return (Head().full(labels)["log_probs"] + spread * noise) * (labels != -100)


def advantages():
    return torch.tensor([1.3, -0.7, 0.4, -1.1], dtype=torch.float64)


def sft(loss_type, smoothing):
    return lambda v, labels: sft_loss(
        v["log_probs"],
        labels != -100,
        loss_type=loss_type,
        label_smoothing=smoothing,
        mean_log_probs=v["mean_log_probs"],
    )


def dpo(loss_type, divergence="reverse_kl"):
    return lambda v, labels: dpo_loss(
        v["log_probs"], other_policy(labels, 5), labels != -100, loss_type=loss_type, f_divergence=divergence,
        label_smoothing=0.1 if loss_type in SMOOTHED else 0.0, beta=0.4,
    )  # fmt: skip


def grpo(loss_type, **options):
    return lambda v, labels: grpo_loss(
        v["log_probs"], advantages(), labels != -100, old_log_probs=other_policy(labels, 6),
        ref_log_probs=other_policy(labels, 7), loss_type=loss_type, beta=0.05, max_completion_length=11, num_items=17,
        entropy=v["entropy"], entropy_coef=0.02, **options,
    )  # fmt: skip


def ppo(v, labels):
    generator = seeded(8)
    noise = [torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64) for _ in range(4)]
    values = v["log_probs"] * 0.3 + v["entropy"]  # a value that depends on the model
    return ppo_loss(
        v["log_probs"], other_policy(labels, 6), noise[0], labels != -100, values, noise[1], noise[2],
        entropy=v["entropy"], entropy_coef=0.1, value_coef=0.5,
    ).loss  # fmt: skip


OBJECTIVES = {
    **{f"sft {t} {e}": sft(t, e) for t in ("nll", "dft") for e in (0.0, 0.1)},
    **{f"dpo {t}": dpo(t) for t in DPO_LOSSES},
    **{f"dpo {d}": dpo("sigmoid", d) for d in F_DIVERGENCES},
    **{f"grpo {t}": grpo(t) for t in GRPO_LOSSES},
    "grpo sequence": grpo("grpo", level="sequence"),
    "grpo two-sided": grpo("dapo", delta=1.1),
    "grpo asymmetric": grpo("bnpo", epsilon_low=0.1, epsilon_high=0.3),
    "ppo": ppo,
}


def fields(values):
    return {name: getattr(values, name) for name in ("log_probs", "entropy", "mean_log_probs")}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_and_gradients(name, kind):
    head, labels, objective = Head(), make_labels(kind), OBJECTIVES[name]
    expected = objective(head.full(labels), labels)
    value = objective(fields(head.blockwise(labels)), labels)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    expected_gradients = torch.autograd.grad(expected * 0.25, head.leaves)
    gradients = torch.autograd.grad(value * 0.25, head.leaves)
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert (a - b).norm() <= 1e-9 * max(1e-12, b.norm())


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_accumulate_over_two_batches(name):
    head, objective = Head(), OBJECTIVES[name]
    kinds = [make_labels("dense"), make_labels("sparse")]
    for labels in kinds:
        objective(fields(head.blockwise(labels)), labels).backward()
    accumulated = [leaf.grad for leaf in head.leaves]
    expected = torch.autograd.grad(
        sum(objective(head.full(labels), labels) for labels in kinds), head.leaves
    )
    for a, b in zip(accumulated, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def unscaled_gradients(name, patched, seed):
    """Of a float32 model under float16 autocast, with torch's GradScaler; None: in float64 without
    either."""
    model = build("qwen3", seed=seed, vocab_size=512)
    labels = torch.randint(3, 512, (4, 48), generator=seeded(2))
    labels[0, :20] = labels[1, 5:] = labels[2, ::3] = labels[
        3, :-1
    ] = -100  # a prompt, padding, gaps, one token
    batch = {"input_ids": labels.clamp(min=3), "labels": labels}
    ours = streambp.patch(copy.deepcopy(model), streambp.StreamConfig(chunk_size=13))
    if patched is None:
        model = model.double()
    elif patched:
        model = ours
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, enabled=patched is not None)
    with torch.autocast("cpu", torch.float16, enabled=patched is not None):
        if patched:
            log_probs = model(**batch, output_log_probs=True, use_cache=False).log_probs
        else:
            log_p = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
            log_p = (log_p.float() if patched is False else log_p).log_softmax(-1)
            log_probs = log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * (
                labels[:, 1:] != -100
            )
    draw = torch.randn(4, log_probs.shape[1], generator=seeded(9))
    mask = labels[:, 1:] != -100
    old = (-6.2 + 0.1 * draw) * mask
    loss = {
        "sft": lambda: sft_loss(log_probs, mask),
        "dpo": lambda: dpo_loss(log_probs, old, mask),
        "grpo": lambda: grpo_loss(
            log_probs, advantages().float(), mask, old_log_probs=log_probs.detach()
        ),
        "ppo": lambda: ppo_loss(log_probs, log_probs.detach(), draw, mask, draw, draw, draw).loss,
    }[name]()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0**14 if patched is not None else 1.0)  # nothing was infinite
    return {key: p.grad for key, p in model.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["dpo", *(pytest.param(name, marks=pytest.mark.full) for name in ("sft", "grpo", "ppo"))],
)
def test_float16_with_a_grad_scaler(name):
    assert_as_precise(scaled_errors(name, seed) for seed in itertools.count())


def scaled_errors(name, seed):
    truth, stock, ours = (
        unscaled_gradients(name, patched, seed) for patched in (None, False, True)
    )
    return relative_l2(ours, truth), relative_l2(stock, truth)


def test_gae_by_hand():
    """Two rows; the second ends early. gamma 0.9, lambda 0.5."""
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    values = torch.tensor([[0.2, 0.4, 0.6], [0.1, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    estimates, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    a2 = 1.0 - 0.6
    a1 = (0.9 * 0.6 - 0.4) + 0.45 * a2
    a0 = (0.9 * 0.4 - 0.2) + 0.45 * a1
    expected = torch.tensor([[a0, a1, a2], [0.4, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(estimates, expected)
    torch.testing.assert_close(returns, (expected + values).masked_fill(~mask, 0.0))


def test_gae_passes_over_what_the_policy_did_not_write():
    """A tool's answer between two turns: the reward at the end reaches the first turn as if it were
    not there."""
    draw = lambda *shape: torch.randn(*shape, generator=seeded(4), dtype=torch.float64)  # noqa: E731
    rewards, values = draw(2, 7), draw(2, 7) * 0.5
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [1, 0, 1, 1, 1, 0, 0]])
    estimates = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    for row, is_token in enumerate(mask.bool()):
        of_tokens_alone = gae(
            rewards[row, is_token][None],
            values[row, is_token][None],
            torch.ones(1, 4),
            gamma=0.9,
            lam=0.8,
        )
        for all_tokens, expected in zip(estimates, of_tokens_alone, strict=True):
            torch.testing.assert_close(all_tokens[row, is_token], expected[0])
            assert not all_tokens[row, ~is_token].any()


def test_ppo_clips_by_hand():
    """Ratios 1.5 and 0.5 with advantages of both signs; values inside and outside of the clip
    range."""
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5]], dtype=torch.float64)
    a = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    old = torch.zeros(1, 4, dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    log_probs = ratio.log().requires_grad_()
    values = torch.tensor([[0.1, 0.5, -0.5, 0.0]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    result = ppo_loss(
        log_probs,
        old,
        a,
        mask,
        values,
        old,
        target,
        clip_range=0.2,
        value_clip_range=0.2,
        value_coef=2.0,
    )
    # policy: -1.2 (clipped), 1.5, -0.5, 0.8 (clipped); value: 0.81, max(0.25, 0.64), max(2.25,
    # 1.44), 0, halved
    torch.testing.assert_close(
        result.policy, torch.tensor((-1.2 + 1.5 - 0.5 + 0.8) / 4, dtype=torch.float64)
    )
    torch.testing.assert_close(
        result.value, torch.tensor((0.81 + 0.64 + 2.25) / 8, dtype=torch.float64)
    )
    torch.testing.assert_close(result.loss, result.policy + 2.0 * result.value)
    result.loss.backward()
    torch.testing.assert_close(
        log_probs.grad, torch.tensor([[0.0, 1.5, -0.5, 0.0]], dtype=torch.float64) / 4
    )
    torch.testing.assert_close(
        values.grad, torch.tensor([[-0.9, 0.0, -1.5, 0.0]], dtype=torch.float64) / 4 * 2
    )
    assert result.policy_clipped == 0.5
    assert result.value_clipped == 0.25


@pytest.mark.parametrize("spread", [0.0, 1e-5, 1.0])
def test_whiten_adds_its_eps_to_the_variance(spread):
    values = 3.0 + spread * torch.randn(2, 5, generator=seeded(3), dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    expected = (values - values.mean()) / (values.var(correction=0) + WHITEN_EPS).sqrt()
    torch.testing.assert_close(whiten(values, mask), expected, rtol=1e-9, atol=1e-9)
    assert "1e-8" in whiten.__doc__
    assert WHITEN_EPS == 1e-8


@pytest.mark.parametrize("place", ["variance", "docstring"])
def test_a_whiten_of_another_eps_turns_that_red(place, monkeypatch):
    test_whiten_adds_its_eps_to_the_variance(1e-5)
    if place == "variance":
        monkeypatch.setattr("streambp.losses.ppo.WHITEN_EPS", 1e-6)
    else:
        monkeypatch.setattr(whiten, "__doc__", "Return the values with mean 0 and variance 1.")
    with pytest.raises(AssertionError):
        test_whiten_adds_its_eps_to_the_variance(1e-5)


def test_whiten():
    values = torch.randn(3, 7, dtype=torch.float64) * 4 + 2
    mask = torch.rand(3, 7) < 0.7
    whitened = whiten(values, mask)[mask]
    torch.testing.assert_close(
        whitened.mean(), torch.zeros((), dtype=torch.float64), atol=1e-12, rtol=0
    )
    torch.testing.assert_close(
        whitened.var(unbiased=False), torch.ones((), dtype=torch.float64), rtol=1e-6, atol=0
    )
    unshifted = whiten(values, mask, shift_mean=False)[mask]
    torch.testing.assert_close(unshifted.mean(), values[mask].mean())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: sft_loss(x, x > 0, loss_type="focal"), "loss_type is 'focal'"),
        (lambda x: sft_loss(x, x > 0, label_smoothing=0.1), "mean_log_probs"),
        (lambda x: sft_loss(x, x[:1] > 0), r"mask has shape \(1, 3\)"),
        (lambda x: dpo_loss(x[:1], x[:1], x[:1] > 0), "as many rejected"),
        (lambda x: dpo_loss(x, x, x > 0, loss_type="exo_pair"), "between 0 and 1"),
        (lambda x: dpo_loss(x, x, x > 0, loss_type="robust", label_smoothing=0.5), "below 0.5"),
        (lambda x: dpo_loss(x, x, x > 0, label_smoothing=0.1), "'sigmoid' does not have"),
        (lambda x: grpo_loss(x, x[:, 0], x > 0, loss_type="dapo"), "num_items"),
        (lambda x: grpo_loss(x, x[:, 0], x > 0, beta=0.1), "ref_log_probs"),
        (lambda x: gae(x, x[:1], x > 0), "values has shape"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(streambp.StreamBPError, match=message):
        call(torch.zeros(2, 3))
