"""Every causal family that a tiny config can build, against the unpatched model in float64:
docs/reference/families.md.

covers: admission/stacks.py, attention/self_attending.py, layer/gradients.py, layer/call.py,
model/patching.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from packaging import version

import streambp
from streambp.admission.stacks import shares_through_cache
from streambp.attention import self_attending as cached
from streambp.chunks import Barrier
from streambp.errors import UnsupportedModelError
from streambp.model import patching
from tests import zoo
from tests.families import MODES, make_batch
from tests.oracle import gradients, worst_error
from tests.versions import (
    INDEXERS_IN_CHUNKS,
    NOT_IN_FLOAT64,
    SHARES_THROUGH_CACHE,
    STATES_IN_CHUNKS,
    TRANSFORMERS_VERSION,
)

CHUNK_SIZES = (5, 16)
# One of each mechanism: dense, biases and windows, experts, latent attention, sinks, softcap,
# several attention calls, shared keys and values, 4-D hidden states, position counting, hybrids
# with convolutions, SSMs and linear attention, attention over what a cache returns, sparse
# attention with an indexer whose picks are passed on, a position bias beside convolutions, states
# as an argument, layers inside a stack that several cycles share, a bias of distances that the
# model hands to its layers.
SAMPLE = (
    "bamba", "cohere2", "deepseek_v3", "diffllama", "gemma2", "gemma3n_text", "gemma4_text", "gpt2", "gpt_oss",
    "granite_swa", "jamba", "lfm2", "llama4_text", "longcat_flash", "nanochat", "qwen3_moe", "qwen3_next", "bloom", "mamba",
    "recurrent_gemma", "zaya", "glm_moe_dsa", "inkling_text", "xlstm", "hrm_text", "inkling2_loop_text",
)  # fmt: skip
REFUSED_FAMILIES = {
    "deepseek_v4": "picks among keys that it pools",
    "doge": "in which equal tokens tie",
    "openai-gpt": "no stack of transformers decoder layers",
    "rwkv": "writes its states in place, where no gradient follows",
}
# Exact, but these layers are not cut.
UNCHUNKED_FAMILIES = {
    "cpmant": "it attends by itself, without a 4-D attention mask",
    "qwen4_exp_text": "its forward does not work on chunks",
}
INDEXER_FAMILIES = {"deepseek_v32", "glm_moe_dsa"}
# The names are those of the newest supported transformers; older ones know fewer families.
EXACT_FAMILIES = tuple(sorted(set(zoo.NAMES) - REFUSED_FAMILIES.keys()))
STREAMED_FAMILIES = tuple(sorted(set(EXACT_FAMILIES) - UNCHUNKED_FAMILIES.keys()))
# Padding alone reaches experts here. A packed row without padding gives them None, not zeros.
READ_BY_PADDING = {("longcat_flash", "left-padded")}
UNDEFINED = {("gemma3n_text", "left-padded"): "the unpatched model's gradients are NaN"}


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def errors(name, modes=MODES, chunk_sizes=CHUNK_SIZES, one_chunk_size=False, **changes):
    """The worst error of the gradients and of the loss over modes and chunk sizes; and the last
    patched model.

    one_chunk_size: each mode with one chunk size, in turn, and a model is patched once for each of
        them.
    """
    stock = zoo.build(name, **changes)
    ours = copy.deepcopy(stock)  # now: recurrent_gemma keeps states of its last call
    worst_gradient = worst_loss = 0.0
    batches = {mode: make_batch(mode) for mode in modes if (name, mode) not in UNDEFINED}
    expected = {mode: gradients(stock, **batch) for mode, batch in batches.items()}
    for number, chunk_size in enumerate(chunk_sizes):
        for mode in list(batches)[number :: len(chunk_sizes)] if one_chunk_size else batches:
            # Unpatched, states go on from one document to the next.
            if not one_chunk_size or mode == list(batches)[number]:
                settings = {"chunk_size": chunk_size, "documents": "as_given"}
                if (name, mode) in READ_BY_PADDING:
                    settings["rows"] = "as_given"
                streambp.patch(ours, streambp.StreamConfig(**settings))
            loss, grads = gradients(ours, **batches[mode])
            worst_loss = max(
                worst_loss, float(abs(loss - expected[mode][0]) / abs(expected[mode][0]))
            )
            worst_gradient = max(worst_gradient, worst_error(grads, expected[mode][1]))
    return worst_gradient, worst_loss, ours


def check(name, **changes):
    if name in NOT_IN_FLOAT64:
        pytest.skip("this transformers' own does not run in float64")
    try:
        worst_gradient, worst_loss, ours = errors(name, **changes)
    except UnsupportedModelError:
        if STATES_IN_CHUNKS:
            raise
        pytest.skip(
            "before transformers 5.15 layers that do nothing but hand on states cannot be streamed"
        )
    assert worst_loss <= 1e-12
    assert worst_gradient <= 1e-10
    unchunked_reasons = {
        layer.reason for layer in streambp.describe(ours).layers if layer.path != "streams"
    }
    if not STATES_IN_CHUNKS:  # layers with states are exact there, but whole
        expected_reasons = (
            "it mixes tokens outside of its attention",
            "its forward does not work on chunks",
        )
        unchunked_reasons = {
            reason
            for reason in unchunked_reasons
            if name in UNCHUNKED_FAMILIES or not any(text in reason for text in expected_reasons)
        }
    if name in INDEXER_FAMILIES and not INDEXERS_IN_CHUNKS:
        unchunked_reasons = set()
    assert len(unchunked_reasons) == (name in UNCHUNKED_FAMILIES)
    assert all(UNCHUNKED_FAMILIES[name] in reason for reason in unchunked_reasons)
    return ours


@pytest.mark.fast(28)
@pytest.mark.parametrize("name", SAMPLE)
def test_sample_is_exact(name):
    """Padding on the left and documents in a row: what the other modes ask of a layer is a part of
    that."""
    check(name, modes=("left-padded", "packed"), once=True)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text", "qwen3"])
def test_a_step_that_leaves_the_cache_to_the_config(name):
    """As in a plain loop: the unpatched model makes a cache then, which is not to change what it
    computes."""
    stock, batch = zoo.build(name), make_batch("plain")
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    assert stock.config.use_cache
    loss = stock(**batch).loss
    loss.backward()
    expected = {
        key: parameter.grad
        for key, parameter in stock.named_parameters()
        if parameter.grad is not None
    }
    if abs(loss - stock(**batch, use_cache=False).loss) > 1e-9:
        assert SHARES_THROUGH_CACHE
        for call in (ours, ours.model):
            with pytest.raises(UnsupportedModelError, match=r"Install transformers 5\.6 or newer"):
                call(**(batch if call is ours else {"input_ids": batch["input_ids"]}))
        assert (
            ours.generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape[1]
            > batch["input_ids"].shape[1]
        )
        return
    ours(**batch).loss.backward()
    grads = {
        key: parameter.grad
        for key, parameter in ours.named_parameters()
        if parameter.grad is not None
    }
    assert worst_error(grads, expected) <= 1e-10


class SharingModel(torch.nn.Module):
    """Reads another layer's keys as Gemma 3n does in transformers 5.5."""

    def __init__(self, shared):
        super().__init__()
        self.config = zoo.tiny_config("qwen3", num_kv_shared_layers=shared)

    def forward(self, hidden_states, past_key_values=None):
        return past_key_values.shared_layers[0]


