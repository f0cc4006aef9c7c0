"""Encoders' layers that compute attention themselves: they get keys and values of all tokens.

covers: sharded/split_attention.py, attention/kinds.py, admission/stacks.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    EncoderDecoderModel,
    MegatronBertConfig,
    MegatronBertForCausalLM,
    MegatronBertForMaskedLM,
    MegatronBertModel,
    RemBertConfig,
    RemBertForMaskedLM,
    RoFormerConfig,
    RoFormerForMaskedLM,
)

import streambp
from streambp.attention.prefix import FullSequenceKeys
from streambp.sharded import bidirectional
from streambp.sharded import layer as halves
from streambp.sharded.split_attention import ChunkwiseKeys
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch
from tests.sharded.test_bidirectional import CHUNK, LENGTH, NO_DROPOUT, SIZES, in_halves, padding

__all__ = ["in_halves"]  # a fixture

pytestmark = pytest.mark.usefixtures("float64_everywhere")

MODEL_BUILDERS = {
    "megatron_bert": lambda: MegatronBertForMaskedLM(MegatronBertConfig(**SIZES, **NO_DROPOUT)),
    "rembert": lambda: RemBertForMaskedLM(
        RemBertConfig(
            **SIZES,
            **NO_DROPOUT,
            input_embedding_size=16,
            output_embedding_size=24,
            classifier_dropout_prob=0.0,
        )
    ),
    "roformer": lambda: RoFormerForMaskedLM(
        RoFormerConfig(**SIZES, **NO_DROPOUT, embedding_size=32)
    ),
}


def batch_of(kind):
    ids = torch.randint(3, 60, (3, LENGTH))
    mask = padding(kind)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, ::3] = -100
    batch = {"input_ids": ids, "labels": labels}
    return batch if kind == "none" else {**batch, "attention_mask": mask}


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    parameter_gradients = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    return loss.detach(), parameter_gradients


def check(name, kind, **settings):
    stock = MODEL_BUILDERS[name]().train()
    batch = batch_of(kind)
    loss, expected = gradients(stock, batch)
    config = streambp.StreamConfig(**{"chunk_size": CHUNK, **settings})
    ours = streambp.patch(copy.deepcopy(stock), config)
    for _ in range(2):
        ours_loss, our_gradients = gradients(ours, batch)
        assert abs(ours_loss - loss) <= 1e-12 * abs(loss)
        assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    described = streambp.describe(ours)
    assert [layer.path for layer in described.layers] == ["streams"] * 2
    return described


@pytest.mark.fast("megatron_bert-right", "rembert-left", "roformer-between", "megatron_bert-none")
@pytest.mark.parametrize("kind", ["right", "none", "left", "between"])
@pytest.mark.parametrize("name", list(MODEL_BUILDERS))
def test_exact(name, kind, in_halves):
    seed_torch()
    described = check(name, kind)
    assert in_halves == [LENGTH] * 4
    assert "scores against all keys exist" in str(described)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"saves": ("kv", "intermediate.*"), "offload": "cpu"},
        {"saves": ("*",)},
        {"saves": ("kv",)},
        {"saves": "auto", "offload": "auto"},
        {"offload": "cpu"},
    ],
    ids=str,
)
def test_settings(settings, in_halves):
    seed_torch(1)
    check("megatron_bert", "right", **settings)
    assert set(in_halves) == {LENGTH}


def test_a_single_chunk_is_not_cut(in_halves):
    seed_torch(2)
    check("rembert", "right", chunk_size=LENGTH)
    assert not in_halves


def test_queries_are_not_computed_in_the_first_half(monkeypatch):
    seed_torch(3)
    left_out = []
    real = halves._unread_before

    def noted(call):
        left_out.append(real(call))
        return left_out[-1]

    monkeypatch.setattr(halves, "_unread_before", noted)
    check("megatron_bert", "right")
    assert set(left_out) == {frozenset({"attention.self.query"})}


def test_an_encoder_beside_a_decoder_stays_as_it_is(in_halves):
    seed_torch(4)
    decoder = MegatronBertConfig(**SIZES, **NO_DROPOUT, is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(
        encoder=MegatronBertModel(MegatronBertConfig(**SIZES, **NO_DROPOUT)),
        decoder=MegatronBertForCausalLM(decoder),
    )
    described = str(streambp.describe(streambp.patch(model, streambp.StreamConfig())))
    assert "its attention is bidirectional (an encoder or a tower)" in described
    assert "decoder.bert.encoder.layer.0" in described


class ForgetsKeys(ChunkwiseKeys):
    """Leaves out what other chunks give to keys and values."""

    def store_gradients(self, chunk, gradients):
        parts = []
        for gradient in gradients:
            own_part = torch.zeros_like(gradient)
            own_part[:, :, chunk.start : chunk.stop] = gradient[:, :, chunk.start : chunk.stop]
            parts.append(own_part)
        super().store_gradients(chunk, parts)


def own_keys_alone(self, k, v):
    if self.keys is None:
        return READ_KEYS(self, k, v)
    return self.keys[0][:, :, : self.chunk.stop], self.keys[1][:, :, : self.chunk.stop]


READ_KEYS = FullSequenceKeys.read
MUTANTS = {
    "gradients of other chunks' keys are lost": (halves, "ChunkwiseKeys", ForgetsKeys),
    "a first half that is not differentiated": (
        halves, "_differentiate_before", lambda call, work, gradients: None,
    ),
    "keys behind the chunk are not read": (FullSequenceKeys, "read", own_keys_alone),
    "chunks of a causal layer": (
        bidirectional,
        "BidirectionalCall",
        lambda layer_state, arguments, layout: bidirectional.LayerCall(layer_state, arguments),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants(mutant, monkeypatch, in_halves):
    module, name, replacement = MUTANTS[mutant]
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        test_exact("megatron_bert", "right", in_halves)
