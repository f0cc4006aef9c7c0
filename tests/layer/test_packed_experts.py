"""Experts in 4 bits are decoded once for each pass through a layer, with the numbers of
bitsandbytes.

covers: layer/packed_experts.py
"""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import streambp
from streambp.errors import UnsupportedModelError
from streambp.layer import packed_experts
from streambp.offload.decoded_weights import CountedPackedWeight
from streambp.offload.ranges import tensors_inside
from tests import zoo
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch
from tests.tiers import thinned

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
SETTINGS = {
    "chunks": {"chunk_size": 8},
    "default": {},
    "offload": {"chunk_size": 8, "offload": "cpu", "saves": ("attn_out", "kv")},
}
WEIGHTS = 4  # two layers of two weights
EXPERTS = ("gate_up_proj", "down_proj")


class Decoding(CountedPackedWeight):
    """Stand-in for bitsandbytes' parametrization: a byte and a scale for each 16 numbers."""

    def __init__(self, shape, scale, dtype, calls):
        super().__init__()
        self.shape = shape
        self.scale = scale
        self.dtype = dtype
        self.calls = calls

    @torch.no_grad()
    def forward(self, packed):
        self.calls.append(self.shape)
        wide = packed.unflatten(0, (-1, 16)).to(self.dtype) - 128
        return (wide * self.scale[:, None]).view(self.shape)

    def __deepcopy__(self, memo):
        return Decoding(self.shape, copy.deepcopy(self.scale, memo), self.dtype, self.calls)


def pack(module, name, calls):
    """What bitsandbytes' `replace_parameter_4bit` does, its cache of a call too."""
    weight = getattr(module, name).detach()
    blocks = weight.reshape(-1, 16)
    scale = blocks.abs().amax(1) / 127
    packed = ((blocks / scale[:, None]).round() + 128).to(torch.uint8).flatten()
    setattr(module, name, nn.Parameter(packed, requires_grad=False))
    decoding = Decoding(weight.shape, scale, weight.dtype, calls)
    parametrize.register_parametrization(module, name, decoding, unsafe=True)
    if len(module.parametrizations) == 1:
        module.register_forward_pre_hook(begin_cache)
        module.register_forward_hook(end_cache, always_call=True)


def begin_cache(module, args):
    parametrize._cache_enabled += 1


def end_cache(module, args, output):
    parametrize._cache_enabled -= 1
    if not parametrize._cache_enabled:
        parametrize._cache = {}


def by_bitsandbytes(module, name, calls):
    packing = pytest.importorskip(
        "bitsandbytes.nn.parametrize", reason="bitsandbytes is not installed"
    )
    packing.replace_parameter_4bit(module, name)
    decoding = module.parametrizations[name][0]
    real = decoding.forward

    def noted(packed):
        calls.append(name)
        return real(packed)

    decoding.forward = noted


def packed_model(family, dtype, implementation, packs=pack):
    seed_torch(1)
    model = zoo.build(family, dtype)
    model.set_experts_implementation(implementation)
    calls = []
    for module in list(model.modules()):
        if type(module).__name__.endswith("Experts"):
            for name in EXPERTS:
                packs(module, name, calls)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name and "proj.weight" in name)
    return model, calls


def batch_of():
    seed_torch(2)
    ids = torch.randint(30, (1, 25))
    return {"input_ids": ids, "labels": ids}


def check(family, implementation, settings="chunks", dtype=torch.float32, packs=pack):
    """Two steps against the unpatched model's; the second runs without trials."""
    stock, calls = packed_model(family, dtype, implementation, packs)
    batch = batch_of()
    expected = gradients(stock, **batch)
    config = streambp.StreamConfig(unpatched_runs=False, **SETTINGS[settings])
    ours = streambp.patch(stock, config)
    gradients(ours, **batch)
    calls.clear()
    computed = gradients(ours, **batch)
    bar = 1e-10 if dtype == torch.float64 else 1e-4
    assert worst_error(computed[1], expected[1]) <= bar
    assert "streams: 2 x" in str(streambp.describe(ours))
    assert not any(
        isinstance(vars(module).get("forward"), packed_experts.DecodedOnce)
        for module in ours.modules()
    )
    assert not parametrize._cache_enabled
    return len(calls)


