"""Bytes a token, counted on meta between T = 512k and 1M on a Qwen3-8B-shaped layer (DESIGN.md
section 4).

covers: head/log_probs.py, layer/layer_state.py, offload/arena.py, offload/engines.py, offload/manager.py
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from streambp.admission.entry import stream_layer
from streambp.config import StreamConfig
from streambp.head.log_probs import token_log_probs
from streambp.layer.layer_state import LayerState
from streambp.offload.arena import Arena
from streambp.offload.engines import Engine
from streambp.offload.manager import OffloadManager
from streambp.planner.count import LiveBytes

LENGTHS = (512 * 1024, 1024 * 1024)
KB = 1024


def qwen3_8b_layer():
    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        return Qwen3DecoderLayer(config, 0).to(torch.bfloat16).train()


def empty(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


class Source(torch.autograd.Function):
    """Ends a graph; its backward allocates the gradient that reaches the layer."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.new_empty(())

    @staticmethod
    def backward(ctx, grad):
        return empty(*ctx.shape)


def slope(measure, lengths=LENGTHS):
    """Bytes a token that `measure(T)` grows by."""
    short, long = (measure(length) for length in lengths)
    return (long - short) / (lengths[1] - lengths[0])


def run_layer(layer, length, forward, grad=True):
    """Peak bytes of forward, of the first layer's backward beyond its saved input, and of the
    second's likewise."""
    x = empty(1, length, 4096).requires_grad_(grad)
    peaks = {}
    with LiveBytes() as count, contextlib.nullcontext() if grad else torch.no_grad():
        cos, sin = empty(1, length, 128), empty(1, length, 128)
        middle = forward(layer, x, (cos, sin))
        peaks["forward"] = count.peak
        if not grad:
            return peaks
        saved_input = middle.untyped_storage().nbytes()

        def first_backward_done(gradient):
            peaks["last layer"] = count.peak - saved_input
            count.reset_peak()

        middle.register_hook(first_backward_done)
        end = Source.apply(forward(layer, middle, (cos, sin)))
        del middle
        count.reset_peak()
        end.backward()
        peaks["first layer"] = count.peak
    return peaks


def streamed(saves=(), offloader=None):
    index = itertools.count()

    def forward(layer, x, position_embeddings):
        config = StreamConfig(chunk_size=131072, saves=saves)
        layer_state = LayerState(layer, config, offloader=offloader, index=next(index))
        return stream_layer(
            layer_state, (x,), {"attention_mask": None, "position_embeddings": position_embeddings}
        )

    return forward


