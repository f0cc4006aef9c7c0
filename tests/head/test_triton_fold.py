"""The Triton kernel against torch, in Triton's interpreter; on a GPU as it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from streambp.head import triton_fold
from streambp.head.blocks import Fold, Projection, fold_in_torch
from tests.seeds import seeded

PROJECTIONS = (Projection(), Projection(0.3, None, 1.7), Projection(1.3, 3.0, 0.8))


def compare(device="cpu"):
    """Blocks that are wider and narrower than the kernel's, rows of a slice, labels inside and outside of the block."""
    generator = seeded(0)
    for dtype in (torch.float32, torch.bfloat16):
        for columns in (7, 1000, 5000):
            wide = torch.randn(5, columns + 3, generator=generator) * 4
            product = wide.to(device, dtype)[:, :columns]
            labels = torch.tensor([100, 101, 100 + columns - 1, 99, 100 + columns], device=device)
            for projection in PROJECTIONS:
                block = slice(100, 100 + columns)
                expected = fold_in_torch(projection.logits(product), labels, block)
                options = (projection.logit_scale, projection.softcap, projection.temperature)
                found = Fold(*triton_fold.fold_rows(product, labels, 100, *options))
                assert torch.equal(found.best, expected.best)
                for name in ("max", "sum", "target", "mean", "squares", "total"):
                    ours, theirs = getattr(found, name), getattr(expected, name)
                    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * columns**0.5, msg=name)


@pytest.mark.skipif(not triton_fold.AVAILABLE, reason="triton is not installed")
def test_in_the_interpreter():
    code = "from tests.head.test_triton_fold import compare; compare()"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.gpu
def test_on_a_gpu():
    compare("cuda")
