"""`kernels="liger"`: Liger's kernels on one model's norms and MLPs, and taken off again. [Note: fused layers]

Liger needs a GPU. A stand-in does to models and to transformers' modules what Liger does, with kernels in numpy that write
through pointers, as Triton's do. A test with Liger's own functions runs where it is installed.

covers: config.py, model/fused_layers.py, model/patching.py
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import streambp
from streambp.errors import ConfigError
from streambp.known_names import LIGERS_PATCHES, LIGERS_TABLE
from streambp.model import fused_layers
from tests import opaque_kernels
from tests.families import build, make_batch
from tests.oracle import gradients, relative_l2
from tests.seeds import seed_torch

FAMILIES = ("llama", "qwen3", "gemma3")
PATCHES = f"liger_kernel.transformers.{LIGERS_PATCHES}"
LIGER = streambp.StreamConfig(chunk_size=7, kernels="liger")
BAR = 1e-5  # float32, in another order of addition

SOURCE = """
def norm_forward(self, x):
    return kernels.norm_forward(self.offset, self.in_place)(self, x)

def mlp_forward(self, x):
    return kernels.mlp_forward(self.act)(self, x)

def rotation(q, k, cos, sin, *args, **kwargs):
    raise AssertionError("it was not asked for")

class FusedNorm(nn.Module):
    pass
