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
from streambp.head.one_pass import OnePassNLL, Pending
from tests.head.interpreter import hard_rows
from tests.head.test_triton_fold import PROJECTIONS
from tests.seeds import seeded

USED = tuple(
    tuple(map(bool, used))
    for used in (
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


def written(product, projection, given, block):
    """The kernel's gradient of a product that is a slice of a larger one, around which nothing may
    change."""
    surrounded = torch.full((product.shape[0] + 1, product.shape[1] + 5), 77.0).to(product)
    place = surrounded[:-1, 2:-3]
    place.copy_(product)
    triton_gradient.write_gradient(
        place, given.labels, block.start, given.lse,
        (given.d_log_probs, given.d_entropy, given.d_mean_log_probs, given.d_lse), given.entropy, given.vocabulary,
        projection.logit_scale, projection.softcap, projection.temperature,
    )  # fmt: skip
    assert (surrounded[:, :2] == 77).all()
    assert (surrounded[:, -3:] == 77).all()
    assert (surrounded[-1] == 77).all()
    return place.clone()


def task(product, projection, used, generator, vocabulary):
    """Statistics and upstream gradients for rows of a block that starts at entry 100 of
    `vocabulary`."""
    rows, columns = product.shape
    logits = projection.logits(product)
    random = lambda: torch.randn(rows, generator=generator).to(product.device)  # noqa: E731
    lse = logits.logsumexp(-1) + 0.3  # other blocks have entries too
    labels = torch.randint(100, 100 + columns, (rows,), generator=generator).to(product.device)
    labels[0], labels[-1], labels[rows // 2] = 99, 100 + columns, -100  # outside, and ignored
    upstream = [random() if wanted else None for wanted in used]
    return TokenGradients(labels, lse, random().abs(), vocabulary, *upstream)


def widened(given):
    """The same numbers in float64."""
    values = (getattr(given, name) for name in given.__dataclass_fields__)
    wide = (
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values
    )
    return TokenGradients(*wide)


def error_of(found, exact):
    """Beyond one rounding to the dtype, over the row's largest gradient. The interpreter truncates
    to bfloat16."""
    assert found.isfinite().all()
    info = torch.finfo(found.dtype)
    truncated = found.dtype == torch.bfloat16 and found.device.type == "cpu"
    units = 0.0 if found.dtype == torch.float32 else 1.0 if truncated else 0.501
    rounding = units * (info.eps * exact.abs() + info.smallest_normal)
    beyond = ((found.double() - exact).abs() - rounding).clamp(min=0)
    return (beyond / exact.abs().amax(-1, keepdim=True)).amax()


def compare(device="cpu"):
    generator = seeded(0)
    for dtype, columns in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (7, 1000, 5001)
    ):
        product = (torch.randn(6, columns, generator=generator) * 4).to(device, dtype)
        for index, used in enumerate(USED):
            projection = PROJECTIONS[(index + columns) % 3]
            given = task(product, projection, used, generator, 2 * columns)
            block = slice(100, 100 + columns)
            exact = gradient_in_torch(product.double(), projection, widened(given), block)
            found = written(product, projection, given, block)
            assert error_of(found, exact) <= 3e-6, (dtype, projection, used)


def compare_hard_rows(device="cpu"):
    """Against the gradient in float64, of rows with -inf and with logits far from each other and
    from 0."""
    generator = seeded(1)
    product = hard_rows(10, 5003, generator).to(device)
    for dtype, used in itertools.product((torch.float32, torch.bfloat16), USED):
        x = product.to(dtype)
        given = task(x, Projection(), used, generator, 6000)
        block = slice(100, 5103)
        found = written(x, Projection(), given, block)
        exact = gradient_in_torch(x.double(), Projection(), widened(given), block)
        # exp(z - lse) is as exact as z - lse: float32 knows logits around 30,000 to 1 / 512.
        assert error_of(found, exact) <= 4e-3
        assert error_of(found[::5], exact[::5]) <= 3e-6


def compare_mutants(device="cpu"):
    """What `error_of` says of kernels that are wrong in one thing."""
    generator = seeded(3)
    product = torch.randn(6, 1000, generator=generator).to(device)
    projection, block = Projection(1.3, 3.0, 0.8), slice(100, 1100)
    given = task(product, projection, (True, True, True, True), generator, 2000)
    exact = gradient_in_torch(product.double(), projection, widened(given), block)
    change = dataclasses.replace
    mutants = [
        (projection, given, slice(101, 1101)),
        (projection, change(given, lse=given.lse + 1e-3), block),
        (projection, change(given, entropy=given.entropy * 1.01), block),
        (projection, change(given, vocabulary=1000), block),
        *((projection, change(given, **{name: None}), block) for name in UPSTREAM),
        *((change(projection, **{name: value}), given, block) for name, value in (
            ("logit_scale", 1.31), ("softcap", None), ("temperature", 0.81)
        )),
    ]  # fmt: skip
    assert error_of(written(product, projection, given, block), exact) <= 3e-6
    for mutant in mutants:
        assert error_of(written(product, *mutant), exact) > 3e-5, mutant


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
    loss = loss + 0.1 * OnePassNLL.apply(inputs, Pending(), scale, hidden, weight, bias)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    return [*(getattr(values, name) for name in values.__dataclass_fields__), *gradients]


def compare_heads(device="cpu"):
    """The heads as a whole, on kernels and on torch, in several blocks of tokens."""
    served = lambda device, dtype: triton_fold.serves(torch.device("meta"), dtype)  # noqa: E731
    small = {"BYTES_PER_BLOCK": 7 * 4099 * 4, "LOGITS_PER_BLOCK": 3 * 4099}
    runs = []
    for serves in (served, lambda device, dtype: False):
        with mock.patch.multiple(blocks, serves=serves, **small):
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
    kept = torch.tensor([0, 1, 3, 4, 7, 8])
    labels, upstream = torch.tensor([1, 3, 8]), torch.randn(2, 3, dtype=torch.float64)
    leaf = z[:, kept].requires_grad_()
    log_p = leaf.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    chosen = log_p.gather(1, torch.searchsorted(kept, labels)[:, None])[:, 0]
    (expected,) = torch.autograd.grad((chosen * upstream[0] + entropy * upstream[1]).sum(), leaf)
    full = torch.full_like(z, -torch.inf).index_copy(1, kept, z[:, kept])
    given = TokenGradients(labels, full.logsumexp(-1), entropy.detach(), 9, *upstream)
    found = gradient_in_torch(full, Projection(), given, slice(0, 9))
    torch.testing.assert_close(
        found, torch.zeros_like(z).index_copy(1, kept, expected), rtol=1e-12, atol=1e-13
    )
