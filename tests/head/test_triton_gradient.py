"""The gradient's kernel against torch, in Triton's interpreter; on a GPU as it is.

covers: head/blocks.py, head/log_probs.py, head/one_pass.py, head/triton_fold.py,
head/triton_gradient.py
"""

from __future__ import annotations

import dataclasses
import itertools
from unittest import mock

import pytest
import torch

from streambp.head import blocks, token_log_probs, triton_fold, triton_gradient
from streambp.head.blocks import Projection, TokenGradients, gradient_in_torch
from streambp.head.log_probs import make_inputs
from streambp.head.one_pass import OnePassNLL, PendingGradients
from tests.head.interpreter import hard_rows
from tests.head.test_triton_fold import PROJECTIONS
from tests.seeds import seeded

USED_FLAGS = tuple(
    tuple(map(bool, flags))
    for flags in (
        (1, 0, 0),
        (1, 1, 0),
        (1, 0, 1),
        (0, 1, 1, 1),
        (1, 1, 1),
        (1, 0, 0, 1),
        (1, 0, 1, 1),
    )
)

UPSTREAM = ("d_log_probs", "d_entropy", "d_mean_log_probs", "d_lse")


def kernel_gradient(product, projection, token_gradients, block):
    """The kernel's gradient of a product that is a slice of a larger one, around which nothing may
    change."""
    surrounded = torch.full((product.shape[0] + 1, product.shape[1] + 5), 77.0).to(product)
    inner = surrounded[:-1, 2:-3]
    inner.copy_(product)
    triton_gradient.write_gradient(
        inner, token_gradients.labels, block.start, token_gradients.lse,
        (
            token_gradients.d_log_probs, token_gradients.d_entropy,
            token_gradients.d_mean_log_probs, token_gradients.d_lse,
        ),
        token_gradients.entropy, token_gradients.vocabulary,
        projection.logit_scale, projection.softcap, projection.temperature,
    )  # fmt: skip
    assert (surrounded[:, :2] == 77).all()
    assert (surrounded[:, -3:] == 77).all()
    assert (surrounded[-1] == 77).all()
    return inner.clone()


def task(product, projection, flags, generator, vocabulary):
    """Statistics and upstream gradients for rows of a block that starts at entry 100 of
    `vocabulary`."""
    rows, columns = product.shape
    logits = projection.logits(product)
    random = lambda: torch.randn(rows, generator=generator).to(product.device)  # noqa: E731
    lse = logits.logsumexp(-1) + 0.3  # other blocks have entries too
    labels = torch.randint(100, 100 + columns, (rows,), generator=generator).to(product.device)
    labels[0], labels[-1], labels[rows // 2] = 99, 100 + columns, -100  # outside, and ignored
    upstream = [random() if flag else None for flag in flags]
    return TokenGradients(labels, lse, random().abs(), vocabulary, *upstream)


def widened(token_gradients):
    """The same numbers in float64."""
    values = (getattr(token_gradients, name) for name in token_gradients.__dataclass_fields__)
    wide = (
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values
    )
    return TokenGradients(*wide)


def error_of(gradient, exact):
    """Beyond one rounding to the dtype, over the row's largest gradient. The interpreter truncates
    to bfloat16."""
    assert gradient.isfinite().all()
    info = torch.finfo(gradient.dtype)
    truncated = gradient.dtype == torch.bfloat16 and gradient.device.type == "cpu"
    units = 0.0 if gradient.dtype == torch.float32 else 1.0 if truncated else 0.501
    rounding = units * (info.eps * exact.abs() + info.smallest_normal)
    excess = ((gradient.double() - exact).abs() - rounding).clamp(min=0)
    return (excess / exact.abs().amax(-1, keepdim=True)).amax()


def compare(device="cpu"):
    generator = seeded(0)
    for dtype, columns in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (7, 1000, 5001)
    ):
        product = (torch.randn(6, columns, generator=generator) * 4).to(device, dtype)
        for index, flags in enumerate(USED_FLAGS):
            projection = PROJECTIONS[(index + columns) % 3]
            token_gradients = task(product, projection, flags, generator, 2 * columns)
            block = slice(100, 100 + columns)
            exact = gradient_in_torch(product.double(), projection, widened(token_gradients), block)
            gradient = kernel_gradient(product, projection, token_gradients, block)
            assert error_of(gradient, exact) <= 3e-6, (dtype, projection, flags)


def compare_hard_rows(device="cpu"):
    """Against the gradient in float64, of rows with -inf and with logits far from each other and
    from 0."""
    generator = seeded(1)
    product = hard_rows(10, 5003, generator).to(device)
    for dtype, flags in itertools.product((torch.float32, torch.bfloat16), USED_FLAGS):
        x = product.to(dtype)
        token_gradients = task(x, Projection(), flags, generator, 6000)
        block = slice(100, 5103)
        gradient = kernel_gradient(x, Projection(), token_gradients, block)
        exact = gradient_in_torch(x.double(), Projection(), widened(token_gradients), block)
        # exp(z - lse) is as exact as z - lse: float32 knows logits around 30,000 to 1 / 512.
        assert error_of(gradient, exact) <= 4e-3
        assert error_of(gradient[::5], exact[::5]) <= 3e-6


