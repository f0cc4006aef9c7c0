"""What a mixture of experts costs in chunks: every chunk writes a gradient of all experts' weights.

covers: layer/gradients.py, layer/recompute.py
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import streambp
from tests import zoo
from tests.counting import WrittenBytes
from tests.seeds import seed_torch

# experts times their width: the same weights, cut into more or fewer experts
EXPERT_WEIGHTS = 128 * 64


def written_per_chunk(experts, length=256, chunk_size=128):
    """Bytes written by a chunk of the backward of a one-layer model, in units of its experts'
    weights."""
    config = zoo.tiny_config(
        "qwen3_moe", num_experts=experts, num_local_experts=experts, num_experts_per_tok=4, num_hidden_layers=1,
        hidden_size=256, moe_intermediate_size=EXPERT_WEIGHTS // experts,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    seed_torch(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    weights = sum(
        p.numel() * p.element_size() for n, p in model.named_parameters() if ".experts." in n
    )
    assert weights == 3 * EXPERT_WEIGHTS * 256 * 2
    streambp.patch(model, streambp.StreamConfig(chunk_size=chunk_size))
    ids = torch.randint(3, 50, (1, length))
    for _ in range(2):  # the first step probes
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        with WrittenBytes() as counter:
            loss.backward()
    return counter.total / (length // chunk_size) / weights


@pytest.mark.full
def test_more_experts_write_no_more_bytes():
    """A chunk writes the weights' gradient (1 x, in bf16) and adds it up in float32 (2 x); 128
    experts as much as 8."""
    of_8, of_128 = written_per_chunk(8), written_per_chunk(128)
    print(
        f"bytes a chunk's backward writes, in units of the experts' weights: {of_8:.2f} with 8 "
        f"experts, {of_128:.2f} with 128"
    )
    assert of_128 <= of_8
    assert of_128 <= 5.5  # 4.97 with torch 2.13, 5.07 with 2.11
