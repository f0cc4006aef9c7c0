"""What layers cost whose attention reads ahead: products of Linears beside causal streaming, and
bytes that backward keeps alive beside torch's checkpointing.

covers: sharded/bidirectional.py
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

import streambp
from streambp.planner.count import LiveBytes
from streambp.sharded import layer as halves
from tests.counting import LinearFlops
from tests.seeds import seed_torch

HIDDEN = 128
CHUNK = 64
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64,
}  # fmt: skip
MODELS = {"llama": (LlamaModel, LlamaConfig), "qwen3": (Qwen3Model, Qwen3Config)}


def made(name, bidirectional):
    seed_torch()
    model_class, config_class = MODELS[name]
    model = model_class(config_class(**SIZES, is_causal=not bidirectional)).train()
    for layer in model.layers:
        layer.self_attn.is_causal = not bidirectional
    return model


def streamed(name, bidirectional):
    return streambp.patch(
        made(name, bidirectional), streambp.StreamConfig(chunk_size=CHUNK, saves=())
    )


def step(model, length, before_backward=lambda: None):
    x = torch.randn(1, length, HIDDEN, requires_grad=True)
    output = model(inputs_embeds=x, use_cache=False).last_hidden_state
    before_backward()
    output.backward(torch.ones_like(output))


def flops_of(model, length=5 * CHUNK + 1):
    """Of a step after the first, which tests the layer."""
    step(model, length)
    with LinearFlops() as flops:
        step(model, length)
    return flops.total


@pytest.mark.parametrize(("name", "bar"), [("llama", 1.0), ("qwen3", 1.05)])
def test_linear_products(name, bar):
    """The two halves make no product twice that a causal layer makes once. Norms of queries and
    keys need these products again."""
    ratio = flops_of(streamed(name, True)) / flops_of(streamed(name, False))
    print(f"{name}: {ratio:.3f} x causal streaming's Linear FLOPs")
    assert ratio <= bar


def test_the_mutant_that_leaves_no_product_out_is_noticed(monkeypatch):
    monkeypatch.setattr(halves, "left_out", lambda linears, names: halves.NULL_CONTEXT)
    with pytest.raises(AssertionError):
        test_linear_products("llama", 1.0)


def hidden_sizes_of_a_token(model):
    """Bytes of a token at the peak of backward, in units of a token's hidden states in float32: the
    slope between two lengths."""
    peaks = []
    for length in (6 * CHUNK, 12 * CHUNK):
        step(model, length)
        with LiveBytes() as count:
            step(model, length, count.reset_peak)
        peaks.append(count.peak)
    return (peaks[1] - peaks[0]) / (6 * CHUNK) / (4 * HIDDEN)


def test_bytes_that_backward_keeps_alive():
    unpatched = made("llama", True)
    unpatched.gradient_checkpointing_enable()
    found = {
        "checkpointing": hidden_sizes_of_a_token(unpatched),
        "causal": hidden_sizes_of_a_token(streamed("llama", False)),
        "bidirectional": hidden_sizes_of_a_token(streamed("llama", True)),
    }
    print(found)
    assert found["bidirectional"] <= found["causal"] + 3  # q of all tokens; o and do
    assert found["bidirectional"] <= found["checkpointing"] / 2
