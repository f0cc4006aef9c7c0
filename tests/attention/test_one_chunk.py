"""Where a chunk is the whole sequence, its own keys and values are the buffers.

covers: attention/kv.py, attention/prefix.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.attention.kv import KVBuffer
from streambp.errors import BackwardError
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error

ONE_CHUNK = streambp.StreamConfig(chunk_size=64)


@pytest.fixture
def one_chunk_buffers(monkeypatch):
    """How many attention calls took the layer's own keys and values."""
    buffers, real = [], KVBuffer.from_one_chunk
    monkeypatch.setattr(
        KVBuffer, "from_one_chunk", lambda *tensors: buffers.append(real(*tensors)) or buffers[-1]
    )
    return buffers


@pytest.mark.parametrize("saves", [(), ("attn_out",), ("kv",), ("attn_out", "kv")])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3"])
def test_gradients_are_exact(family, saves, one_chunk_buffers, float64_oracle):
    stock, batch = build(family, torch.float64), make_batch("padded")
    ours = streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(chunk_size=64, saves=saves, rows="as_given")
    )
    assert worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= 1e-10
    assert one_chunk_buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_but_copies_is_spared(dtype, one_chunk_buffers, monkeypatch):
    """The bits are those of buffers that k and v are copied to, and of accumulators."""
    stock, batch = build("qwen3", dtype), make_batch("plain")
    _, our_gradients = gradients(streambp.patch(copy.deepcopy(stock), ONE_CHUNK), **batch)
    assert any(layer_state is not None for layer_state in one_chunk_buffers)
    monkeypatch.setattr(KVBuffer, "from_one_chunk", lambda *_: None)
    monkeypatch.setattr(KVBuffer, "add", add_to_zeros)
    _, expected = gradients(streambp.patch(copy.deepcopy(stock), ONE_CHUNK), **batch)
    assert all(torch.equal(our_gradients[name], expected[name]) for name in expected)


def add_to_zeros(self, block, dk, dv):
    rows, keys = slice(block.b0, block.b1), slice(block.k0, block.k1)
    for total, part in zip(self.grow_accumulators(), (dk, dv), strict=True):
        self.add_once(total[rows, keys], part.transpose(1, 2))


def test_memory_that_holds_more_is_copied():
    """A view of the product of q, k and v would keep all three."""
    k = torch.randn(2, 7, 3, 4).transpose(1, 2)  # [B, H_kv, T, D]
    assert KVBuffer.from_one_chunk(k, k) is not None
    keys_and_values = torch.randn(2, 2, 7, 3, 4)
    assert (
        KVBuffer.from_one_chunk(
            keys_and_values[0].transpose(1, 2), keys_and_values[1].transpose(1, 2)
        )
        is None
    )
    assert KVBuffer.from_one_chunk(k.contiguous(), k) is None


def test_who_writes_to_values_afterwards_is_refused():
    """Torch refuses it in an unpatched model, whose attention saves them."""
    model = build("qwen3")
    streambp.patch(model, ONE_CHUNK)
    gradients(model, **make_batch("plain"))
    values = []
    attention = model.model.layers[1].self_attn
    attention.v_proj.register_forward_hook(lambda module, args, output: values.append(output))

    def write(module, args):
        with torch.no_grad():
            values.pop().add_(0.0)

    attention.o_proj.register_forward_pre_hook(write)
    with pytest.raises(BackwardError, match="writes in place to keys or values"):
        gradients(model, **make_batch("plain"))
