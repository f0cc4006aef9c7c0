"""Models whose attention adds T5's bias by distance: their decoder and their encoder stream.

covers: admission/t5_bias.py, attention/position_biases.py, attention/kinds.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)
from transformers.models.t5 import modeling_t5

import streambp
from streambp.admission.own_run import StreamingMismatchError
from streambp.attention import interface, kernels
from streambp.layer.function import BackwardPass
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch

LENGTH = 22
SIZES = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4,
    "dropout_rate": 0.0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MODEL_BUILDERS = {
    "t5": lambda: T5ForConditionalGeneration(T5Config(**SIZES)),
    "mt5": lambda: MT5ForConditionalGeneration(MT5Config(**SIZES)),
    "umt5": lambda: UMT5ForConditionalGeneration(UMT5Config(**SIZES)),
}

pytestmark = [
    pytest.mark.usefixtures("float64_everywhere"),
    pytest.mark.skipif(
        not hasattr(modeling_t5, "eager_attention_forward"),
        reason="T5 of this transformers attends without the interface, and its layers run unchunked",
    ),
]


def model_of(name, implementation="eager"):
    return with_large_biases(MODEL_BUILDERS[name](), implementation)


def with_large_biases(model, implementation):
    """The model in training mode, with biases that are not small beside its scores."""
    model.train().set_attn_implementation(implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    return model


def batch_of(source, padding):
    labels = torch.randint(3, 60, (3, LENGTH))
    mask = torch.ones(3, source, dtype=torch.long)
    target_mask = torch.ones(3, LENGTH, dtype=torch.long)
    if padding == "right":
        mask[1, 12:] = 0
        target_mask[1, 17:] = 0
    elif padding == "left":
        mask[1, :8] = 0
        target_mask[1, :9] = 0
    labels[target_mask == 0] = -100
    batch = {"input_ids": torch.randint(3, 60, (3, source)), "labels": labels}
    if padding != "none":
        batch |= {"attention_mask": mask, "decoder_attention_mask": target_mask}
    return batch


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def check(name, implementation="eager", source=19, padding="right", **settings):
    stock = model_of(name, implementation)
    batch = batch_of(source, padding)
    loss, expected = gradients(stock, batch)
    tables = [n for n in expected if "relative_attention_bias" in n]
    assert len(tables) == (6 if name == "umt5" else 2)
    ours = streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(**{"chunk_size": 7, **settings})
    )
    for _ in range(2):
        ours_loss, grads = gradients(ours, batch)
        assert abs(ours_loss - loss) <= 1e-12 * abs(loss)
        assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    described = streambp.describe(ours)
    assert [layer.path for layer in described.layers] == ["streams"] * 6
    return described


@pytest.mark.parametrize("name", list(MODEL_BUILDERS))
def test_exact(name):
    described = str(check(name))
    assert "plain products: no fused kernel adds a bias by distance" in described
    assert "left as it is" not in described


@pytest.mark.full
@pytest.mark.parametrize("padding", ["right", "none", "left"])
@pytest.mark.parametrize("source", [LENGTH, 19], ids=["equal lengths", "other lengths"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", list(MODEL_BUILDERS))
def test_all_forms(name, implementation, source, padding):
    seed_torch(1)
    check(name, implementation, source, padding)
    seed_torch(2)
    check(name, implementation, source, padding, chunk_size=5)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"saves": ("attn_out",)},
        {"saves": ("kv", "attn_out"), "offload": "cpu"},
        {"offload": "cpu"},
        {"attention": "math"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_settings(name, settings):
    check(name, **settings)


@pytest.mark.full
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_tables_that_are_not_trained(name):
    stock = model_of(name)
    for parameter_name, parameter in stock.named_parameters():
        parameter.requires_grad_("relative_attention_bias" not in parameter_name)
    batch = batch_of(19, "right")
    _, expected = gradients(stock, batch)
    _, grads = gradients(streambp.patch(stock, streambp.StreamConfig(chunk_size=7)), batch)
    assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR


def test_generate_is_untouched():
    stock = model_of("t5").eval()
    batch = batch_of(19, "right")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = stock.generate(**inputs, max_new_tokens=9, do_sample=False)
    ours = streambp.patch(stock, streambp.StreamConfig(chunk_size=7))
    assert torch.equal(ours.generate(**inputs, max_new_tokens=9, do_sample=False), expected)


def test_a_fused_kernel_that_is_asked_for_is_refused():
    ours = streambp.patch(model_of("t5"), streambp.StreamConfig(chunk_size=7, attention="flash"))
    with pytest.raises(streambp.StreamBPError, match="it adds no bias for each distance"):
        gradients(ours, batch_of(19, "none"))


def test_weights_on_the_host_are_refused():
    ours = streambp.patch(model_of("t5"), streambp.StreamConfig(chunk_size=7, weights="cpu"))
    with pytest.raises(streambp.StreamBPError, match="weights='device'"):
        gradients(ours, batch_of(19, "none"))


def test_a_bias_by_pair_runs_unchunked():
    """A layer that is called alone, with the bias that the unpatched model would pass."""
    stock = model_of("t5")
    layer = stock.decoder.block[1]
    x = torch.randn(2, LENGTH, 32)
    bias = torch.randn(1, 4, LENGTH, LENGTH)
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(
        torch.ones(LENGTH, LENGTH).triu(1).bool(), torch.finfo(torch.float64).min
    )
    expected = layer(x, mask, bias)[0]
    streambp.patch(stock, streambp.StreamConfig(chunk_size=7))
    torch.testing.assert_close(layer(x, mask, bias)[0], expected, rtol=0.0, atol=1e-12)


def lose_one_chunk(self, chunk, grads, accumulate=False, real=BackwardPass.add):
    """No gradient for the bias from the first chunk."""
    passed_gradients = []
    for gradient in grads:
        is_bias = gradient is not None and gradient.shape[-1] == 2 * LENGTH - 1
        passed_gradients.append(None if is_bias and chunk.start == 0 else gradient)
    real(self, chunk, passed_gradients, accumulate)


def lose_later_blocks(sums, gradient, block, real=kernels.add_block_gradient):
    if block.k0 == 0:
        real(sums, gradient, block)


MUTANTS = {
    "the table loses one chunk's gradient": (BackwardPass, "add", lose_one_chunk, "t5"),
    "the table loses one block's gradient": (kernels, "add_block_gradient", lose_later_blocks,
        "umt5"),
    "distances are of the other sign": (
        kernels, "pair_bias",
        lambda bias, *block, real=kernels.pair_bias: real(bias.flip(-1), *block), "t5",
    ),
    "a chunk's distances begin at 0": (
        interface, "distance_bias",
        lambda module, length, device, real=interface.distance_bias: real(module, length,
            device).roll(1, -1),
        "umt5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants(mutant, monkeypatch):
    module, attribute, replacement, name = MUTANTS[mutant]
    monkeypatch.setattr(module, attribute, replacement)
    with pytest.raises((AssertionError, StreamingMismatchError)):
        check(name)
