"""The law of weights on the host, of the sizes that plans are for, against the bytes of steps on
tensors without data.

covers: planner/host_weights.py, offload/weights.py, offload/gradients.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import GptOssConfig, LlamaConfig, Qwen3Config

from streambp import StreamConfig
from streambp.admission.stacks import find_stacks
from streambp.model.patching import install
from streambp.offload import gradients, ranges
from streambp.offload import weights as host_weights
from streambp.offload.engines import Engine
from streambp.planner import Setting
from streambp.planner.count import StepCount
from streambp.planner.estimate import estimate
from streambp.planner.plan import put_weights_on_host
from streambp.planner.profile import peak
from streambp.planner.skeleton import Skeleton
from streambp.planner.step import run_step
from tests.offload.test_weights import mutant
from tests.offload.weights_runs import weights_of

META = torch.device("meta")
LAYERS, LENGTH, CHUNK, RANK = 6, 16384, 4096, 16
LLAMA_70B = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=LAYERS, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=128256,
)  # fmt: skip
QWEN = {
    "hidden_size": 5120,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN_32B = Qwen3Config(**QWEN, intermediate_size=25600, num_attention_heads=64)
QWEN_14B = Qwen3Config(**QWEN, intermediate_size=17408, num_attention_heads=40)
GPT_OSS_120B = GptOssConfig(
    num_hidden_layers=LAYERS, num_local_experts=128, tie_word_embeddings=False
)
CASES = {
    "Llama-70B, LoRA": (LLAMA_70B, RANK), "Qwen3-32B, LoRA": (QWEN_32B, RANK), "gpt-oss-120b, LoRA": (GPT_OSS_120B, RANK),
    "Qwen3-14B, full": (QWEN_14B, None),
}  # fmt: skip


class WithoutData(Engine):
    """Host memory without data."""

    def host_buffer(self, size):
        return torch.empty(size, dtype=torch.uint8, device=META)


def viewed(memory, offset, like):
    """Of host memory, which is not counted."""
    with _disable_current_modes():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=META)


def counted(config, rank, monkeypatch):
    """The weights of a model's layers, and the most bytes that a second step has on its device."""
    skeleton = Skeleton(config, torch.bfloat16, rank, 16, "cuda")
    model = skeleton.model
    install(model, StreamConfig(CHUNK, saves=(), weights="cpu", host_memory=2**50))
    weights = weights_of(model)
    weights._given_engine = WithoutData(META)
    monkeypatch.setattr(ranges, "view_of", viewed)
    monkeypatch.setattr(host_weights, "view_of", viewed)
    # which would refuse them
    mutant(monkeypatch, ranges.HostRanges, "move_layer", " or tensor.is_meta", "")
    (layers,) = (stack.layers for stack in find_stacks(model).stacks)

    def loss():
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    with skeleton.running():
        ids = torch.empty(1, LENGTH, dtype=torch.long)
        weights.begin(ids)  # slots are made outside of the count
        host_tensors = {
            id(weight_slice.tensor)
            for layer_weights in weights.ranges.layers.values()
            for weight_slice in layer_weights.slices
        }
        for layer_weights in weights.ranges.layers.values():
            if layer_weights.trains:  # so are buffers
                buffer = gradients.GradientBuffer(torch.empty_like(layer_weights.memory))
                weights._buffers.append(buffer)
        spans = run_step(model, layers, loss, StepCount("cudnn"))
    resident = sum(p.nbytes for p in model.parameters() if id(p) not in host_tensors)
    return weights, resident + weights.device_bytes + max(span.peak for span in spans)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_the_law_is_within_three_percent(name, monkeypatch):
    config, rank = CASES[name]
    profile = estimate(config, LENGTH, chunk_size=CHUNK, lora=rank).profile
    method = next(method for method in profile.methods if method.name == "streambp")
    setting = put_weights_on_host(profile, Setting(optimizer=0, weights="cpu"))
    expected = peak(profile, method, LENGTH, CHUNK, setting)
    weights, peak_bytes = counted(config, rank, monkeypatch)
    host_bytes = weights.ranges.bytes + sum(
        layer_weights.memory.numel()
        for layer_weights in weights.ranges.layers.values()
        if layer_weights.trains
    )
    print(
        f"{name}: {peak_bytes / 2**30:.2f} GiB counted, {expected.total / 2**30:.2f} by the law; "
        f"host {host_bytes / 2**30:.2f}"
    )
    assert expected.host == pytest.approx(host_bytes, rel=0.01)
    assert peak_bytes == pytest.approx(expected.total, rel=0.03)
    resident = peak(profile, method, LENGTH, CHUNK, dataclasses.replace(setting, on_host=None))
    assert peak_bytes < 0.9 * resident.total
