"""Queries that a refill computes for nothing have one head, where the layer lets them.

covers: admission/trials.py, layer/call.py, layer/data_flow.py, layer/function.py, layer/products.py, layer/site.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import ClvpDecoderConfig, ClvpForCausalLM

import streambp
from streambp.admission import trials
from streambp.admission.entry import stream_layer
from streambp.layer import call, function, products
from streambp.layer.site import LayerSite
from tests import zoo
from tests.attention.meta_runs import ElementwiseBytes
from tests.families import VOCABULARY, build, make_batch
from tests.layer.test_bytes import empty, qwen3_8b_layer
from tests.oracle import gradients, worst_error
from tests.versions import needs_diffllamas_calls


def record(monkeypatch):
    """What every layer found out about its unread products, and the shapes of q in its refills."""
    found, shapes = [], []
    real = trials._find_unread
    monkeypatch.setattr(trials, "_find_unread", lambda *a: found.append(real(*a)) or found[-1])
    attend = call.ChunkMask.attend

    def seen(self, given):
        shapes.extend([tuple(given.q.shape)] if self.stage is call.Stage.REFILL else [])
        return attend(self, given)

    monkeypatch.setattr(call.ChunkMask, "attend", seen)
    return found, shapes


@pytest.mark.parametrize(("family", "heads"), [("qwen3", 1), ("gemma3", 1), ("olmo2", 4), ("phi3", 4)])
def test_refills_have_one_head_of_queries(family, heads, float64_oracle, monkeypatch):
    """OLMo 2 norms all heads at once and wants them all; Phi 3 computes its queries together with its keys."""
    model = build(family, torch.float64)
    _, expected = gradients(model, **make_batch("plain"))
    found, shapes = record(monkeypatch)
    _, ours = gradients(streambp.patch(model, streambp.StreamConfig(chunk_size=5)), **make_batch("plain"))
    assert len(found) == 2
    assert {shape[1] for shape in shapes if shape[2] == 5} == {heads}
    assert worst_error(ours, expected) <= 1e-10


def test_keys_that_come_out_differently_are_not_taken(monkeypatch):
    """A layer whose keys notice how many heads the queries have."""
    real = function.LayerCall.run

    def notices(self, hidden_chunk, chunk, point, leaves=None, states=None):
        attend = point.attend
        point.attend = lambda given: attend(given._replace(k=given.k + 1e-9 * given.q.shape[1]))
        return real(self, hidden_chunk, chunk, point, leaves, states)

    monkeypatch.setattr(call.LayerCall, "run", notices)
    found, _ = record(monkeypatch)
    model = streambp.patch(build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5))
    gradients(model, **make_batch("plain"))
    assert [unread.width for unread in found] == [None, None]
    assert all("self_attn.q_proj" in unread.refill for unread in found)


def refill_bytes(width, monkeypatch):
    """Of the refill of one Qwen3-8B layer, in bytes an element of q."""
    layer = qwen3_8b_layer()
    counted = ElementwiseBytes()
    real, trace = function._refill, trials._find_unread

    def refill(layer_call):
        with counted:
            real(layer_call)

    def find(*args):
        found = trace(*args)
        assert found.width == 128
        return products.UnreadProducts(found.refill, found.recompute, width)

    with monkeypatch.context() as patch:
        patch.setattr(function, "_refill", refill)
        patch.setattr(trials, "_find_unread", find)
        site = LayerSite(layer, streambp.StreamConfig(chunk_size=1024, saves=("attn_out",)))
        x, cos, sin = empty(1, 4096, 4096).requires_grad_(), empty(1, 4096, 128), empty(1, 4096, 128)
        stream_layer(site, (x,), {"attention_mask": None, "position_embeddings": (cos, sin)}).sum().backward()
    return counted.total / (3 * 1024 * 4096)


@pytest.mark.full
def test_a_refill_moves_half_of_the_bytes(monkeypatch):
    whole, narrow = refill_bytes(None, monkeypatch), refill_bytes(128, monkeypatch)
    assert 0 < narrow <= 0.55 * whole, (whole, narrow)
    shares = [36 * size * (65_536 - 8192) * 4096 / (15 * 4e12) for size in (whole, narrow)]
    print("36 layers' refills at 65,536 tokens, of a step of 15 s at 4 TB/s:", [f"{100 * share:.2f} %" for share in shares])


@needs_diffllamas_calls
def test_layers_that_attend_several_times_keep_their_heads(float64_oracle):
    """All but the last of their attention calls are computed in a refill: with fewer heads of queries than of keys a fused
    kernel divides by zero."""
    torch.set_default_dtype(torch.float64)
    try:
        stock = zoo.build("diffllama")
        _, expected = gradients(stock, **make_batch("plain"))
        ours = streambp.patch(stock, streambp.StreamConfig(chunk_size=5))
        assert worst_error(gradients(ours, **make_batch("plain"))[1], expected) <= 1e-10
    finally:
        torch.set_default_dtype(torch.float32)
    sites = [module.forward.site for module in ours.model.layers]
    assert all(unread.width is None for site in sites for unread in site.unread.values())
    assert all(site.unread for site in sites)


def clvp_errors():
    """Of CLVP, whose views leave the number of tokens open, so that fewer heads pass for fewer tokens; in chunks whose
    tokens its heads do not divide."""
    torch.set_default_dtype(torch.float64)
    sizes = {"hidden_size": 32, "n_inner": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "num_mel_attn_blocks": 1}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), 0.0)
    try:
        stock = ClvpForCausalLM(ClvpDecoderConfig(vocab_size=VOCABULARY, **sizes, **drops)).train()
        _, expected = gradients(stock, **make_batch("plain"))
        return [worst_error(clvp_gradients(stock, size), expected) for size in (5, 7, 8)]
    finally:
        torch.set_default_dtype(torch.float32)


def clvp_gradients(stock, chunk_size):
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=chunk_size))
    return gradients(ours, **make_batch("plain"))[1]


def test_a_view_that_leaves_the_tokens_open(float64_oracle):
    assert max(clvp_errors()) <= 1e-10


def test_two_tokens_alone_would_not_show_it(float64_oracle, monkeypatch):
    monkeypatch.setattr(trials, "TRIED", (2, 2))
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        clvp_errors()
