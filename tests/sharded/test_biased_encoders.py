"""Encoders whose attention adds T5's bias by distance: they stream, alone and before a decoder.

covers: sharded/split_attention.py, sharded/layer.py, attention/kinds.py, admission/t5_bias.py
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import (
    MT5Config,
    MT5EncoderModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.t5 import modeling_t5

import streambp
from streambp.admission.own_run import StreamingMismatchError
from streambp.attention import interface, kernels
from streambp.attention.masks import LazyMask
from streambp.sharded import split_attention
from tests.admission import test_biased
from tests.model.test_encoder_decoders import gradients as gradients_of_loss
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch

LENGTH = 22  # 3 chunks of 7, and one token
SIZES = {**test_biased.SIZES, "num_layers": 2}
MODEL_BUILDERS = {
    "t5": lambda **settings: T5EncoderModel(T5Config(**{**SIZES, **settings})),
    "mt5": lambda **settings: MT5EncoderModel(MT5Config(**{**SIZES, **settings})),
    "umt5": lambda **settings: UMT5EncoderModel(UMT5Config(**{**SIZES, **settings})),
}

pytestmark = [
    pytest.mark.usefixtures("float64_everywhere"),
    pytest.mark.skipif(
        not hasattr(modeling_t5, "eager_attention_forward"),
        reason="T5 of this transformers attends without the interface, and its layers run unchunked",
    ),
]


def model_of(name, implementation="eager", **config_changes):
    return test_biased.with_large_biases(MODEL_BUILDERS[name](**config_changes), implementation)


def batch_of(padding):
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    if padding == "right":
        mask[1, 12:] = 0
    elif padding == "left":
        mask[1, :8] = 0
    elif padding == "between":
        mask[1, 5:14] = 0
    batch = {"input_ids": torch.randint(3, 60, (3, LENGTH))}
    if padding != "none":
        batch["attention_mask"] = mask
    return batch, torch.randn(3, LENGTH, SIZES["d_model"]) * mask[..., None]


def gradients(model, batch, weights):
    """Of a weighted sum of the outputs at tokens."""
    model.zero_grad(set_to_none=True)
    loss = (model(**batch).last_hidden_state * weights).sum()
    loss.backward()
    parameter_gradients = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    return loss.detach(), parameter_gradients


def check(name, implementation="eager", padding="right", make=lambda model: model, **settings):
    stock = make(model_of(name, implementation))
    batch, weights = batch_of(padding)
    loss, expected = gradients(stock, batch, weights)
    ours = copy.deepcopy(stock)
    config = streambp.StreamConfig(**{"chunk_size": 7, **settings})
    streambp.patch(ours, config)
    for _ in range(2):
        ours_loss, our_gradients = gradients(ours, batch, weights)
        assert abs(ours_loss - loss) <= 1e-12 * abs(loss)
        assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    described = streambp.describe(ours)
    assert [layer.path for layer in described.layers] == ["streams"] * 2
    return expected


@pytest.mark.parametrize(("name", "padding"), [("t5", "right"), ("umt5", "left")])
def test_exact(name, padding):
    seed_torch()
    expected = check(name, padding=padding)
    tables = [n for n in expected if "relative_attention_bias" in n]
    assert len(tables) == (2 if name == "umt5" else 1)


@pytest.mark.full
@pytest.mark.parametrize("padding", ["right", "none", "left", "between"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", list(MODEL_BUILDERS))
def test_all_forms(name, implementation, padding):
    seed_torch(1)
    check(name, implementation, padding)
    seed_torch(2)
    check(name, implementation, padding, chunk_size=5, saves=())


SETTINGS = [
    {"saves": ("attn_out",)},
    {"saves": ("kv", "attn_out"), "offload": "cpu"},
    {"saves": (), "attention": "math"},
    {"chunk_size": 64},
]


@pytest.mark.full
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_settings(name, settings):
    check(name, **settings)


def test_weights_on_the_host():
    """In UMT5 each layer has its own table."""
    seed_torch(3)
    check("umt5", weights="cpu")


def without_tables(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("relative_attention_bias" not in name)
    return model


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_tables_that_are_not_trained(name):
    seed_torch(4)
    expected = check(name, make=without_tables)
    assert not any("relative_attention_bias" in n for n in expected)


def with_adapters(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q", "v", "wo"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_adapters(name):
    seed_torch(5)
    expected = check(name, make=with_adapters)
    assert all("lora" in n for n in expected)


def test_a_decoder_reads_a_streamed_encoder():
    """Tables of both stacks get their gradients, and so does the embedding that both share."""
    seed_torch(6)
    stock = test_biased.model_of("t5")
    batch = test_biased.batch_of(19, "left")
    loss, expected = gradients_of_loss(stock, batch)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=7))
    found_loss, our_gradients = gradients_of_loss(ours, batch)
    assert abs(found_loss - loss) <= 1e-12 * abs(loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    assert sum("relative_attention_bias" in n for n in our_gradients) == 2
    names = [layer.name for layer in streambp.describe(ours).layers]
    assert [name.split(".")[0] for name in names] == ["decoder"] * 3 + ["encoder"] * 3


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_dropout(name):
    """The gradient is the slope of a loss that draws the same numbers again."""
    seed_torch(7)
    model = model_of(name, dropout_rate=0.2)
    streambp.patch(model, streambp.StreamConfig(chunk_size=7))
    batch, weights = batch_of("right")
    gradients(model, batch, weights)  # a first call tries the layers
    table = next(p for n, p in model.named_parameters() if "relative_attention_bias" in n)
    direction = torch.randn_like(table)

    def loss_at(step):
        seed_torch(11)
        with torch.no_grad():
            table.add_(direction, alpha=step)
        loss, our_gradients = gradients(model, batch, weights)
        with torch.no_grad():
            table.sub_(direction, alpha=step)
        return loss, our_gradients

    _, dropout_gradients = loss_at(0.0)
    bias_gradient = next(
        gradient for n, gradient in dropout_gradients.items() if "relative_attention_bias" in n
    )
    step = 1e-5
    slope = (loss_at(step)[0] - loss_at(-step)[0]) / (2 * step)
    assert abs((bias_gradient * direction).sum() - slope) <= 1e-6 * abs(slope)


def lose_the_bias(
    self, chunk, leaf_gradients, real=split_attention.ChunkwiseAttention.store_gradients
):
    """No gradient for the bias from the first chunk."""
    other_gradients = [
        None if g is not None and g.dim() == 3 and chunk.start == 0 else g for g in leaf_gradients
    ]
    real(self, chunk, other_gradients)


def without_bias(one_call, chunk, real=split_attention.params_of):
    return real(one_call, chunk)._replace(bias=None)


def shifted(module, length, device, real=interface.distance_bias):
    return real(module, length, device).roll(1, -1)


MUTANTS = {
    "the table loses one chunk's gradient": (
        split_attention.ChunkwiseAttention, "store_gradients", lose_the_bias, "t5",
    ),
    "the module's table loses one chunk's gradient": (
        split_attention.ChunkwiseAttention, "store_gradients", lose_the_bias, "umt5",
    ),
    "attention adds no bias": (split_attention, "params_of", without_bias, "t5"),
    "distances are of the other sign": (
        kernels, "pair_bias",
        lambda bias, *block, real=kernels.pair_bias: real(bias.flip(-1), *block), "t5",
    ),
    "the module's distances begin at 1": (interface, "distance_bias", shifted, "umt5"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants(mutant, monkeypatch):
    module, attribute, replacement, name = MUTANTS[mutant]
    seed_torch(8)
    monkeypatch.setattr(module, attribute, replacement)
    with pytest.raises((AssertionError, StreamingMismatchError)):
        check(name)


def check_encoders_row(name, implementation):
    """The mask is added to the bias, so that each key of the row is read."""
    config_class, model_class = {
        "t5": (transformers.T5Config, transformers.T5EncoderModel),
        "umt5": (transformers.UMT5Config, transformers.UMT5EncoderModel),
    }[name]
    seed_torch(5)
    config = config_class(
        d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=64, dropout_rate=0.0
    )
    stock = model_class(config).train()
    stock.set_attn_implementation(implementation)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=7))
    ids = torch.randint(3, 64, (2, 30))
    exists = torch.ones_like(ids)
    exists[1] = 0
    grads = []
    for model in (stock, ours):
        model(input_ids=ids, attention_mask=exists).last_hidden_state.sin().sum().backward()
        grads.append({path: p.grad for path, p in model.named_parameters()})
    assert worst_error(grads[1], grads[0]) <= 1e-10


def check_decoders_row(name, implementation):
    """The decoder's mask is added to its bias, too, and the row's labels are part of the loss."""
    config_class, model_class = {
        "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
        "umt5": (transformers.UMT5Config, transformers.UMT5ForConditionalGeneration),
    }[name]
    seed_torch(6)
    config = config_class(
        d_model=32,
        d_ff=48,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        vocab_size=64,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    stock = model_class(config).double().train()
    stock.set_attn_implementation(implementation)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=7))
    ids, labels = torch.randint(3, 64, (2, 30)), torch.randint(3, 64, (2, 22))
    exists = torch.ones_like(labels)
    exists[1] = 0
    losses, grads = [], []
    for model in (stock, ours):
        loss = model(input_ids=ids, labels=labels, decoder_attention_mask=exists).loss
        loss.backward()
        losses.append(loss.detach())
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert (losses[1] - losses[0]).abs() <= 1e-6
    assert worst_error(grads[1], grads[0]) <= 1e-6


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["t5", "umt5"])
@pytest.mark.parametrize("check", [check_encoders_row, check_decoders_row])
def test_a_row_of_padding_alone(check, name, implementation):
    check(name, implementation)


@pytest.mark.parametrize("check", [check_encoders_row, check_decoders_row])
def test_a_row_of_padding_alone_that_streams_is_seen(check, monkeypatch):
    monkeypatch.setattr(LazyMask, "has_empty_row", False)
    with pytest.raises((AssertionError, StreamingMismatchError)):
        check("umt5", "sdpa")
