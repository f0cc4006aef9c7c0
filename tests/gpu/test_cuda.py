"""The CUDA path under pytest: `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

import argparse

import pytest
import torch

import streambp
from tests.families import build, make_batch
from tests.gpu import report
from tests.oracle import relative_l2

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


@pytest.mark.gpu
@needs_gpu
def test_offloading_changes_nothing():
    """As close to a run without it as two such runs are to each other (FlashAttention's backward adds in any order)."""

    def gradient(offload):
        model = build("qwen3", torch.bfloat16, num_hidden_layers=4, hidden_size=512, head_dim=128).cuda()
        saves = ("attn_out", "kv")
        streambp.patch(model, streambp.StreamConfig(chunk_size=1024, saves=saves, offload=offload))
        batch = {name: value.cuda() for name, value in make_batch("plain", length=8192).items()}
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            model(**batch, use_cache=False).loss.backward()
        return {name: p.grad.float() for name, p in model.named_parameters()}

    plain, again, moved = gradient("none"), gradient("none"), gradient("cpu")
    assert relative_l2(moved, plain) <= 2 * relative_l2(again, plain)