def test_keys_that_are_shared_in_a_cache_alone(monkeypatch):
    """Calls that would have one unpatched are refused; one that says it wants none is as unpatched
    without."""
    assert [shares_through_cache(SharingModel(shared)) for shared in (2, 0)] == [True, False]
    assert shares_through_cache(zoo.build("gemma3n_text").model) == SHARES_THROUGH_CACHE
    batch = make_batch("plain")
    monkeypatch.setattr(patching, "shares_through_cache", lambda backbone: True)
    ours, lazy = (
        streambp.patch(zoo.build("qwen3"), streambp.StreamConfig(chunk_size=5, lazy_logits=lazy))
        for lazy in (False, True)
    )
    with pytest.raises(UnsupportedModelError, match="passes keys and values from one layer"):
        ours(**batch)
    with pytest.raises(UnsupportedModelError, match="use_cache=False"):
        ours.model(batch["input_ids"])
    with pytest.raises(UnsupportedModelError, match="use_cache=False"):
        lazy(batch["input_ids"])
    assert lazy(batch["input_ids"], use_cache=True).logits.isfinite().all()
    with pytest.raises(UnsupportedModelError, match="use_cache=False"), torch.no_grad():
        ours.eval()(**batch)  # its loss is computed without logits, and without a cache
    assert ours.train()(**batch, use_cache=False).loss.isfinite()
    ours.config.use_cache = False
    assert ours(**batch).loss.isfinite()


