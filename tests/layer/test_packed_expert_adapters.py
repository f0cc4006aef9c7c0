"""Adapters of experts that are stored in 4 bits: the numbers of the same model with decoded
weights, one decoding for each pass, and peft's own forward outside of streamed layers.

peft alone cannot train such a model (model/packed_adapters.py), so the reference is a model whose
experts are the decoded weights.

covers: layer/expert_adapters.py, layer/packed_experts.py, model/packed_adapters.py
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import streambp
from streambp.errors import UnsupportedModelError
from streambp.layer import expert_adapters, packed_experts
from streambp.model import patching
from tests.layer.test_expert_adapters import (
    ADDED_ONCE_TEXT,
    BARS,
    FAMILIES,
    SETTINGS,
    adapted_experts,
    assert_left,
    assert_near,
    batch_of,
    both_active,
    dtype_of,
    exact,
    pytestmark,
    streamed,
)
from tests.layer.test_packed_experts import EXPERTS, WEIGHTS, by_bitsandbytes, pack
from tests.oracle import gradients, relative_l2
from tests.tiers import thinned

__all__ = ["exact", "pytestmark"]

ROWS = tuple(itertools.product(FAMILIES, BARS, SETTINGS))
FAST_CASES = (
    ("qwen3_moe", "grouped_mm", "chunks"),
    ("mixtral", "batched_mm", "default"),
    ("gpt_oss", "eager", "weights on the host"),
)


def in_4_bits(stock, packs=pack):
    """A copy whose experts are packed."""
    model = copy.deepcopy(stock)
    for module in list(model.modules()):
        if type(module).__name__.endswith("Experts"):
            for name in EXPERTS:
                packs(module, name, SimpleNamespace(append=ignored))
    return model


def ignored(entry):
    """The stand-in's record of decodings: a list in a layer that grows is a value of the layer."""


@contextlib.contextmanager
def decodings():
    """Yields a list with an entry for each weight that is decoded meanwhile."""
    decoded = []
    value, read = packed_experts.PackedWeight.value, packed_experts.DecodedOnce.__call__

    def noted(self):
        decoded.append(self.name)
        return value(self)

    def noted_read(self):
        if self.decoded is None:
            decoded.append(self.module)
        return read(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_experts.PackedWeight, "value", noted)
        patch.setattr(packed_experts.DecodedOnce, "__call__", noted_read)
        yield decoded


def as_decoded(stock, packs=pack):
    """A copy whose experts are plain parameters with the decoded values."""
    model = copy.deepcopy(stock)
    for module in list(model.modules()):
        if type(module).__name__.endswith("Experts"):
            for name in EXPERTS:
                twin = nn.Module()
                twin.weight = nn.Parameter(getattr(module, name).detach().clone())
                packs(twin, "weight", [])
                getattr(module, name).data.copy_(twin.weight)
    return model


def check(family, implementation, settings="chunks", packs=pack, change=None):
    """Two steps against the decoded model's; the second runs without trials."""
    stock = adapted_experts(family, dtype_of(implementation), implementation)
    if change is not None:
        change(stock)
    ours = streamed(in_4_bits(stock, packs), **SETTINGS[settings])
    batch = batch_of()
    expected = gradients(as_decoded(stock, packs), **batch)
    assert any("experts" in name for name in expected[1])
    assert_near(gradients(ours, **batch), expected, BARS[implementation])
    with decodings() as decoded:
        assert_near(gradients(ours, **batch), expected, BARS[implementation])
    text = str(streambp.describe(ours))
    assert ADDED_ONCE_TEXT in text
    assert "streams: 2 x" in text
    assert_left(ours)
    assert all(len(weights) == 1 for weights in parametrizations(ours))
    assert not parametrize._cache_enabled
    return len(decoded)


def packed_mixtral():
    return in_4_bits(adapted_experts("mixtral", torch.float32, "eager"))


def parametrizations(model):
    modules = [m for m in model.modules() if isinstance(m, parametrize.ParametrizationList)]
    assert len(modules) == WEIGHTS
    return modules


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("family", "implementation", "settings"), thinned(ROWS, lambda *row: row in FAST_CASES)
)
def test_cover(family, implementation, settings, exact):
    """Forward and backward decode each weight once."""
    exact(implementation)
    assert check(family, implementation, settings) == 2 * WEIGHTS


@pytest.mark.parametrize("family", thinned(FAMILIES, lambda family: family == "gpt_oss"))
def test_bitsandbytes(family):
    """In float32: bitsandbytes packs no float64."""
    assert check(family, "grouped_mm", packs=by_bitsandbytes) == 2 * WEIGHTS


@pytest.mark.full
def test_bitsandbytes_on_the_host():
    decodings = check("mixtral", "grouped_mm", "weights on the host", by_bitsandbytes)
    assert decodings == 2 * WEIGHTS


@pytest.mark.full
def test_two_active_adapters(exact):
    exact("eager")
    check("gpt_oss", "eager", change=both_active)


