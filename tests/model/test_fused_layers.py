"""`kernels="liger"`: Liger's kernels on one model's norms and MLPs, and taken off again.

With a stand-in for Liger (`tests/liger_stand_in.py`). Where Liger is installed its own functions
and kernels are tried too, in Triton's interpreter.

covers: config.py, model/fused_layers.py, model/patching.py
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import streambp
from streambp.admission import trials
from streambp.errors import BackwardError, ConfigError, UnsupportedModelError
from streambp.known_names import LIGERS_TABLE
from streambp.layer.layer_state import OverwrittenTensors
from streambp.model import chosen_kernels, fused_layers
from streambp.offload import manager_of
from tests.families import build, make_batch
from tests.head.interpreter import interpreted, needs_triton
from tests.liger_stand_in import FAMILIES, HYBRID, PATCHES, built, own_attributes, stand_in
from tests.offload.test_auto import Injected
from tests.oracle import gradients, relative_l2
from tests.seeds import seed_torch
from tests.tiers import thinned
from tests.versions import needs_states

LIGER = streambp.StreamConfig(chunk_size=7, kernels="liger")
MAX_RELATIVE_ERROR = 1e-6  # of the whole gradient, in float32

# What of Liger's a user has applied before `patch`, beside what `kernels="liger"` puts on.
APPLIED_KERNELS = {
    "norms": {"rms_norm"},
    "MLPs": {"swiglu"},
    "rotation": {"rope"},
    "all of them": {"rms_norm", "swiglu", "rope"},
}
SAVES = ((), ("attn_out",), ("attn_out", "kv"), ("*",), "auto")
OFFLOAD = ("none", "cpu", "auto")


@pytest.fixture
def liger(monkeypatch):
    return stand_in(monkeypatch)


def is_refused(family, kernels, saves):
    """Llama's rotation writes over the products that are to be saved; norms come between in the
    others."""
    return family == "llama" and saves == ("*",) and "rope" in APPLIED_KERNELS.get(kernels, ())


def error(liger, family, kernels, saves, offload):
    """Of the third step, with all that "auto" has chosen meanwhile; and the patched model."""
    stock, batch = built(family), make_batch("left-padded")
    ours = copy.deepcopy(stock)
    if kernels == "liger":
        liger(stock)
    else:
        for model in (stock, ours):
            liger(model, APPLIED_KERNELS[kernels])
    expected_loss, expected = gradients(stock, **batch)
    by = "liger" if kernels == "liger" else "own"
    streambp.patch(
        ours, streambp.StreamConfig(chunk_size=7, saves=saves, offload=offload, kernels=by)
    )
    if offload == "auto":
        manager_of(ours)._given_engine = Injected()  # on a link that carries everything
    for _ in range(3 if "auto" in (saves, offload) else 1):
        loss, grads = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-6 * expected_loss
    return relative_l2(grads, expected), ours


SMALL_CONFIGS = {
    ("llama", "liger", (), "none"), ("llama", "all of them", "auto", "none"), ("llama", "rotation", ("*",), "none"),
    ("qwen3", "liger", ("attn_out",), "cpu"), ("qwen3", "all of them", ("*",), "auto"),
    ("gemma3", "liger", ("*",), "none"), ("gemma3", "MLPs", "auto", "cpu"),
    (HYBRID, "liger", ("attn_out", "kv"), "cpu"), (HYBRID, "norms", (), "auto"),
}  # fmt: skip


@pytest.mark.fast(3)
@needs_states
@pytest.mark.parametrize(
    ("family", "kernels", "saves", "offload"),
    thinned(
        itertools.product(FAMILIES, ("liger", *APPLIED_KERNELS), SAVES, OFFLOAD),
        lambda *case: case in SMALL_CONFIGS,
    ),
)
def test_gradients_are_those_of_the_unpatched_model_with_the_same_kernels(
    family, kernels, saves, offload, liger
):
    if is_refused(family, kernels, saves):
        with pytest.raises(
            UnsupportedModelError,
            match=r"outputs of self_attn\.q_proj and self_attn\.k_proj are changed",
        ):
            error(liger, family, kernels, saves, offload)
        return
    off, ours = error(liger, family, kernels, saves, offload)
    assert off <= MAX_RELATIVE_ERROR
    described = streambp.describe(ours)
    assert {layer.path for layer in described.layers} == {"streams"}
    notes = " ".join(note for note in described.notes if "Liger's kernels compute" in note)
    assert ("input_layernorm" in notes) == (kernels not in ("MLPs", "rotation"))
    assert ("mlp" in notes) == (kernels not in ("norms", "rotation"))
    assert ("the rotation of queries and keys" in notes) == (kernels in ("rotation", "all of them"))


MUTANTS = {
    "refill not tried": (
        trials,
        "_find_refillable",
        lambda layers, *_: layers,
        ("qwen3", "liger", (), "none"),
    ),
    "products not looked at": (
        trials,
        "_find_writes",
        lambda *_: OverwrittenTensors(),
        ("llama", "rotation", ("*",), "none"),
    ),
    "kernels not put on": (
        chosen_kernels,
        "install_kernels",
        lambda model: fused_layers.InstalledKernels(),
        ("qwen3", "liger", (), "none"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name, liger, monkeypatch):
    owner, attribute, mutant, case = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    if name == "kernels not put on":  # these compute the same but for rounding: `describe` tells
        notes = streambp.describe(error(liger, *case)[1]).notes
        assert not any("Liger" in note for note in notes)
    else:
        # the latter: the witness sees it first
        with pytest.raises((AssertionError, BackwardError)):
            assert error(liger, *case)[0] <= 1e-3


def names_of(family):
    model = built(family)
    modeling = sys.modules[type(model).__module__]
    return {
        **vars(modeling),
        **{f"{type(m).__name__}.{n}": v for m in model.modules() for n, v in vars(type(m)).items()},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_left_after_unpatch_and_no_other_model_changes(family, liger):
    model, other_model, batch = built(family), built(family), make_batch("plain")
    attributes_before, names, expected = (
        own_attributes(model),
        names_of(family),
        gradients(model, **batch)[1],
    )
    expected_other = gradients(other_model, **batch)[1]
    streambp.patch(model, LIGER)
    assert any("Liger" in note for note in streambp.describe(model).notes)
    assert names_of(family) == names
    assert all(
        torch.equal(g, expected_other[name])
        for name, g in gradients(other_model, **batch)[1].items()
    )
    gradients(model, **batch)
    streambp.unpatch(model)
    assert own_attributes(model) == attributes_before
    grads = gradients(model, **batch)[1]
    assert all(torch.equal(grads[name], gradient) for name, gradient in expected.items())


def test_names_that_are_not_put_back_are_seen(liger, monkeypatch):
    """The test above can fail."""
    model = build("qwen3")
    modeling = sys.modules[type(model).__module__]
    real = modeling.Qwen3RMSNorm
    monkeypatch.setattr(modeling, "Qwen3RMSNorm", real)  # put back by pytest
    monkeypatch.setattr(modeling, "added_by_liger", False, raising=False)
    monkeypatch.setattr(real, "added_by_liger", False, raising=False)
    names = names_of("qwen3")
    monkeypatch.setattr(
        fused_layers, "_restore_global_names", lambda causal: contextlib.nullcontext()
    )
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
    assert relative_l2(gradients(twin, **batch)[1], expected) <= MAX_RELATIVE_ERROR
    assert fused_layers.fused_modules(twin.model.layers[0])
    streambp.unpatch(twin)
    assert not fused_layers.fused_modules(twin.model.layers[0])
    grads = gradients(twin, **batch)[1]
    assert all(torch.equal(grads[name], gradient) for name, gradient in expected.items())


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
        settings = peft.LoraConfig(
            r=4, lora_alpha=1, target_modules="all-linear", init_lora_weights=False
        )
        models.append(peft.get_peft_model(build("qwen3"), settings))
    stock, ours = models
    causal = stock.base_model.model
    liger(causal)
    expected = gradients(stock, **batch)[1]
    streambp.patch(ours, LIGER)
    off = relative_l2(gradients(ours, **batch)[1], expected)
    assert off <= MAX_RELATIVE_ERROR


def in_float32(self, x):
    """A norm that multiplies by its weight before it rounds."""
    normed = x.float() * torch.rsqrt(
        x.float().square().mean(-1, keepdim=True) + self.variance_epsilon
    )
    return (self.weight * normed).to(x.dtype)


class TestWhatLigerComputesOtherwise:
    """It stays the model's own, and `describe` says so."""

    def check(self, model, class_names, compares=True):
        stock, batch = copy.deepcopy(model), make_batch("plain")
        expected = gradients(stock, **batch)[1]
        streambp.patch(model, LIGER)
        if compares:
            note = f"Liger's kernels compute otherwise than {class_names}, which stay as they are"
            assert note in streambp.describe(model).notes
        return relative_l2(gradients(model, **batch)[1], expected)

    def test_another_activation(self, liger, monkeypatch):
        assert self.check(build("llama", hidden_act="gelu"), "LlamaMLP") <= MAX_RELATIVE_ERROR
        monkeypatch.setattr(fused_layers, "_differs", lambda *_: False)
        assert self.check(build("llama", hidden_act="gelu"), "", compares=False) > 1e-3

    def test_another_place_of_rounding(self, liger, monkeypatch):
        model = build("llama")
        monkeypatch.setattr(type(model.model.norm), "forward", in_float32)
        assert self.check(model, "LlamaRMSNorm") <= MAX_RELATIVE_ERROR
        assert fused_layers.fused_modules(model.model.layers[0]) == {"liger_kernel": ["mlp"]}

    def test_a_block_without_an_activation(self, liger):
        """As a mixture's under a dense model's type: Liger's forward reads products that it does
        not have."""
        model = build("llama")
        for layer in model.model.layers:
            layer.mlp = RoutedMLP(layer.mlp)
        assert self.check(model, "RoutedMLP") <= MAX_RELATIVE_ERROR
        names = fused_layers.fused_modules(model.model.layers[0])["liger_kernel"]
        assert "mlp.inner" in names
        assert "mlp" not in names

    def test_nothing_is_alike(self, liger, monkeypatch):
        model = build("llama", hidden_act="gelu")
        monkeypatch.setattr(type(model.model.norm), "forward", in_float32)
        attributes_before = own_attributes(model)
        with pytest.raises(
            ConfigError, match=r"it computes otherwise than LlamaMLP, LlamaRMSNorm\. Leave"
        ):
            streambp.patch(model, LIGER)
        assert own_attributes(model) == attributes_before