ROWS = list(itertools.product(FAMILIES, IMPLEMENTATIONS, SETTINGS))
FAST_CASES = (
    ("qwen3_moe", "grouped_mm", "chunks"),
    ("mixtral", "batched_mm", "default"),
    ("gpt_oss", "eager", "offload"),
)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("family", "implementation", "settings"), thinned(ROWS, lambda *row: row in FAST_CASES)
)
def test_cover(family, implementation, settings):
    """Forward and backward decode each weight once. A single chunk is not recomputed."""
    passes = 1 if settings == "default" else 2
    assert check(family, implementation, settings) == passes * WEIGHTS


@pytest.mark.parametrize(
    ("family", "implementation"),
    thinned(itertools.product(FAMILIES, IMPLEMENTATIONS), lambda *row: row == ("gpt_oss", "eager")),
)
def test_bitsandbytes(family, implementation):
    assert check(family, implementation, packs=by_bitsandbytes) == 2 * WEIGHTS


@pytest.mark.full
def test_float64(float64_oracle):
    check("gpt_oss", "eager", dtype=torch.float64)


@pytest.mark.full
def test_an_error_in_a_step_leaves_the_model_usable(monkeypatch):
    stock, _ = packed_model("mixtral", torch.float32, "eager")
    ours = streambp.patch(stock, streambp.StreamConfig(chunk_size=8, unpatched_runs=False))
    batch = batch_of()
    gradients(ours, **batch)
    first_step = gradients(ours, **batch)
    real, reads = packed_experts.DecodedOnce.__call__, []

    def failing(self):
        reads.append(self)
        if len(reads) == 5:
            raise ArithmeticError("fifth read")
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(packed_experts.DecodedOnce, "__call__", failing)
        with pytest.raises(ArithmeticError, match="fifth read"):
            gradients(ours, **batch)
    assert not parametrize._cache_enabled
    later_step = gradients(ours, **batch)
    assert torch.equal(later_step[0], first_step[0])
    assert all(torch.equal(later_step[1][name], value) for name, value in first_step[1].items())


def test_a_forward_that_somebody_put_there_is_left():
    stock, _ = packed_model("mixtral", torch.float32, "eager")
    layer = stock.model.layers[0]
    weights = packed_experts.packed_weights(layer)
    assert len(weights) == 2
    weights[0].forward = copy.copy(weights[0].forward)
    assert packed_experts.packed_weights(layer) == weights[1:]


def test_statistics_belong_to_the_layer():
    """Weights on the host take them along."""
    stock, _ = packed_model("mixtral", torch.float32, "eager")
    layer = stock.model.layers[0]
    inner = SimpleNamespace(absmax=torch.ones(1))
    state = SimpleNamespace(absmax=torch.ones(3), state2=inner)
    packed_experts.packed_weights(layer)[0][0].quant_state = state
    tensor_ids = set(map(id, tensors_inside(layer)))
    assert {id(state.absmax), id(inner.absmax)} <= tensor_ids


def in_mxfp4():
    """gpt-oss with the experts that transformers loads from an MXFP4 checkpoint for its kernels."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="an old transformers")
    model = zoo.build("gpt_oss", torch.float32)
    for layer in model.model.layers:
        layer.mlp.experts = mxfp4.Mxfp4GptOssExperts(model.config)
    return model


def test_mxfp4_without_a_backward_is_refused():
    model = in_mxfp4()
    names_before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match=r"Mxfp4Config\(dequantize=True\)"):
        streambp.patch(model)
    assert names_before == [set(vars(module)) for module in model.modules()]


def test_mutant_that_takes_mxfp4(monkeypatch):
    monkeypatch.setattr("streambp.model.patching.refuse_without_backward", lambda model: None)
    streambp.patch(in_mxfp4())


@pytest.mark.full
def test_mutant_decoded_in_every_call(monkeypatch):
    monkeypatch.setattr(packed_experts, "packed_weights", lambda layer: [])
    with pytest.raises(AssertionError):
        test_cover("qwen3_moe", "grouped_mm", "chunks")


def test_mutant_that_keeps_the_first_weight(monkeypatch):
    """One decoded weight for all weights of a shape."""
    cache = {}

    def stale(self):
        if self.module.original.shape not in cache:
            cache[self.module.original.shape] = type(self.module).forward(self.module)
        return cache[self.module.original.shape]

    monkeypatch.setattr(packed_experts.DecodedOnce, "__call__", stale)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_cover("mixtral", "batched_mm", "default")
