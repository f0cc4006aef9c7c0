"""Weights of float8 Linears are cast once for each pass through a layer, with equal results.

covers: layer/float8_linears.py
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn

import streambp
from streambp.layer import float8_linears, packed_experts
from tests import zoo
from tests.admission import float8_stand_in as stand_in
from tests.families import make_batch
from tests.oracle import gradients
from tests.seeds import seed_torch

LENGTH = 33
SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
LINEARS = 7  # of one layer
# Granularity of the scales, and casts of a weight in forward and backward: with a scale for each
# row there are two casts in backward, by rows and by columns.
SCALES = {"rowwise": ("axiswise", 1 + 2), "tensorwise": ("tensorwise", 1 + 1)}
CHUNKS = {1: 64, 3: 16, 5: 8}  # chunks of a row, and their size


def build(scales="rowwise", dtype=torch.float32, powers_of_two=True):
    model = zoo.build("llama", dtype, seed=0, **SIZES)
    stand_in.convert(model.model.layers, stand_in.config(SCALES[scales][0], powers_of_two))
    return model


def patched(model, chunk_size=16, **settings):
    config = streambp.StreamConfig(
        chunk_size=chunk_size, saves=(), unpatched_runs=False, **settings
    )
    return streambp.patch(copy.deepcopy(model), config)


@contextlib.contextmanager
def casts_of_weights(module=stand_in):
    """Yields a list with the arguments of each cast of a weight meanwhile."""
    casts, real = [], module.hp_tensor_to_float8_dynamic

    def noted(tensor, *args, **kwargs):
        role = kwargs.get("gemm_input_role")
        if role is not None and role.value == "weight":
            casts.append(kwargs)
        return real(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "hp_tensor_to_float8_dynamic", noted)
        yield casts


@contextlib.contextmanager
def cast_in_every_call():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_experts, "float8_linears", lambda layer: [])
        yield


def batch_of():
    return make_batch("plain", length=LENGTH)


def assert_equal(ours, expected):
    assert torch.equal(ours[0], expected[0])
    assert ours[1].keys() == expected[1].keys()
    assert all(torch.equal(ours[1][name], value) for name, value in expected[1].items())


def count(model, module=stand_in):
    gradients(model, **batch_of())  # with trials
    with casts_of_weights(module) as casts:
        gradients(model, **batch_of())
    return len(casts)


@pytest.mark.fast("1-tensorwise")
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_casts_of_a_step(scales, chunks):
    """As many as under gradient checkpointing, or fewer, at any number of chunks."""
    model = patched(build(scales), CHUNKS[chunks])
    assert count(model) == LINEARS * SCALES[scales][1]
    assert {layer.path for layer in streambp.describe(model).layers} == {"streams"}
    assert not any("forward" in vars(module) for module in model.model.layers[0].mlp.modules())


@pytest.mark.full
@pytest.mark.parametrize("checkpointed", [False, True])
def test_casts_of_peers(checkpointed):
    model = build().train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    assert count(model) == LINEARS * (3 if checkpointed else 2)


CASES = {
    "float32": (torch.float32, False, False),
    "bf16": (torch.bfloat16, False, False),
    "autocast": (torch.float32, True, False),
    "lora": (torch.float32, False, True),
}


def step_of(scales, case):
    """Loss and gradients of a patched model's second step."""
    dtype, autocast, lora = CASES[case]
    # Powers of two round rows and columns alike. Layers with frozen weights need none to stream.
    model = build(scales, dtype, powers_of_two=not lora or scales == "tensorwise")
    if lora:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        seed_torch(3)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).train()
    model = patched(model)
    gradients(model, **batch_of())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return gradients(model, **batch_of())


@pytest.mark.fast("rowwise-bf16", "rowwise-lora", "tensorwise-autocast")
@functools.cache
def expected_step(scales, case):
    with cast_in_every_call():
        return step_of(scales, case)


