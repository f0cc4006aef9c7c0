"""token_log_probs against full logits in float64.

covers: head/blocks.py, head/log_probs.py
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import streambp
from streambp.head import blocks, token_log_probs
from streambp.head.log_probs import METRICS, BlockwiseLogProbs, _finish_gradient, make_inputs
from tests.oracle import assert_as_precise, relative_l2
from tests.seeds import seeded

OPTIONS = {
    "plain": {},
    "scale and temperature": {"logit_scale": 0.3, "temperature": 1.7},
    "softcap": {"softcap": 2.5},
    "all": {"logit_scale": 1.3, "softcap": 3.0, "temperature": 0.8},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several token blocks and several vocabulary blocks, none of which divides its dimension."""
    monkeypatch.setattr(blocks, "LOGITS_PER_BLOCK", 60)
    monkeypatch.setattr(blocks, "TOKENS_PER_BLOCK", 7)


def make(bias=True, seed=0):
    generator = seeded(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    norm = nn.RMSNorm(8, eps=1e-6, dtype=torch.float64)
    norm.weight.data += 0.3 * random(8)
    labels = torch.randint(0, 29, (2, 11), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return random(2, 11, 8), random(29, 8), random(29) if bias else None, norm, labels


def reference(hidden, weight, bias, norm, labels, logit_scale=1.0, softcap=None, temperature=1.0):
    logits = nn.functional.linear(norm(hidden), weight, bias) * logit_scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    valid = labels != -100
    label_log_probs = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * valid
    return label_log_probs, -(log_p.exp() * log_p).sum(-1) * valid


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients(options, bias):
    hidden, weight, bias, norm, labels = make(bias)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None] + [norm.weight]
    expected = reference(hidden, weight, bias, norm, labels, **options)
    values = token_log_probs(hidden, weight, labels, norm=norm, bias=bias, entropy=True, **options)
    torch.testing.assert_close(values.log_probs, expected[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(values.entropy, expected[1], rtol=1e-11, atol=1e-12)
    upstream = torch.randn(2, 2, 11, dtype=torch.float64)

    def objective(log_probs, entropy):
        return (log_probs.exp() * upstream[0] + entropy.square() * upstream[1]).sum()

    expected_gradients = torch.autograd.grad(objective(*expected), leaves)
    got = torch.autograd.grad(objective(values.log_probs, values.entropy), leaves)
    for a, b in zip(got, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "norm"])
def test_frozen_parts_get_no_gradient(frozen):
    hidden, weight, _, norm, labels = make()
    parts = {"hidden": hidden, "weight": weight, "norm": norm.weight}
    for name, part in parts.items():
        part.requires_grad_(name != frozen)
    token_log_probs(hidden, weight, labels, norm=norm).log_probs.sum().backward()
    trained_parts = {name: part for name, part in parts.items() if name != frozen}
    expected_gradients = torch.autograd.grad(
        reference(hidden, weight, None, norm, labels)[0].sum(), list(trained_parts.values())
    )
    assert parts[frozen].grad is None
    for part, gradient in zip(trained_parts.values(), expected_gradients, strict=True):
        torch.testing.assert_close(part.grad, gradient, rtol=1e-10, atol=1e-12)


def test_half_precision_is_summed_in_float32():
    hidden, weight, _, _, labels = make()
    values = token_log_probs(hidden.bfloat16(), weight.bfloat16().requires_grad_(), labels)
    assert values.log_probs.dtype == torch.float32


def bf16_errors(seed, rows=8, length=12, width=32, vocabulary=61):
    """Of the gradients of hidden states and weight, ours over many blocks and those of full
    logits."""
    generator = seeded(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    leaves = {
        "hidden": random(rows, length, width),
        "weight": random(vocabulary, width) / width**0.5,
    }
    labels = torch.randint(0, vocabulary, (rows, length), generator=generator)
    upstream = torch.rand(rows, length, generator=generator)

    def full(hidden, weight):
        log_p = (
            nn.functional.linear(hidden, weight)
            .to(torch.promote_types(hidden.dtype, torch.float32))
            .log_softmax(-1)
        )
        return log_p.gather(-1, labels[..., None])[..., 0]

    def gradients(log_probs, dtype=torch.bfloat16):
        typed_leaves = {
            name: leaf.to(dtype, copy=True).requires_grad_() for name, leaf in leaves.items()
        }
        (log_probs(**typed_leaves) * upstream).sum().backward()
        return {name: leaf.grad for name, leaf in typed_leaves.items()}

    truth = gradients(full, torch.float64)
    ours = gradients(lambda hidden, weight: token_log_probs(hidden, weight, labels).log_probs)
    return relative_l2(ours, truth), relative_l2(gradients(full), truth)


def test_bf16_is_as_precise_as_full_logits():
    assert_as_precise(map(bf16_errors, itertools.count()))


def test_shapes_and_labels_are_checked():
    hidden, weight, _, _, labels = make()
    with pytest.raises(streambp.StreamBPError, match="with equal leading dimensions"):
        token_log_probs(hidden, weight, labels[:, 1:])
    with pytest.raises(streambp.StreamBPError, match="29"):
        token_log_probs(hidden, weight, torch.full_like(labels, 29))


def test_a_tied_weight_gets_both_gradients():
    hidden, weight, _, _, labels = make()
    weight.requires_grad_()
    loss = lambda head: head(weight).sum() + (weight * 2.0).sum()  # noqa: E731
    expected_gradients = torch.autograd.grad(
        loss(lambda w: reference(hidden, w, None, nn.Identity(), labels)[0]), weight
    )
    got = torch.autograd.grad(loss(lambda w: token_log_probs(hidden, w, labels).log_probs), weight)
    torch.testing.assert_close(got, expected_gradients, rtol=1e-10, atol=1e-12)


def test_metrics():
    hidden, weight, bias, norm, labels = make()
    logits = nn.functional.linear(norm(hidden), weight, bias) / 1.7
    log_p = logits.log_softmax(-1)
    labels = torch.where(torch.rand(labels.shape) < 0.5, logits.argmax(-1), labels)
    valid = labels != -100
    values = token_log_probs(
        hidden.requires_grad_(), weight, labels, norm=norm, bias=bias, temperature=1.7, mean_log_probs=True,
        metrics=("is_top1", "mean_logits", "log_sum_sq_probs"),
    )  # fmt: skip
    assert torch.equal(values.is_top1, (logits.argmax(-1) == labels) & valid)
    torch.testing.assert_close(values.mean_logits, logits.mean(-1) * valid)
    torch.testing.assert_close(values.log_sum_sq_probs, (2 * log_p).logsumexp(-1) * valid)
    torch.testing.assert_close(values.mean_log_probs, log_p.mean(-1) * valid)
    assert not any(
        x.requires_grad for x in (values.is_top1, values.mean_logits, values.log_sum_sq_probs)
    )
    assert values.entropy is None
    with pytest.raises(streambp.StreamBPError, match="perplexity"):
        token_log_probs(hidden, weight, labels, metrics=("perplexity",))


def test_a_head_in_float32_stays_there_under_autocast():
    """As TRL's `cast_lm_head_to_fp32` asks for: forward and backward multiply in float32."""
    hidden, weight, *_, labels = (
        x if x is None or isinstance(x, nn.Module) else x.float() for x in make()
    )
    labels = labels.long()
    runs = []
    for enabled in (False, True):
        leaf = hidden.flatten(0, 1).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            inputs = make_inputs(leaf, labels, blocks.Projection(), None, -100)
            inputs.in_float32 = True
            values = BlockwiseLogProbs.apply(inputs, (), leaf, weight, None)[0]
        runs.append((values, torch.autograd.grad(values.sum(), leaf)[0]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_gradients_times_a_factor_are_rounded_once():
    """In one pass, whatever their dtype; a factor that is rounded to theirs first would be off by 1
    / 512."""
    factor, total = torch.tensor(1.00390625 / 3), torch.randn(5000, 3)
    for have, want in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        typed_total = total.to(have)
        product = _finish_gradient(typed_total.clone(), factor, torch.empty(0, dtype=want))
        assert torch.equal(product, (typed_total.float() * factor).to(want))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_a_label_every_field_keeps_its_dtype_and_shape(dtype):
    hidden, weight, bias, _, labels = make()
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), bias.to(dtype)
    options = {"bias": bias, "entropy": True, "mean_log_probs": True, "metrics": METRICS}
    some = token_log_probs(hidden, weight, labels, **options)
    none = token_log_probs(hidden, weight, torch.full_like(labels, -100), **options)
    for field in dataclasses.fields(some):
        ours, expected = getattr(none, field.name), getattr(some, field.name)
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape), field.name
        assert not ours.any(), field.name
    assert none.is_top1.dtype == torch.bool


def test_an_entropy_may_be_written_to():
    """As a program masks tokens in place."""
    runs = []
    for write in (False, True):
        hidden, weight = (
            torch.randn(n, 8, dtype=torch.float64, generator=seeded(n)).requires_grad_()
            for n in (9, 17)
        )
        values = token_log_probs(hidden, weight, torch.arange(9), entropy=True)
        (values.entropy.mul_(0.5) if write else values.entropy * 0.5).sum().backward()
        runs.append((hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def write_in_place(x):
    with torch.no_grad():
        x.add_(0.3)


def write_to_data(x):
    x.data.add_(0.3)


def step_fused(x):
    x.grad = torch.ones_like(x)
    torch.optim.AdamW([x], lr=0.1, fused=True).step()
    x.grad = None


@pytest.mark.parametrize("part", ["norm", "weight", "bias"])
@pytest.mark.parametrize("change", [write_in_place, write_to_data, step_fused])
def test_a_head_that_changed_since_forward_is_refused(change, part):
    """Backward computes logits again: of other weights they are another model's."""
    hidden, weight, bias, norm, labels = make()
    parts = {"norm": norm.weight, "weight": nn.Parameter(weight), "bias": nn.Parameter(bias)}
    loss = -token_log_probs(
        hidden, parts["weight"], labels, norm=norm, bias=parts["bias"]
    ).log_probs.sum()
    change(parts[part])
    with pytest.raises(
        RuntimeError, match=r"changed since forward|modified by an inplace operation"
    ):
        loss.backward()
