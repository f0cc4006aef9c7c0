"""The CUDA path under pytest: `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

import argparse

import pytest
import torch

from tests.gpu import report

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("spans", report.SPANS)
def test_gradients_are_as_precise_as_unpatched_ones(spans):
    rows = list(report.errors(spans, argparse.Namespace(tiny=False, device="cuda")))
    assert rows
    assert not [line for line, passed in rows if not passed]


@pytest.mark.parametrize("spans", ["plain", "window"])
def test_the_report_runs_without_a_gpu(spans):
    rows = list(report.errors(spans, argparse.Namespace(tiny=True, device="cpu")))
    assert len(rows) == 2 * len(report.SAVES)
    assert all(passed for _, passed in rows)