def flash_on_meta(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """FlashAttention's shapes; sdpa would count a [T, T] matrix on meta."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, True, scale=scaling
    )[0]
    return out.transpose(1, 2), None


def checkpointed(layer, x, position_embeddings):
    AttentionInterface.register("flash_on_meta", flash_on_meta)
    layer.self_attn.config._attn_implementation_internal = "flash_on_meta"
    return checkpoint(layer, x, None, None, None, False, position_embeddings, use_reentrant=False)


@pytest.fixture(scope="module")
def streamed_peaks():
    layer = qwen3_8b_layer()
    return {length: run_layer(layer, length, streamed()) for length in LENGTHS}


def test_backward_grows_by_29_kb_a_token(streamed_peaks):
    growth = slope(lambda length: streamed_peaks[length]["last layer"])
    print(f"streamed layer, backward beyond its input: {growth / KB:.2f} KB a token")
    assert growth <= 29 * KB


def test_backward_grows_by_21_kb_a_token_with_the_gradient_reused(streamed_peaks):
    growth = slope(lambda length: streamed_peaks[length]["first layer"])
    print(f"streamed layer, gradient's buffer reused: {growth / KB:.2f} KB a token")
    assert growth <= 21 * KB


def test_forward_without_grad_grows_by_21_kb_a_token():
    layer = qwen3_8b_layer()
    growth = slope(lambda length: run_layer(layer, length, streamed(), grad=False)["forward"])
    print(f"streamed layer, no_grad forward: {growth / KB:.2f} KB a token")
    assert growth <= 21 * KB


SHORT_LENGTHS = tuple(length // 8 for length in LENGTHS)


@pytest.mark.parametrize(
    ("norm", "lengths"),
    [*itertools.product([True, False], [SHORT_LENGTHS]),
     *(pytest.param(norm, LENGTHS, marks=pytest.mark.full) for norm in (True, False))],
)  # fmt: skip
def test_head_grows_by_8_5_kb_a_token(norm, lengths):
    with torch.device("meta"):
        final_norm = torch.nn.RMSNorm(4096, dtype=torch.bfloat16) if norm else None
    weight = empty(151936, 4096).requires_grad_()

    def measure(length):
        hidden = empty(1, length, 4096).requires_grad_()
        labels = torch.empty(1, length, dtype=torch.long, device="meta")
        with LiveBytes() as count:
            token_log_probs(hidden, weight, labels, norm=final_norm).log_probs.sum().backward()
            return count.peak

    growth = slope(measure, lengths)
    print(f"blockwise head beyond its input: {growth / KB:.3f} KB a token")
    assert growth <= 8.5 * KB


def test_checkpointing_needs_several_times_as_much():
    layer = qwen3_8b_layer()
    growth = slope(lambda length: run_layer(layer, length, checkpointed)["last layer"])
    print(f"torch checkpointing, backward beyond its input: {growth / KB:.1f} KB a token")
    assert growth > 4 * 29 * KB


class HostOnMeta(Engine):
    """Host memory that the count of the device's bytes does not see."""

    def host_buffer(self, size):
        with _disable_current_modes():
            return torch.empty(size, dtype=torch.uint8, device="meta")


def offloaded_peaks(saves, gpu_memory, grad=True):
    layer = qwen3_8b_layer()

    def measure(length):
        engine = HostOnMeta(torch.device("meta"))
        offloader = OffloadManager(2**50, "raise", 2, gpu_memory, engine=engine)
        offloader.arena = Arena(2**50, engine.host_buffer)
        return run_layer(layer, length, streamed(saves, offloader), grad)

    peaks = [measure(length) for length in LENGTHS]
    slopes = {
        name: (peaks[1][name] - peaks[0][name]) / (LENGTHS[1] - LENGTHS[0]) for name in peaks[0]
    }
    for name, growth in slopes.items():
        print(
            f"offloaded, saves {saves}, gpu_memory {gpu_memory}, {name}: {growth / KB:.2f} KB a "
            "token"
        )
    return slopes


@pytest.mark.full
def test_offloaded_backward_grows_by_21_kb_a_token():
    """x, attn_out and kv on the host: K and V come back whole, x and attn_out chunk by chunk."""
    assert offloaded_peaks(("attn_out", "kv"), None)["first layer"] <= 21 * KB


@pytest.mark.full
@pytest.mark.parametrize(
    "saves", [("attn_out", "kv"), pytest.param(("attn_out",), marks=pytest.mark.full)]
)
def test_backward_with_a_streamed_prefix_grows_by_9_5_kb_a_token(saves):
    """What is left are the gradient's buffer (8 KB) and cos and sin (0.5 KB)."""
    slopes = offloaded_peaks(saves, 2**30)
    assert slopes["first layer"] <= 9.5 * KB
    assert slopes["forward"] <= 9.5 * KB  # beyond its input


@pytest.mark.full
def test_forward_without_grad_streams_its_prefix_too():
    assert offloaded_peaks((), 2**30, grad=False)["forward"] <= 9.5 * KB


@pytest.mark.full
@pytest.mark.parametrize(
    ("gpu_memory", "forward_bar", "backward_bar"), [(None, 21, 29), (2**30, 17, 17)]
)
def test_several_layers_offloaded_grow_no_faster_than_one(gpu_memory, forward_bar, backward_bar):
    """Of four layers, a forward's peak is one's input and output, and a backward's the last one's,
    whose incoming gradient is not ours to write over."""

    def measure(length):
        engine = HostOnMeta(torch.device("meta"))
        offloader = OffloadManager(2**50, "raise", 4, gpu_memory, engine=engine)
        offloader.arena = Arena(2**50, engine.host_buffer)
        layer, forward = qwen3_8b_layer(), streamed(("attn_out",), offloader)
        hidden = empty(1, length, 4096).requires_grad_()
        with LiveBytes() as count:
            cos_sin = empty(1, length, 128), empty(1, length, 128)
            for _ in range(4):
                hidden = forward(layer, hidden, cos_sin)
            peak = count.peak
            count.reset_peak()
            end = Source.apply(hidden)
            del hidden
            end.backward()
            return peak, count.peak

    short, long = (measure(length) for length in LENGTHS)
    for name, bar, a, b in zip(
        ("forward", "backward"), (forward_bar, backward_bar), short, long, strict=True
    ):
        growth = (b - a) / (LENGTHS[1] - LENGTHS[0])
        print(
            f"four layers offloaded, gpu_memory {gpu_memory}, {name}: {growth / KB:.2f} KB a token"
        )
        assert growth <= bar * KB
