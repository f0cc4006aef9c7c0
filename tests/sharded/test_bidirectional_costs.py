"""What layers cost whose attention reads ahead: products of Linears beside causal streaming, and
bytes that backward keeps alive beside torch's checkpointing. In a Qwen3-8B shape the bytes are
counted on tensors without data.

covers: sharded/split_attention.py, sharded/bidirectional.py
"""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model
from transformers.masking_utils import bidirectional_mask_function

import streambp
from streambp.admission.stacks import kind_of
from streambp.attention.masks import LazyMask
from streambp.layer.layer_state import LayerState
from streambp.planner.count import LiveBytes
from streambp.sharded import layer as halves
from streambp.sharded.bidirectional import stream_bidirectional
from streambp.sharded.split_attention import AllQueriesAttention
from tests.counting import LinearFlops
from tests.layer.test_bytes import KB, checkpointed, qwen3_8b_layer, run_layer
from tests.seeds import seed_torch

HIDDEN = 128
CHUNK = 64
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64,
}  # fmt: skip
MODELS = {"llama": (LlamaModel, LlamaConfig), "qwen3": (Qwen3Model, Qwen3Config)}


def make_model(name, bidirectional):
    seed_torch()
    model_class, config_class = MODELS[name]
    model = model_class(config_class(**SIZES, is_causal=not bidirectional)).train()
    for layer in model.layers:
        layer.self_attn.is_causal = not bidirectional
    return model


def streamed(name, bidirectional):
    return streambp.patch(
        make_model(name, bidirectional), streambp.StreamConfig(chunk_size=CHUNK, saves=())
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
    monkeypatch.setattr(halves, "skip_outputs", lambda linears, names: halves.NULL_CONTEXT)
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
    unpatched = make_model("llama", True)
    unpatched.gradient_checkpointing_enable()
    token_bytes = {
        "checkpointing": hidden_sizes_of_a_token(unpatched),
        "causal": hidden_sizes_of_a_token(streamed("llama", False)),
        "bidirectional": hidden_sizes_of_a_token(streamed("llama", True)),
    }
    print(token_bytes)
    assert (
        token_bytes["bidirectional"] <= token_bytes["causal"] + 1.2
    )  # q of all tokens, then its gradient
    assert token_bytes["bidirectional"] <= token_bytes["checkpointing"] / 2


LENGTHS = (2**16, 2**17)


def in_halves():
    """Run a layer in halves, as `run_layer` calls it."""
    index = itertools.count()

    def forward(layer, x, position_embeddings):
        layer.self_attn.is_causal = False
        config = streambp.StreamConfig(chunk_size=2**14, saves=())
        layer_state = LayerState(layer, config, index=next(index), kind=kind_of(layer))
        length = x.shape[1]
        mask = LazyMask(
            mask_function=bidirectional_mask_function, q_length=length, kv_length=length
        )
        arguments = {"attention_mask": mask, "position_embeddings": position_embeddings}
        return stream_bidirectional(layer_state, (x,), arguments, None, ())

    return forward


def bytes_of_a_token(forward):
    """Of a Qwen3-8B layer's backward beyond its input, if the incoming gradient's buffer is
    reused."""
    shorter, longer = (run_layer(qwen3_8b_layer(), length, forward()) for length in LENGTHS)
    return (longer["first layer"] - shorter["first layer"]) / (LENGTHS[1] - LENGTHS[0]) / KB


def test_bytes_of_a_token_in_a_qwen3_8b_shape():
    """Causal streaming keeps 20.5 KB alive (tests/layer/test_bytes.py). Queries, and then their
    gradients, are 8 KB."""
    kilobytes = bytes_of_a_token(in_halves)
    print(f"bidirectional layer, gradient's buffer reused: {kilobytes:.2f} KB a token")
    assert kilobytes <= 28.5


@pytest.mark.full
def test_bytes_of_a_token_under_checkpointing():
    kilobytes = bytes_of_a_token(lambda: checkpointed)
    print(f"torch's checkpointing: {kilobytes:.1f} KB a token")
    assert kilobytes >= 250


@pytest.mark.full
def test_the_mutant_that_attends_all_queries_at_once_is_noticed(monkeypatch):
    monkeypatch.setattr(halves, "ChunkwiseAttention", AllQueriesAttention)
    with pytest.raises(AssertionError):
        test_bytes_of_a_token_in_a_qwen3_8b_shape()
