"""Decoders of encoder-decoder families used alone, as `*ForCausalLM`: their self-attention is
causal.

covers: model/patching.py, model/wrappers.py
"""

from __future__ import annotations

import copy

import pytest
import transformers

import streambp
from tests.families import VOCABULARY, make_batch
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch

INTERFACE = ""
REASON_OWN_ATTENTION = "its own attention"
SIZES = {
    "vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40,
    "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
OTHER_SIZES = {
    "Marian": {"decoder_vocab_size": VOCABULARY},
    "ProphetNet": {
        "hidden_size": 32, "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "num_encoder_layers": 1,
        "num_encoder_attention_heads": 4,
    },
    "Whisper": {"max_target_positions": 64},
}  # fmt: skip
PROPHETNET_LACKS = (
    "d_model",
    "decoder_layers",
    "decoder_attention_heads",
    "encoder_layers",
    "encoder_attention_heads",
)
REASONS = {
    "Bart": INTERFACE, "MBart": INTERFACE, "Marian": INTERFACE, "Pegasus": INTERFACE, "PLBart": INTERFACE,
    "Blenderbot": INTERFACE, "BlenderbotSmall": INTERFACE, "Whisper": INTERFACE,
    "Mvp": REASON_OWN_ATTENTION, "TrOCR": REASON_OWN_ATTENTION,
}  # fmt: skip
MODES = ("plain", "right-padded")  # their positions count from the left, padding or not


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def build(family):
    sizes = {
        name: SIZES[name]
        for name in SIZES
        if family != "ProphetNet" or name not in PROPHETNET_LACKS
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **OTHER_SIZES.get(family, {})})
    config.is_decoder, config.is_encoder_decoder = True, False
    seed_torch(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).double().train()


def check(family, modes=MODES):
    stock = build(family)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    for mode in modes:
        batch = make_batch(mode)
        (expected_loss, expected), (loss, grads) = (
            gradients(model, **batch) for model in (stock, ours)
        )
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(grads, expected) <= 1e-10
    return streambp.describe(ours).layers


@pytest.mark.fast(3)
@pytest.mark.parametrize("family", REASONS)
def test_streams(family):
    layers = check(family)
    assert len(layers) == 2
    assert all(layer.path == "streams" for layer in layers), layers
    assert all(
        layer.reason.startswith(REASONS[family]) and bool(layer.reason) == bool(REASONS[family])
        for layer in layers
    )


def test_a_decoder_that_predicts_several_tokens_at_once_runs_whole():
    """ProphetNet's layers get the sequence once for each of them, one behind the other."""
    layers = check("ProphetNet")
    assert {layer.path for layer in layers} == {"checkpoints"}
    assert all("for an input of 69 positions" in layer.reason for layer in layers)


def test_attention_that_says_it_is_not_causal_streams():
    """BigBirdPegasus' self-attention does; its mask says otherwise."""
    layers = check("BigBirdPegasus")
    assert {layer.path for layer in layers} == {"streams"}
