"""The Triton kernel against torch, in Triton's interpreter; on a GPU as it is.

covers: head/blocks.py, head/triton_fold.py
"""

from __future__ import annotations

import pytest
import torch

from streambp.head import triton_fold
from streambp.head.blocks import Fold, Projection, fold_in_torch
from tests.head.interpreter import hard_rows
from tests.seeds import seeded

PROJECTIONS = (Projection(), Projection(0.3, None, 1.7), Projection(1.3, 3.0, 0.8))


def folded(product, projection, labels, first):
    options = (projection.logit_scale, projection.softcap, projection.temperature)
    return Fold(*triton_fold.fold_rows(product, labels, first, *options))


def compare(device="cpu"):
    """Blocks that are wider and narrower than the kernel's, rows of a slice, labels inside and
    outside of the block."""
    generator = seeded(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for columns in (7, 1000, 5000):
            wide = torch.randn(5, columns + 3, generator=generator) * 4
            product = wide.to(device, dtype)[:, :columns]
            labels = torch.tensor([100, 101, 100 + columns - 1, 99, 100 + columns], device=device)
            for projection in PROJECTIONS:
                block = slice(100, 100 + columns)
                expected = fold_in_torch(projection.logits(product), labels, block)
                statistics = folded(product, projection, labels, 100)
                assert torch.equal(statistics.best, expected.best)
                for name in ("max", "sum", "target", "mean", "squares", "total"):
                    ours, theirs = getattr(statistics, name), getattr(expected, name)
                    torch.testing.assert_close(
                        ours, theirs, rtol=2e-5, atol=2e-5 * columns**0.5, msg=name
                    )


def compare_hard_rows(device="cpu"):
    """Every statistic of the whole row, from two blocks of which the first is all -inf in a row,
    against float64."""
    product = hard_rows(10, 5003, seeded(1)).to(device)
    product[3, :4500] = -torch.inf
    labels = torch.tensor([0, 5002, 7, 5002, 2501, 1, 4999, 3, 5002, 2501], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        x = product.to(dtype)
        parts = [
            folded(x[:, block], Projection(), labels, block.start)
            for block in (slice(0, 4500), slice(4500, 5003))
        ]
        statistics = parts[0].merge(parts[1])
        z = x.double()
        log_p = z.log_softmax(-1)
        entropy = -torch.where(log_p.exp() == 0.0, 0.0, log_p.exp() * log_p).sum(-1)
        lse = statistics.max + statistics.sum.log()
        scale = z.masked_fill(z.isinf(), 0.0).abs().amax(-1)

        def close(ours, theirs, scale=scale):
            return ((ours - theirs).abs() <= 1e-6 * scale + 1e-5).all()

        assert close(statistics.target - lse, log_p.gather(1, labels[:, None])[:, 0])
        assert close(lse - statistics.mean / statistics.sum, entropy)
        assert close(statistics.squares.log() - 2 * statistics.sum.log(), (2 * log_p).logsumexp(-1))
        assert torch.equal(statistics.best, z.argmax(-1))


@pytest.mark.gpu
def test_on_a_gpu():
    compare("cuda")
    compare_hard_rows("cuda")


def test_a_block_without_finite_logits_adds_nothing():
    """torch's way: a vocabulary block that is forbidden as a whole."""
    logits = torch.randn(3, 12, dtype=torch.float64)
    labels = torch.tensor([5, 8, 11])
    expected = fold_in_torch(logits[:, 4:], labels, slice(4, 12))
    forbidden = torch.full((3, 4), -torch.inf, dtype=torch.float64)
    for parts in ((forbidden, logits[:, 4:]), (logits[:, 4:], forbidden)):
        start = 4 if parts[0] is forbidden else 12
        first = fold_in_torch(parts[0], labels, slice(start - parts[0].shape[1], start))
        statistics = first.merge(
            fold_in_torch(parts[1], labels, slice(start, start + parts[1].shape[1]))
        )
        for name in ("max", "sum", "mean", "squares"):
            assert torch.equal(getattr(statistics, name), getattr(expected, name)), name