class RoutedMLP(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def fails(model, **_):
    model.model.norm.forward = lambda x: x
    raise TypeError("injected")


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        (
            lambda table: table.pop("qwen3"),
            torch.float32,
            "does not know 'qwen3'. It knows gemma3_text, llama, qwen3_5",
        ),
        (
            lambda table: table.update(qwen3=fails),
            torch.float32,
            "could not be applied to this Qwen3.*TypeError: injected",
        ),
        (
            lambda table: table.update(qwen3=lambda model: None),
            torch.float32,
            "it changes nothing of a model",
        ),
        (
            lambda table: None,
            torch.float64,
            "computes in float32 or less, and model.embed_tokens.weight is in float64",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_the_model_as_it_was(change, dtype, message, liger):
    change(getattr(sys.modules[PATCHES], LIGERS_TABLE))
    model = build("qwen3", dtype)
    attributes_before = own_attributes(model)
    with pytest.raises(ConfigError, match=message):
        streambp.patch(model, LIGER)
    assert own_attributes(model) == attributes_before


def test_without_liger(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, PATCHES, None)
    with pytest.raises(
        streambp.StreamBPError,
        match=r"liger_kernel is not installed. Install it: pip install 'streambp-hf.liger.'",
    ):
        streambp.patch(build("qwen3"), LIGER)
    with pytest.raises(ConfigError, match="kernels is 'triton'; it must be one of"):
        streambp.StreamConfig(kernels="triton")


@needs_states
@pytest.mark.parametrize("family", FAMILIES)
def test_ligers_own_functions_are_taken_off(family, monkeypatch):
    """What it sets, without running its kernels, which need a GPU."""
    pytest.importorskip(PATCHES, reason="liger-kernel is not installed")
    model = built(family)
    attributes_before, names = own_attributes(model), names_of(family)
    streambp.patch(model, LIGER)
    assert isinstance(model, PreTrainedModel)
    for layer in model.model.layers:
        assert {"input_layernorm", "mlp"} <= set(fused_layers.fused_modules(layer)["liger_kernel"])
    assert not model._streambp.fused.skipped_classes
    assert names_of(family) == names
    monkeypatch.setattr(chosen_kernels, "kernel_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(chosen_kernels, "why_no_driver", lambda kind: None)
    streambp.patch(model, streambp.StreamConfig(chunk_size=7))
    for layer in model.model.layers:
        names_in = fused_layers.fused_modules(layer)["liger_kernel"]
        assert {"input_layernorm", "mlp"} <= set(names_in)
        assert ("the rotation of queries and keys" in names_in) == (family != HYBRID)
    assert names_of(family) == names
    streambp.unpatch(model)
    assert own_attributes(model) == attributes_before


@pytest.mark.full
@needs_states
@needs_triton
def test_ligers_own_kernels():
    """In Triton's interpreter: gradients as unpatched with the same kernels."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    interpreted({"tests.ligers_kernels": ["compare"]})