@pytest.mark.fast(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scales", SCALES)
def test_losses_and_gradients_are_equal_to_the_bit(scales, case):
    assert_equal(step_of(scales, case), expected_step(scales, case))


def by_optimizer(model):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def through_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.25)


def by_replacement(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.25


UPDATES = (by_optimizer, through_data, by_replacement)


def step_after(update):
    model = patched(build())
    loss, _ = gradients(model, **batch_of())
    update(model)
    result = gradients(model, **batch_of())
    assert not torch.equal(result[0], loss)
    return result


@functools.cache
def expected_after(update):
    with cast_in_every_call():
        return step_after(update)


@pytest.mark.fast("through_data")
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_no_cast_survives_a_step(update):
    assert_equal(step_after(update), expected_after(update))


@pytest.mark.full
def test_a_copy_of_a_patched_model_casts_its_own_weights():
    model = patched(build())
    gradients(model, **batch_of())
    twin = copy.deepcopy(model)
    first = gradients(twin, **batch_of())
    through_data(twin)
    with casts_of_weights() as casts:
        ours = gradients(twin, **batch_of())
    assert len(casts) == LINEARS * 3
    assert not torch.equal(ours[0], first[0])
    through_data(model)
    assert_equal(ours, gradients(model, **batch_of()))


def tokens():
    seed_torch(5)
    return torch.randn(5, 8)


def one_pass(layer, calls=3, between=lambda layer: None):
    """Results of the layer's calls in one pass, and the number of casts."""
    x = tokens()
    results = []
    with (
        casts_of_weights() as casts,
        packed_experts.decode_once(packed_experts.replaced_forwards(layer)),
    ):
        for index in range(calls):
            if index:
                between(layer)
            results.append(layer(x).detach())
    return results, len(casts)


def write(layer):
    with torch.no_grad():
        for linear in layer:
            linear.weight.mul_(-1.25)


def test_a_write_within_a_pass_is_seen():
    layer = bare_layer()
    results, casts = one_pass(layer, between=write)
    layer = bare_layer()
    for result in results:
        expected, _ = one_pass(layer, calls=1)
        assert torch.equal(result, expected[0])
        write(layer)
    assert casts == 3 * 2


def bare_layer():
    seed_torch(4)
    layer = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    stand_in.convert(layer, stand_in.config("axiswise", True))
    return layer


def by_own_forward(layer):
    layer[0].forward = layer[0].forward


def by_compilation(layer):
    layer[0]._compiled_call_impl = layer[0]._call_impl  # as `compile` does, without a compiler


def by_other_code(layer):
    class Other(stand_in.Float8Linear):
        def forward(self, x):
            return stand_in.matmul_with_hp_or_float8_args.apply(x, self.weight.t(), self.config)

    Other.__module__ = "torchao.float8.float8_linear"
    layer[0].__class__ = Other


def by_inference(layer):
    with torch.inference_mode():
        weight = layer[0].weight.clone()
    layer[0].weight = nn.Parameter(weight, requires_grad=False)


def by_subclass(layer):
    """As weights that FSDP2 gathers in float8."""
    kind = type("Gathered", (torch.Tensor,), {})
    layer[0].weight = nn.Parameter(layer[0].weight.detach().as_subclass(kind))


LEFT_OUT = (by_own_forward, by_compilation, by_other_code, by_inference, by_subclass)


@pytest.mark.parametrize("change", LEFT_OUT, ids=lambda change: change.__name__)
def test_a_linear_in_doubt_casts_in_each_call(change):
    layer = bare_layer()
    change(layer)
    with torch.no_grad():
        results, casts = one_pass(layer)
        expected = layer(tokens())
    assert casts == 3 + 1
    assert all(torch.equal(result, expected) for result in results)


def test_a_pass_inside_a_pass_keeps_the_outer_casts():
    layer = bare_layer()
    _, casts = one_pass(layer, between=one_pass)
    assert casts == 2
    assert not any("forward" in vars(linear) for linear in layer)


def test_an_argument_without_a_hash_is_cast_anew(monkeypatch):
    real = stand_in.settings_of
    monkeypatch.setattr(
        stand_in, "settings_of", lambda config, axis: {**real(config, axis), "dtype": [1]}
    )
    monkeypatch.setattr(
        stand_in,
        "hp_tensor_to_float8_dynamic",
        lambda x, to, dtype, **kwargs: stand_in.rounded(x, to, kwargs["axiswise_dim"], True),
    )
    assert one_pass(bare_layer())[1] == 3 * 2


def fail_after(layer, replacements):
    layer(torch.randn(5, 8))
    assert replacements[0].casts.casts
    raise ArithmeticError


def test_an_error_in_a_pass_drops_the_casts():
    layer = bare_layer()
    replacements = packed_experts.replaced_forwards(layer)
    with pytest.raises(ArithmeticError), packed_experts.decode_once(replacements):
        fail_after(layer, replacements)
    assert not replacements[0].casts.casts
    assert replacements[0].casts.storages is None
    assert not any("forward" in vars(linear) for linear in layer)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "rowwise_with_gw_hp"])