"""


@pytest.fixture
def liger(monkeypatch):
    """A stand-in for the package: binds forwards to modules of a model, and replaces names of its modeling module."""
    package = types.ModuleType(PATCHES)
    package.__dict__.update(kernels=opaque_kernels, nn=nn)
    exec(SOURCE, package.__dict__)

    def bind(module, forward, **settings):
        for name, value in settings.items():
            setattr(module, name, value)
        module.__dict__["forward"] = types.MethodType(forward, module)

    def apply(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model=None):
        assert not cross_entropy
        assert not fused_linear_cross_entropy
        modeling = sys.modules[type(model).__module__]
        if rope:
            modeling.apply_rotary_pos_emb = package.rotation
        gemma = "gemma" in modeling.__name__
        for name, member in list(vars(modeling).items()):
            if name.endswith("RMSNorm"):
                setattr(modeling, name, package.FusedNorm)
                member.added_by_liger = True
        modeling.added_by_liger = True
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                bind(module, package.norm_forward, offset=float(gemma), in_place=not gemma)
            if type(module).__name__.endswith("MLP"):
                bind(module, package.mlp_forward, act=opaque_kernels.gelu_tanh if gemma else opaque_kernels.silu)

    setattr(package, LIGERS_TABLE, {"llama": apply, "qwen3": apply, "gemma3_text": apply})
    for name in ("liger_kernel", "liger_kernel.transformers", PATCHES):
        monkeypatch.setitem(sys.modules, name, package)
    return apply


@pytest.mark.parametrize(
    ("family", "saves", "offload"),
    [
        ("llama", (), "none"), ("qwen3", ("attn_out",), "cpu"), ("gemma3", ("*",), "none"),
        *(pytest.param(family, saves, offload, marks=pytest.mark.full)
          for family in FAMILIES for saves in ((), ("attn_out", "kv"), ("*",)) for offload in ("none", "cpu", "auto")),
    ],
)  # fmt: skip
def test_gradients_are_those_of_the_unpatched_model_with_the_same_kernels(family, saves, offload, liger):
    stock, batch = build(family), make_batch("left-padded")
    ours = copy.deepcopy(stock)
    with fused_layers._names_put_back(stock):
        liger(rope=False, fused_linear_cross_entropy=False, model=stock)
    expected_loss, expected = gradients(stock, **batch)
    streambp.patch(ours, streambp.StreamConfig(chunk_size=7, saves=saves, offload=offload, kernels="liger"))
    for _ in range(2):
        loss, found = gradients(ours, **batch)
    assert found.keys() == expected.keys()
    assert abs(loss - expected_loss) <= 1e-6 * expected_loss
    assert relative_l2(found, expected) <= BAR
    described = streambp.describe(ours)
    assert {layer.path for layer in described.layers} == {"streams"}
    (note,) = [note for note in described.notes if "Liger" in note]
    assert "input_layernorm" in note
    assert "mlp" in note
    assert note.endswith("of 2 layers")


def own(model):
    """What each module has of its own, without what calls leave behind."""
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def names_of(family):
    model = build(family)
    modeling = sys.modules[type(model).__module__]
    return {**vars(modeling), **{f"{type(m).__name__}.{n}": v for m in model.modules() for n, v in vars(type(m)).items()}}


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_left_after_unpatch_and_no_other_model_changes(family, liger):
    model, other, batch = build(family), build(family, seed=1), make_batch("plain")
    before, names, expected = own(model), names_of(family), gradients(model, **batch)[1]
    expected_other = gradients(other, **batch)[1]
    streambp.patch(model, LIGER)
    assert any("Liger" in note for note in streambp.describe(model).notes)
    assert names_of(family) == names
    assert all(torch.equal(g, expected_other[name]) for name, g in gradients(other, **batch)[1].items())
    gradients(model, **batch)
    streambp.unpatch(model)
    assert own(model) == before
    found = gradients(model, **batch)[1]
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_names_that_are_not_put_back_are_seen(liger, monkeypatch):
    """The test above can fail."""
    model = build("qwen3")
    modeling = sys.modules[type(model).__module__]
    real = modeling.Qwen3RMSNorm
    monkeypatch.setattr(modeling, "Qwen3RMSNorm", real)  # put back by pytest
    monkeypatch.setattr(modeling, "added_by_liger", False, raising=False)
    monkeypatch.setattr(real, "added_by_liger", False, raising=False)
    names = names_of("qwen3")
    monkeypatch.setattr(fused_layers, "_names_put_back", lambda causal: contextlib.nullcontext())
    streambp.patch(model, LIGER)
    assert modeling.Qwen3RMSNorm is not real
    monkeypatch.setattr(modeling, "Qwen3RMSNorm", real)
    assert names_of("qwen3") != names


def test_a_copy_is_taken_apart_by_itself(liger):
    model, batch = build("qwen3"), make_batch("plain")
    expected = gradients(model, **batch)[1]
    streambp.patch(model, LIGER)
    twin = copy.deepcopy(model)
    streambp.unpatch(model)
    assert relative_l2(gradients(twin, **batch)[1], expected) <= BAR
    assert fused_layers.fused_modules(twin.model.layers[0])
    streambp.unpatch(twin)
    assert not fused_layers.fused_modules(twin.model.layers[0])
    found = gradients(twin, **batch)[1]
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_patching_anew_and_what_others_have_set_since(liger):
    model = streambp.patch(build("qwen3"), LIGER)
    streambp.patch(model, LIGER)
    mlp = model.model.layers[0].mlp
    theirs = mlp.forward = lambda x: x
    streambp.patch(model, streambp.StreamConfig(chunk_size=7))
    assert mlp.__dict__.pop("forward") is theirs
    assert not any(fused_layers.fused_modules(layer) for layer in model.model.layers)


def test_adapters_inside(liger):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    models, batch = [], make_batch("plain")
    for _ in range(2):
        seed_torch()
        settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        models.append(peft.get_peft_model(build("qwen3"), settings))
    stock, ours = models
    causal = stock.base_model.model
    with fused_layers._names_put_back(causal):
        liger(rope=False, fused_linear_cross_entropy=False, model=causal)
    expected = gradients(stock, **batch)[1]
    streambp.patch(ours, LIGER)
    assert relative_l2(gradients(ours, **batch)[1], expected) <= BAR


def fails(model, **_):
    model.model.norm.forward = lambda x: x
    raise TypeError("injected")


@pytest.mark.parametrize(
    ("change", "dtype", "said"),
    [
        (lambda table: table.pop("qwen3"), torch.float32, "does not know 'qwen3'. It knows gemma3_text, llama. Leave"),
        (lambda table: table.update(qwen3=fails), torch.float32, "could not be applied to this Qwen3.*TypeError: injected"),
        (lambda table: table.update(qwen3=lambda model: None), torch.float32, "it changes nothing of a model"),
        (lambda table: None, torch.float64, "computes in float32 or less, and model.embed_tokens.weight is in float64"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_the_model_as_it_was(change, dtype, said, liger):
    change(getattr(sys.modules[PATCHES], LIGERS_TABLE))
    model = build("qwen3", dtype)
    before = own(model)
    with pytest.raises(ConfigError, match=said):
        streambp.patch(model, LIGER)
    assert own(model) == before


def test_without_liger(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, PATCHES, None)
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        streambp.patch(build("qwen3"), LIGER)
    with pytest.raises(ConfigError, match="kernels is 'triton'; it must be one of"):
        streambp.StreamConfig(kernels="triton")


@pytest.mark.parametrize("family", FAMILIES)
def test_ligers_own_functions_are_taken_off(family):
    """What it sets, without running its kernels, which need a GPU."""
    pytest.importorskip(PATCHES, reason="liger-kernel is not installed")
    model = build(family)
    before, names = own(model), names_of(family)
    streambp.patch(model, LIGER)
    assert isinstance(model, PreTrainedModel)
    for layer in model.model.layers:
        assert {"input_layernorm", "mlp"} <= set(fused_layers.fused_modules(layer))
    assert names_of(family) == names
    streambp.unpatch(model)
    assert own(model) == before
