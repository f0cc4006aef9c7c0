"""Gradients where torch's cache of cuDNN graphs reads o and dO with the strides of the first call
of each key.

No device: a stand-in computes in float64 what cuDNN would, from what such a graph would read.

covers: attention/backend.py, attention/kernels.py, attention/kernels_wide.py, attention/prefix.py
"""

from __future__ import annotations

import functools

import pytest
import torch

import streambp
from streambp.attention import kernels, prefix
from streambp.attention.backend import Backend
from streambp.attention.kernels import CUDNN, FLASH, MATH
from streambp.attention.kernels_wide import EFFICIENT, PADDED_KERNELS
from tests import zoo
from tests.attention.stand_in import CachedGraphs, StandIn
from tests.families import build, make_batch
from tests.oracle import gradients, lift_float32_casts, worst_error
from tests.tiers import thinned

CHUNK = 512
LENGTH = 3 * CHUNK + 1
SAVES = ((), ("attn_out",), ("kv",), ("attn_out", "kv"))
SPAN_CASES = {  # family, mode, rows
    "plain": ("qwen3", "plain", 1),
    "two rows": ("qwen3", "plain", 2),
    "left-padded": ("qwen3", "left-padded", 2),
    "right-padded": ("qwen3", "right-padded", 2),
    "right-padded row": ("qwen3", "right-padded", 1),
    "packed": ("qwen3", "packed", 1),
    "window": ("mistral", "right-padded", 2),
}
CACHE_PLACES = {
    "kept": {},
    "offloaded": {"offload": "cpu"},
    "streamed": {"offload": "cpu", "gpu_memory": 1},
}


def model_of(family):
    window = {"sliding_window": 300} if family == "mistral" else {}
    return build(
        family, torch.float64, num_hidden_layers=1, max_position_embeddings=LENGTH, **window
    )


@functools.cache
def reference(spans, default_dtype):
    """The default dtype decides which weights are drawn."""
    family, mode, rows = SPAN_CASES[spans]
    with pytest.MonkeyPatch.context() as patch:
        lift_float32_casts(patch)
        return gradients(model_of(family), **make_batch(mode, length=LENGTH, rows=rows))


def check(spans, saves, placement, monkeypatch):
    graphs = CachedGraphs()
    monkeypatch.setattr(kernels, "aten", graphs)
    monkeypatch.setattr(prefix, "choose_backend", lambda *_, **__: Backend((CUDNN, FLASH, MATH)))
    family, mode, rows = SPAN_CASES[spans]
    config = streambp.StreamConfig(chunk_size=CHUNK, saves=saves, **CACHE_PLACES[placement])
    model = streambp.patch(model_of(family), config)
    expected_loss, expected = reference(spans, torch.get_default_dtype())
    loss, our_gradients = gradients(model, **make_batch(mode, length=LENGTH, rows=rows))
    assert graphs.calls >= 3 or spans == "window"
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10


# Rows of equal spans are one graph: "two rows" has them, and "right-padded row" is a row of
# "right-padded".
@pytest.mark.fast("packed")
@pytest.mark.parametrize(
    "spans", thinned(SPAN_CASES, lambda spans: spans not in ("plain", "right-padded row"))
)
def test_recomputed(spans, float64_oracle, monkeypatch):
    check(spans, (), "kept", monkeypatch)


@pytest.mark.parametrize(
    "placement", thinned(CACHE_PLACES, lambda placement: placement == "streamed")
)
def test_saved(placement, float64_oracle, monkeypatch):
    check("left-padded", ("attn_out",), placement, monkeypatch)


def of_256():
    """Two heads suffice for groups."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
    return build(
        "qwen3", torch.float64, num_hidden_layers=1, max_position_embeddings=LENGTH, **heads
    )


HEAD_SIZES = {  # model, and the kernels that attend
    "192/128": (
        lambda: zoo.build("deepseek_v3", num_hidden_layers=1),
        Backend((CUDNN, PADDED_KERNELS[FLASH], MATH)),
    ),
    "padded": (
        lambda: zoo.build("deepseek_v3", num_hidden_layers=1),
        Backend((FLASH, MATH), width=16),
    ),
    "256": (of_256, Backend((CUDNN, FLASH, MATH))),
    "efficient": (of_256, Backend((EFFICIENT, MATH))),
}


def check_head_sizes(name, mode, saves, placement, monkeypatch):
    """The stand-ins refuse what the operators refuse: two head sizes in flash, groups in
    memory-efficient attention."""
    make, backend = HEAD_SIZES[name]
    graphs, batch = CachedGraphs(), make_batch(mode, length=LENGTH)
    model = make()
    expected_loss, expected = gradients(model, **batch)
    monkeypatch.setattr(kernels, "aten", graphs)
    monkeypatch.setattr(prefix, "choose_backend", lambda *_, **__: backend)
    streambp.patch(
        model, streambp.StreamConfig(chunk_size=CHUNK, saves=saves, **CACHE_PLACES[placement])
    )
    loss, our_gradients = gradients(model, **batch)
    assert bool(graphs.calls) == (backend.name == "cudnn")
    assert backend.name in streambp.describe(model).attention
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10


@pytest.mark.full
@pytest.mark.parametrize("mode", ["plain", "packed"])
@pytest.mark.parametrize("name", ["192/128", "padded"])
def test_two_head_sizes(name, mode, float64_oracle, monkeypatch):
    check_head_sizes(name, mode, (), "kept", monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["plain", "left-padded", "right-padded", "packed"])
@pytest.mark.parametrize("placement", CACHE_PLACES)
@pytest.mark.parametrize("saves", SAVES, ids=lambda s: "+".join(s) or "none")
@pytest.mark.parametrize("name", HEAD_SIZES)
def test_every_head_size(name, saves, placement, mode, float64_oracle, monkeypatch):
    check_head_sizes(name, mode, saves, placement, monkeypatch)


def laid_out_like_the_query(self, query, key, value, *args, **kwargs):
    """o with the strides of q, which has D columns: as if D_v were not its own."""
    o, *other_results = StandIn._scaled_dot_product_cudnn_attention(
        self, query, key, value, *args, **kwargs
    )
    rows, heads, queries, size = o.shape
    wide = o.new_zeros(rows, queries, heads, query.shape[3]).transpose(1, 2)
    wide[..., :size] = o
    return wide[..., :size], *other_results


@pytest.mark.full
def test_one_layout_holds_whatever_the_forward_gives(float64_oracle, monkeypatch):
    monkeypatch.setattr(
        CachedGraphs, "_scaled_dot_product_cudnn_attention", laid_out_like_the_query
    )
    check_head_sizes("192/128", "plain", (), "kept", monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("placement", CACHE_PLACES)
@pytest.mark.parametrize("saves", SAVES, ids=lambda s: "+".join(s) or "none")
@pytest.mark.parametrize("spans", SPAN_CASES)
def test_everything(spans, saves, placement, float64_oracle, monkeypatch):
    check(spans, saves, placement, monkeypatch)
