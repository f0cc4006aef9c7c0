"""Training in float8: layers run unchunked by rule where all tokens of a call share a scale, and in
chunks where scales are powers of two.

covers: admission/float8.py
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import streambp
from streambp.admission import entry, float8, third_party
from tests import zoo
from tests.admission import float8_stand_in as stand_in
from tests.families import make_batch
from tests.oracle import assert_as_precise, gradients, relative_l2, worst_error

LENGTH = 33  # two chunks of 16 and one token
CONFIG = streambp.StreamConfig(chunk_size=16, saves=())
# Settings of torchao's recipes, with other scales, and whether a chunk's tokens are rounded alike.
SETTINGS = {
    "tensorwise": (("tensorwise", False), False),
    "tensorwise, powers of two": (("tensorwise", True), True),
    "rowwise": (("axiswise", True), True),
    "rowwise, any scale": (("axiswise", False), False),
    "rowwise, weights' gradients in high precision": (("axiswise", False, False), True),
}


def build(dtype, seed=0):
    return zoo.build("llama", dtype, seed=seed, hidden_size=64, intermediate_size=64)


def in_float8(model, name):
    model = copy.deepcopy(model)
    stand_in.convert(model.model.layers, stand_in.config(*SETTINGS[name][0]))
    return model


def paths(model):
    return {layer.path for layer in streambp.describe(model).layers}


@pytest.mark.fast("rowwise, any scale-float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_kind_of_scale_decides(name, dtype):
    """Not luck: in half precision a test on random tokens let some layers pass, and refused
    others."""
    batch = make_batch("plain", length=LENGTH)
    for seed in range(2):
        model = in_float8(build(dtype, seed), name)
        expected_loss, expected = gradients(copy.deepcopy(model), **batch)
        streambp.patch(model, CONFIG)
        loss, grads = gradients(model, **batch)
        streams = SETTINGS[name][1]
        assert paths(model) == {"streams" if streams else "checkpoints"}
        assert grads.keys() == expected.keys()
        if not streams:
            assert "Float8Linear (self_attn.q_proj and 6 more)" in str(streambp.describe(model))
        if not streams and dtype == torch.float32:
            assert worst_error(grads, expected) <= 1e-5
            assert abs(loss - expected_loss) <= 1e-5 * abs(expected_loss)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, (_, streams) in SETTINGS.items() if streams])
def test_streamed_layers_are_as_precise_as_unpatched(name):
    """The truth is the model without float8, in float32."""
    batch = make_batch("plain", length=LENGTH)

    def errors():
        for seed in range(200):
            plain = build(torch.float32, seed)
            _, truth = gradients(copy.deepcopy(plain), **batch)
            model = in_float8(plain, name)
            _, unpatched = gradients(copy.deepcopy(model), **batch)
            streambp.patch(model, CONFIG)
            _, ours = gradients(model, **batch)
            assert paths(model) == {"streams"}
            yield relative_l2(ours, truth), relative_l2(unpatched, truth)

    assert_as_precise(errors())


def test_frozen_weights_have_no_gradient_to_scale():
    """LoRA on a base in float8: with a scale for each token, chunks are rounded alike."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = in_float8(build(torch.float32), "rowwise, any scale")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert float8.why_scaled(model) is None
    lora = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(model, lora).train()
    batch = make_batch("plain", length=LENGTH)
    _, expected = gradients(copy.deepcopy(model), **batch)
    streambp.patch(model, CONFIG)
    _, grads = gradients(model, **batch)
    assert worst_error(grads, expected) <= 1e-5


def test_a_configuration_that_does_not_tell_runs_whole():
    """Fields of other releases may have other names; a step must not end in an AttributeError."""
    model = in_float8(build(torch.float32), "rowwise, any scale")
    for module in model.model.layers.modules():
        if isinstance(module, stand_in.Float8Linear):
            module.config = object()
    assert "q_proj and 13 more" in float8.why_scaled(model.model.layers)


def test_padding_is_not_left_out_of_a_shared_scale():
    """Rows without their padding would have other largest values."""
    model = in_float8(build(torch.float32), "tensorwise")
    batch = make_batch("right-padded", length=LENGTH)
    _, expected = gradients(copy.deepcopy(model), **batch)
    streambp.patch(model, CONFIG)
    _, grads = gradients(model, **batch)
    assert worst_error(grads, expected) <= 1e-5
    assert "computed as given: Float8Linear" in str(streambp.describe(model))


def test_a_mutant_that_leaves_the_decision_to_a_test(monkeypatch):
    monkeypatch.setattr(entry, "why_scaled", lambda layer: None)
    with pytest.raises(AssertionError):
        test_a_kind_of_scale_decides("tensorwise", torch.bfloat16)


def test_a_mutant_that_packs_rows(monkeypatch):
    monkeypatch.setattr(third_party, "why_scaled", lambda module: None)
    with pytest.raises(AssertionError):
        test_padding_is_not_left_out_of_a_shared_scale()


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in SETTINGS if "high" not in name])
def test_torchaos_own_linears(name):
    """The same rule for torchao's classes, if it is installed."""
    torchao = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    recipe = torchao.Float8LinearConfig.from_recipe_name(name.partition(",")[0])
    (_, powers_of_two), streams = SETTINGS[name]
    settings = dataclasses.replace(recipe, emulate=True, round_scales_to_power_of_2=powers_of_two)
    for dtype in (torch.float32, torch.bfloat16):
        model = build(dtype)
        torchao.convert_to_float8_training(model.model.layers, config=settings)
        streambp.patch(model, CONFIG)
        gradients(model, **make_batch("plain", length=LENGTH))
        assert paths(model) == {"streams" if streams else "checkpoints"}
