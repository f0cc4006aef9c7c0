"""Encoder-decoders as training programs call them: a frozen half, an encoder that runs once for
several decoder forwards, embeddings as inputs, `generate`.

covers: admission/trials.py, admission/rehearsal.py, layer/call.py, attention/interface.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.admission import trials
from tests.model.test_encoder_decoders import CHUNK, LENGTH, MODEL_BUILDERS, batch_of
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch

pytestmark = pytest.mark.usefixtures("float64_everywhere")


def make_model(name):
    model = MODEL_BUILDERS[name]().train()
    model.set_attn_implementation("eager" if name == "t5gemma" else "sdpa")
    return model


def gradients(model, step):
    model.zero_grad(set_to_none=True)
    loss = step(model)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def check(stock, step):
    """Compare two steps of the patched model with the unpatched one, and return the patched one."""
    loss, expected = gradients(stock, step)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=CHUNK))
    for _ in range(2):
        ours_loss, grads = gradients(ours, step)
        assert abs(ours_loss - loss) <= 1e-12 * abs(loss)
        assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
    return ours


def frozen(name, trained):
    """A model whose decoder is frozen, but for parameters with `trained` in their name."""
    model = make_model(name)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("decoder" not in parameter_name or trained in parameter_name)
    return model


@pytest.mark.fast("whisper-nothing", "t5gemma-q_proj")
@pytest.mark.parametrize("trained", ["nothing", "q_proj", "v_proj"])
@pytest.mark.parametrize("name", ["whisper", "t5gemma", "bart"])
def test_a_frozen_decoder(name, trained):
    """The gradient of the encoder's output needs queries that no gradient of the decoder needs."""
    seed_torch()
    batch = batch_of(name, 19)
    check(frozen(name, trained), lambda model: model(**batch).loss)


def test_the_mutant_that_tests_a_decoder_without_its_encoder_is_noticed(monkeypatch):
    def without_leaves(call, x, chunks, stage, prefix, start, leaves, real=trials.rehearse):
        return real(call, x, chunks, stage, prefix, start)

    monkeypatch.setattr(trials, "rehearse", without_leaves)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_a_frozen_decoder("whisper", "nothing")


@pytest.mark.fast("t5gemma")
@pytest.mark.parametrize("name", ["bart", "whisper", "t5gemma"])
def test_the_encoder_is_frozen_later(name):
    """Other Linears may be left out of a step in which nothing before the decoder is trained."""
    seed_torch(1)
    batch = batch_of(name, 19)
    stock = frozen(name, "q_proj")
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=CHUNK))
    for trained in (False, True, False, True):
        for model in (stock, ours):
            for parameter in model.get_encoder().parameters():
                parameter.requires_grad_(trained)
        _, expected = gradients(stock, lambda model: model(**batch).loss)
        _, grads = gradients(ours, lambda model: model(**batch).loss)
        assert worst_error(grads, expected) <= MAX_FLOAT64_ERROR


def inputs_of_the_encoder(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


@pytest.mark.fast("whisper")
@pytest.mark.parametrize("name", ["bart", "whisper", "t5gemma"])
def test_one_encoder_forward_for_several_decoder_forwards(name):
    seed_torch(2)
    batch = batch_of(name, 19)
    encoder_inputs = inputs_of_the_encoder(batch)
    masks = {key: value for key, value in encoder_inputs.items() if key == "attention_mask"}

    def step(model):
        encoded = model.get_encoder()(**encoder_inputs)
        loss = 0.0
        for shift in (0, 7, 11):
            ids = (batch["labels"].clamp(min=0) + shift) % 60
            logits = model(encoder_outputs=encoded, decoder_input_ids=ids, **masks).logits
            loss = loss + (shift + 1) * logits.square().mean()
        return loss

    check(make_model(name), step)


@pytest.mark.fast("bart")
@pytest.mark.parametrize("name", ["bart", "whisper", "t5gemma"])
def test_embeddings_as_inputs_of_the_decoder(name):
    seed_torch(3)
    encoder_inputs = inputs_of_the_encoder(batch_of(name, 19))
    stock = make_model(name)
    stock.register_parameter("embedded", torch.nn.Parameter(torch.randn(3, LENGTH, 32)))
    check(
        stock,
        lambda model: (
            model(**encoder_inputs, decoder_inputs_embeds=model.embedded).logits.square().mean()
        ),
    )


@pytest.mark.fast("t5gemma")
@pytest.mark.parametrize("name", ["bart", "whisper", "t5gemma"])
def test_generate_of_a_patched_model(name):
    seed_torch(4)
    batch = batch_of(name, 19)
    stock = make_model(name)
    ours = check(stock, lambda model: model(**batch).loss)
    tokens = []
    for model in (stock.eval(), ours.eval()):
        with torch.no_grad():
            encoder_inputs = inputs_of_the_encoder(batch)
            try:
                sequences = model.generate(
                    **encoder_inputs, max_new_tokens=9, min_new_tokens=5, num_beams=3
                )
            except RuntimeError:
                if model is ours:
                    raise
                pytest.skip("this transformers' model cannot generate with beams, unpatched either")
            tokens.append(sequences)
    assert tokens[0].shape[1] >= 5
    assert torch.equal(*tokens)