def compare_mutants(device="cpu"):
    """What `error_of` says of kernels that are wrong in one thing."""
    generator = seeded(3)
    product = torch.randn(6, 1000, generator=generator).to(device)
    projection, block = Projection(1.3, 3.0, 0.8), slice(100, 1100)
    token_gradients = task(product, projection, (True, True, True, True), generator, 2000)
    exact = gradient_in_torch(product.double(), projection, widened(token_gradients), block)
    change = dataclasses.replace
    mutants = [
        (projection, token_gradients, slice(101, 1101)),
        (projection, change(token_gradients, lse=token_gradients.lse + 1e-3), block),
        (projection, change(token_gradients, entropy=token_gradients.entropy * 1.01), block),
        (projection, change(token_gradients, vocabulary=1000), block),
        *((projection, change(token_gradients, **{name: None}), block) for name in UPSTREAM),
        *((change(projection, **{name: value}), token_gradients, block) for name, value in (
            ("logit_scale", 1.31), ("softcap", None), ("temperature", 0.81)
        )),
    ]  # fmt: skip
    assert error_of(kernel_gradient(product, projection, token_gradients, block), exact) <= 3e-6
    for mutant in mutants:
        assert error_of(kernel_gradient(product, *mutant), exact) > 3e-5, mutant


def run_heads(device):
    """Values and gradients of both heads: a wide vocabulary, ignored rows, every option."""
    generator = seeded(2)
    hidden, weight = (
        torch.randn(n, 8, generator=generator).to(device).requires_grad_() for n in (23, 4099)
    )
    bias = torch.randn(4099, generator=generator).to(device).requires_grad_()
    labels = torch.randint(0, 4099, (23,), generator=generator).to(device)
    labels[::3] = -100
    values = token_log_probs(
        hidden, weight, labels, bias=bias, softcap=2.0, temperature=0.7, entropy=True, mean_log_probs=True,
        metrics=("is_top1", "mean_logits", "log_sum_sq_probs"),
    )  # fmt: skip
    loss = (values.log_probs.exp() + values.entropy.square() + values.mean_log_probs.sin()).sum()
    inputs = make_inputs(hidden, labels, Projection(0.5), None, -100)
    scale = torch.ones((), device=device)
    loss = loss + 0.1 * OnePassNLL.apply(inputs, PendingGradients(), scale, hidden, weight, bias)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    return [*(getattr(values, name) for name in values.__dataclass_fields__), *gradients]


def compare_heads(device="cpu"):
    """The heads as a whole, on kernels and on torch, in several blocks of tokens."""
    served = lambda device, dtype: triton_fold.supports_kernels(torch.device("meta"), dtype)  # noqa: E731
    small = {"BYTES_PER_BLOCK": 7 * 4099 * 4, "LOGITS_PER_BLOCK": 3 * 4099}
    runs = []
    for serves in (served, lambda device, dtype: False):
        with mock.patch.multiple(blocks, supports_kernels=serves, **small):
            runs.append(run_heads(device))
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=2e-5, atol=2e-5 * theirs.float().abs().max().item()
        )


@pytest.mark.gpu
@pytest.mark.parametrize("check", [compare, compare_hard_rows, compare_mutants, compare_heads])
def test_on_a_gpu(check):
    check("cuda")


def test_forbidden_entries_have_no_gradient():
    """torch's way: logits of -inf, with entropy, against autograd over the other entries."""
    z = torch.randn(3, 9, dtype=torch.float64)
    allowed_columns = torch.tensor([0, 1, 3, 4, 7, 8])
    labels, upstream = torch.tensor([1, 3, 8]), torch.randn(2, 3, dtype=torch.float64)
    leaf = z[:, allowed_columns].requires_grad_()
    log_p = leaf.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    label_log_probs = log_p.gather(1, torch.searchsorted(allowed_columns, labels)[:, None])[:, 0]
    (expected,) = torch.autograd.grad(
        (label_log_probs * upstream[0] + entropy * upstream[1]).sum(), leaf
    )
    full = torch.full_like(z, -torch.inf).index_copy(1, allowed_columns, z[:, allowed_columns])
    token_gradients = TokenGradients(labels, full.logsumexp(-1), entropy.detach(), 9, *upstream)
    gradient = gradient_in_torch(full, Projection(), token_gradients, slice(0, 9))
    torch.testing.assert_close(
        gradient,
        torch.zeros_like(z).index_copy(1, allowed_columns, expected),
        rtol=1e-12,
        atol=1e-13,
    )