@pytest.mark.fast(2)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_calls_that_do_not_stream(implementation, exact):
    """Evaluation, switched-off adapters, and layers for which peft's code is asked."""
    exact(implementation)
    bar = BARS[implementation]
    stock = adapted_experts("qwen3_moe", dtype_of(implementation), implementation)
    wide = as_decoded(stock)
    ours = streamed(in_4_bits(stock), chunk_size=8, kernels="own")
    batch = batch_of()
    expected = gradients(wide, **batch)
    for _ in range(2):
        assert_near(gradients(ours, **batch), expected, bar)
        with torch.no_grad():
            loss = ours.eval()(**batch).loss
            ours.train()
        assert abs(loss - expected[0]) <= bar * expected[0]
        with torch.no_grad(), ours.disable_adapter(), wide.disable_adapter():
            without = wide(**batch).loss
            assert abs(ours(**batch).loss - without) <= bar * without
        assert abs(without - expected[0]) > 1e-3
    assert all(len(weights) == 1 for weights in parametrizations(ours))


def test_unpatch_restores_the_modules():
    ours = streamed(packed_mixtral())
    modules = [m for m in ours.modules() if "_activate_lora" in vars(m)]
    assert len(modules) == WEIGHTS
    twin = copy.deepcopy(ours)
    assert all(
        vars(m)["_activate_lora"].module is m for m in twin.modules() if "_activate_lora" in vars(m)
    )
    streambp.unpatch(ours)
    assert not any("_activate_lora" in vars(module) for module in ours.modules())


def test_an_adapter_that_peft_has_left_is_refused():
    model = packed_mixtral()
    with torch.no_grad():
        model(**batch_of())
    if all(len(weights) == 1 for weights in parametrizations(model)):
        pytest.skip("this version of peft removes its adapters")
    with pytest.raises(UnsupportedModelError, match="before the first forward"):
        streambp.patch(model)


def test_experts_that_are_packed_after_patch_are_refused():
    stock = adapted_experts("mixtral", torch.float32, "eager")
    ours = streamed(stock)
    for module in list(ours.modules()):
        if type(module).__name__.endswith("Experts"):
            for name in EXPERTS:
                pack(module, name, SimpleNamespace(append=ignored))
    with pytest.raises(UnsupportedModelError, match="again after the experts"):
        gradients(ours, **batch_of())


@pytest.mark.full
def test_an_error_in_a_step_leaves_the_model_usable(float64_oracle, monkeypatch):
    stock = adapted_experts("gpt_oss", torch.float64, "eager")
    ours = streamed(in_4_bits(stock))
    batch = batch_of()
    first_step = gradients(ours, **batch)
    real, reads = expert_adapters.folded_weight, []

    def failing(*args):
        reads.append(args)
        if len(reads) == 6:
            raise ArithmeticError("sixth sum")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(expert_adapters, "folded_weight", failing)
        with pytest.raises(ArithmeticError, match="sixth sum"):
            gradients(ours, **batch)
    assert_left(ours)
    assert not parametrize._cache_enabled
    later_step = gradients(ours, **batch)
    assert torch.equal(later_step[0], first_step[0])
    assert all(torch.equal(later_step[1][name], value) for name, value in first_step[1].items())


@pytest.mark.full
def test_bfloat16_is_the_decoded_models(exact):
    """The sum has the bytes of peft's sum of the decoded weight: losses agree to the bit, and the
    gradients with those of the same chunks on decoded weights."""
    stock = adapted_experts("gpt_oss", torch.bfloat16, "grouped_mm", rank=8)
    batch = batch_of()
    computed = gradients(streamed(in_4_bits(stock)), **batch)
    expected = gradients(streamed(as_decoded(stock)), **batch)
    assert torch.equal(computed[0], expected[0])
    assert relative_l2(computed[1], expected[1]) == 0


@pytest.mark.full
def test_mutant_decoded_in_each_chunk(monkeypatch):
    monkeypatch.setattr(expert_adapters.FactoredExperts, "_is_made_of", lambda *_: False)
    with pytest.raises(AssertionError):
        test_cover("qwen3_moe", "grouped_mm", "chunks", lambda implementation: None)


@pytest.mark.full
def test_mutant_that_reads_torchs_cache(monkeypatch, exact):
    namespace = SimpleNamespace(
        is_parametrized=parametrize.is_parametrized, _cache={}, _cache_enabled=0
    )
    monkeypatch.setattr(packed_experts, "parametrize", namespace)
    with pytest.raises((AssertionError, RuntimeError, streambp.StreamBPError)):
        test_calls_that_do_not_stream("eager", exact)


@pytest.mark.full
def test_mutant_by_pefts_own_activation(monkeypatch, exact):
    monkeypatch.setattr(patching, "activate_packed", lambda model: None)
    monkeypatch.setattr(expert_adapters, "ADAPTER_ACTIVATION", "training")
    with pytest.raises((AssertionError, RuntimeError)):
        test_calls_that_do_not_stream("eager", exact)