def test_torchaos_own_linears(recipe):
    torchao = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    settings = dataclasses.replace(
        torchao.Float8LinearConfig.from_recipe_name(recipe),
        emulate=True,
        round_scales_to_power_of_2=True,
    )
    results = []
    for cached in (True, False):
        with contextlib.nullcontext() if cached else cast_in_every_call():
            model = zoo.build("llama", torch.bfloat16, seed=0, **SIZES)
            torchao.convert_to_float8_training(model.model.layers, config=settings)
            model = patched(model)
            casts = count(model, torchao.float8_linear)
            expected = LINEARS * (2 if recipe == "tensorwise" else 3)
            assert (casts == expected) == cached
            results.append(gradients(model, **batch_of()))
    assert_equal(*results)


def test_mutant_that_casts_in_every_call():
    with cast_in_every_call(), pytest.raises(AssertionError):
        test_casts_of_a_step("rowwise", 3)


def test_mutant_with_one_cast_for_rows_and_columns(monkeypatch):
    real = float8_linears._cast

    def without_axis(reference, names, tensor, *args, **kwargs):
        cache = reference()
        role = kwargs.get("gemm_input_role")
        if role is not stand_in.Role.WEIGHT or not cache.caches(tensor):
            return real(reference, names, tensor, *args, **kwargs)
        key = float8_linears.memory_state(tensor)
        if key not in cache.casts:
            cache.casts[key] = names["hp_tensor_to_float8_dynamic"](tensor, *args, **kwargs)
        return cache.casts[key]

    monkeypatch.setattr(float8_linears, "_cast", without_axis)
    with pytest.raises(AssertionError):
        test_losses_and_gradients_are_equal_to_the_bit("rowwise", "lora")


def test_mutant_that_keeps_casts_for_the_next_pass(monkeypatch):
    monkeypatch.setattr(float8_linears.WeightCasts, "end", lambda self: None)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_no_cast_survives_a_step(through_data)
    layer = bare_layer()
    with pytest.raises(AssertionError):
        assert one_pass(layer, calls=1)[1] + one_pass(layer, calls=1)[1] == 2


def test_mutant_without_versions(monkeypatch):
    real = float8_linears.memory_state
    monkeypatch.setattr(float8_linears, "memory_state", lambda tensor: (*real(tensor)[:-1], 0))
    with pytest.raises(AssertionError):
        test_a_write_within_a_pass_is_seen()


@pytest.mark.parametrize("change", [by_inference, by_subclass], ids=["inference", "subclass"])
def test_mutant_that_caches_any_weight(change, monkeypatch):
    monkeypatch.setattr(
        float8_linears.WeightCasts, "caches", lambda self, tensor: self.storages is not None
    )
    monkeypatch.setattr(
        float8_linears, "memory_state", lambda tensor: (tensor.untyped_storage()._cdata, 0)
    )
    with pytest.raises(AssertionError):
        test_a_linear_in_doubt_casts_in_each_call(change)