@pytest.mark.full
@pytest.mark.parametrize("name", EXACT_FAMILIES)
def test_family_is_exact(name):
    check(name)


def test_a_hundred_families_in_the_newest_transformers():
    if version.parse("5.24") <= TRANSFORMERS_VERSION:
        assert set(SAMPLE) <= set(STREAMED_FAMILIES)
        assert len(STREAMED_FAMILIES) >= 100


@pytest.mark.parametrize("name", [name for name in REFUSED_FAMILIES if name in zoo.NAMES])
def test_refused_when_patched(name):
    model = zoo.build(name)
    with pytest.raises(
        streambp.StreamBPError, match=f"cannot be streamed.*{REFUSED_FAMILIES[name]}"
    ):
        streambp.patch(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert model(**make_batch("plain"), use_cache=False).loss.isfinite()


FAMILY_LAYER_COUNTS = {"falcon_h1": 2, "zamba2": 3, "zaya": 5, "jamba": 3, "qwen3": 2}


@pytest.mark.fast("2-qwen3", "3-jamba")
@pytest.mark.parametrize(
    ("length", "name"),
    [
        pytest.param(
            length, name, marks=() if FAMILY_LAYER_COUNTS[name] == length else pytest.mark.full
        )
        for length in (2, 3, 5)
        for name in FAMILY_LAYER_COUNTS
    ],
)
def test_few_tokens(name, length):
    """Fewer than the first call usually tries: layers that attend and mix tokens elsewhere as well
    are found out."""
    stock = zoo.build(name)
    batch = make_batch("plain", length=length)
    expected_loss, expected = gradients(stock, **batch)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=2))
    loss, grads = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12
    assert worst_error(grads, expected) <= 1e-10
    batch = make_batch("plain")
    assert worst_error(gradients(ours, **batch)[1], gradients(stock, **batch)[1]) <= 1e-10


def test_convolution_inside_a_layer_is_found():
    """A layer that looks like any other but mixes neighbours runs whole, and exactly so."""
    stock = zoo.build("llama")
    mlp = type(stock.model.layers[1].mlp)
    real = mlp.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "forward", lambda self, x: real(self, x + 0.5 * torch.roll(x, 1, 1)))
        batch = make_batch("plain")
        expected_loss, expected = gradients(stock, **batch)
        ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
        loss, grads = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12
    assert worst_error(grads, expected) <= 1e-10
    assert "mixes tokens" in str(streambp.describe(ours))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (number + padded) % 2 else pytest.mark.full)
        for number, name in enumerate(["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "jamba"])
        for padded, mode in enumerate(["left-padded", "plain"])
    ],
)
def test_router_loss(name, mode):
    """The load-balancing loss counts tokens of all chunks; its gradient reaches every layer's
    router."""
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    stock = zoo.build(name, **changes)
    without = gradients(stock, **make_batch(mode), output_router_logits=False)[0]
    assert abs(gradients(stock, **make_batch(mode))[0] - without) > 0.1
    check(name, modes=[mode], chunk_sizes=[3 if mode == "plain" else 5], **changes)


