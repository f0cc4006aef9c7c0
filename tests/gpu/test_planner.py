"""Predicted against the allocator's peaks: `python -m pytest -s -m gpu tests/gpu/test_planner.py
[-k 16384]`.

covers: planner/estimate.py
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import streambp
from streambp.planner import Setting, estimate
from tests.planner.test_estimates import GIB, QWEN3_8B


@pytest.mark.gpu
@pytest.mark.parametrize("length", [16384, 32768, 65536])
def test_streamed_peaks_within_ten_percent(length):
    """Forward and backward of the Qwen3-8B shape, weights and gradients left out; needs about 60
    GiB."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(QWEN3_8B, dtype=torch.bfloat16).train()
    chunk_size = 8192
    predicted = estimate(
        model, length, chunk_size=chunk_size, setting=Setting(optimizer=0)
    ).streamed.peak
    streambp.patch(model, streambp.StreamConfig(kernels="own", chunk_size=chunk_size, saves=()))
    ids = torch.randint(0, QWEN3_8B.vocab_size, (1, length), device="cuda")
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids).loss.backward()
    weights = sum(p.nbytes for p in model.parameters())
    measured = torch.cuda.max_memory_allocated() - weights - predicted.gradients
    peaks_text = (
        f"predicted {predicted.activations / GIB:.2f} GiB in {predicted.phase}, measured "
        f"{measured / GIB:.2f}"
    )
    print(f"T = {length:,}: {peaks_text}", flush=True)
    assert abs(predicted.activations / measured - 1) <= 0.10