def test_experts_that_no_token_hits_have_no_gradient():
    """Eight experts for two tokens, one chunk each: as in the unpatched model, most get zeros, and
    the same ones."""
    stock = zoo.build("mixtral", num_local_experts=8, num_experts=8, num_experts_per_tok=1)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=1))
    batch = make_batch("plain", length=2, rows=1)
    (_, expected), (_, grads) = gradients(stock, **batch), gradients(ours, **batch)
    assert worst_error(grads, expected) <= 1e-10
    name = next(n for n in expected if n.endswith("experts.gate_up_proj"))
    hit = expected[name].flatten(1).norm(dim=1) > 0
    assert len(hit) == 8
    assert 0 < hit.sum() <= 2
    assert torch.equal(grads[name].flatten(1).norm(dim=1) > 0, hit)


CACHE_READING_FAMILIES = {
    "alibi in the mask": {"alibi": True},
    "alibi beside the mask": {"alibi": True, "attn": "eager"},
    "rotary": {},
}


@pytest.mark.parametrize("setting", CACHE_READING_FAMILIES)
def test_attention_over_what_a_cache_returns(setting):
    changes = {"new_decoder_architecture": False, **CACHE_READING_FAMILIES[setting]}
    attention = changes.pop("attn", "sdpa")
    stock = zoo.build("falcon", **changes)
    stock.config._attn_implementation = attention
    for saves, offload in (((), "none"), (("attn_out", "kv"), "cpu")):
        ours = streambp.patch(
            copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5, saves=saves, offload=offload)
        )
        assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
        assert "[T, T] mask" in str(streambp.describe(ours))
        for mode in MODES:
            (expected_loss, expected), (loss, grads) = (
                gradients(model, **make_batch(mode)) for model in (stock, ours)
            )
            assert abs(loss - expected_loss) <= 1e-12
            assert worst_error(grads, expected) <= 1e-10


def test_cached_attention_needs_a_mask_that_is_causal_at_chunk_ends():
    mask = torch.ones(2, 1, 7, 7).tril().log()
    for any_mask in (mask, mask == 0, mask != 0):  # MPT's say what is not read
        assert cached.own_mask(any_mask, 7).barriers == ()
        assert torch.equal(cached.own_mask(any_mask, 7).read(0, 7, 0, 7), mask == 0)
        assert "does not show" in cached.own_mask(
            torch.full_like(any_mask, fill_value=True, dtype=torch.bool), 7
        )
    mask[1, :, 1, 3] = 0
    assert cached.own_mask(mask, 7).barriers == (Barrier(2, 3),)
    assert "not causal" in cached.own_mask(mask == 0, 7)
    mask[1] = 0
    assert "does not show" in cached.own_mask(mask == 0, 7)


@pytest.mark.full
def test_llama4_beyond_its_position_step():
    """Its layers without rotary positions scale queries by a step function of the position that
    moves at 8,192 tokens."""
    stock = zoo.build(
        "llama4_text", hidden_size=16, intermediate_size=16, intermediate_size_mlp=16, head_dim=4
    )
    assert any(not layer.self_attn.use_rope for layer in stock.model.layers)
    batch = make_batch("plain", length=8192 + 700, rows=1)
    expected_loss, expected = gradients(stock, **batch)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=3000))
    loss, grads = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(grads, expected) <= 1e-10


@pytest.mark.full
def test_llama4_counts_positions_from_the_start_of_the_sequence():
    """The same at a size that is cheap: the step moves every 4 tokens."""
    worst, _, ours = errors(
        "llama4_text", modes=["left-padded", "packed"], one_chunk_size=True, floor_scale=4
    )
    assert worst <= 1e-10
    assert any(not layer.self_attn.use_rope for layer in ours.model.layers)
