"""What one operation serves, by setting: a covering design, in which each two values of two
settings stand in some row.

In float64 gradients are at most 1e-12 from the unpatched model's; what falls back is peft's code to
the bit.

covers: layer/adapters.py, layer/adapted_linear.py
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import streambp
from streambp.layer import adapters
from streambp.layer.adapters import Adaptation
from tests.families import build, make_batch
from tests.layer.test_adapters import (
    MAX_RELATIVE_ERROR,
    adapters_of,
    everything_trained,
    two_active,
    with_adapters,
)
from tests.model.test_kernels_cover import covering
from tests.offload.weights_runs import invert
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch
from tests.tiers import thinned

peft = pytest.importorskip("peft", reason="adapters need peft")

pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")
LENGTH = 17  # two chunks and a token
UNCHUNKED_SIZE = 64
EXTRA_SETTINGS = {
    "target_modules": ["q_proj", "embed_tokens", "gate_proj"],
    "modules_to_save": ["lm_head"],
}
PATTERNS = {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"up_proj": 5}, "use_rslora": True}


def compiled(model):
    for layer in model.get_base_model().model.layers:
        layer.mlp.compile(backend="eager", dynamic=False)


# Settings of the adapters, what is done to each model before it is patched, and StreamConfig's.
KINDS = {
    "patterns, rslora": (PATTERNS, None, {}),
    "biases": ({"bias": "all", "lora_bias": True}, None, {}),
    "dropout": ({"lora_dropout": 0.3}, None, {}),
    "two active": ({}, two_active, {}),
    "switched and merged": ({}, None, {}),
    "DoRA": ({"use_dora": True}, None, {}),
    "other modules beside": (EXTRA_SETTINGS, None, {}),
    "base weights trained": ({}, everything_trained, {}),
    "weights on the host": ({"lora_bias": True}, None, {"weights": "cpu"}),
    "a compiled MLP": ({}, compiled, {}),
    "autocast": ({}, None, {}),
    "float16": ({}, None, {}),
}
PEFT_ONLY_ADAPTERS = ("DoRA", "float16")
INPUTS = {32, 40}  # of down_proj, and of the other Linears
SAVES = ((), ("attn_out",), "auto")
FACTORS = (tuple(KINDS), SAVES, ("none", "cpu"), (8, UNCHUNKED_SIZE), (1, 2))
ROWS = covering(FACTORS)
FAST_CASE = next(row for row in ROWS if row[0] == "weights on the host" and row[3] == 8)


def test_the_design_covers():
    for i, j in itertools.combinations(range(len(FACTORS)), 2):
        assert {(row[i], row[j]) for row in ROWS} == set(itertools.product(FACTORS[i], FACTORS[j]))
    print(f"{len(ROWS)} rows")


def models_of(kind, kernels=("auto",), **settings):
    """The unpatched model, and one patched copy for each value of `kernels`."""
    lora_settings, change, config_settings = KINDS[kind]
    dtype = torch.float16 if kind == "float16" else torch.float64
    stock = with_adapters(build("qwen2", dtype, tie_word_embeddings=False), dtype, **lora_settings)
    models = [stock, *(copy.deepcopy(stock) for _ in kernels)]
    for model in models if change is not None else ():
        change(model)
    for model, name in zip(models[1:], kernels, strict=True):
        config = streambp.StreamConfig(
            unpatched_runs=False, kernels=name, **settings, **config_settings
        )
        streambp.patch(model, config)
        if "weights" in config_settings:
            invert(model)
    return models


def step(model, batch, autocast=False):
    seed_torch(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return gradients(model, **batch)


def assert_near(computed, expected):
    assert abs(computed[0] - expected[0]) <= MAX_RELATIVE_ERROR * abs(expected[0])
    assert worst_error(computed[1], expected[1]) <= MAX_RELATIVE_ERROR


def check_bits(kind, batch, calls, **settings):
    """And as near to the unpatched model as peft's code is, in float64."""
    stock, ours, own_model = models_of(kind, ("auto", "own"), **settings)
    for _ in range(2):  # the second one knows what backward leaves unread
        computed, expected = step(ours, batch), step(own_model, batch)
        assert torch.equal(computed[0], expected[0])
        assert computed[1].keys() == expected[1].keys()
        assert all(torch.equal(computed[1][name], value) for name, value in expected[1].items())
    assert not calls
    if kind != "float16":
        assert_near(computed, step(stock, batch))


def switched(model, number):
    """What is done before each step."""
    if number in (1, 2):
        for module in adapters_of(model):
            module.enable_adapters(number == 2)
    if number == 3:
        model.merge_adapter()
    if number == 4:
        model.unmerge_adapter()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(number in (1, 3) or "lora_" in name)


def check_switched(batch, calls, **settings):
    stock, ours = models_of("switched and merged", **settings)
    for number in range(5):
        calls.clear()
        for model in (stock, ours):
            switched(model, number)
        assert_near(step(ours, batch), step(stock, batch))
        assert bool(calls) == (number not in (1, 3))


def check(kind, saves, offload, chunk, rows, calls):
    batch = make_batch("plain" if rows == 1 else "left-padded", length=LENGTH, rows=rows)
    settings = {"saves": saves, "offload": offload, "chunk_size": chunk, "rows": "as_given"}
    if kind in PEFT_ONLY_ADAPTERS:
        check_bits(kind, batch, calls, **settings)
        return
    if kind == "switched and merged":
        check_switched(batch, calls, **settings)
        return
    masks_of_chunks = kind == "dropout" and chunk != UNCHUNKED_SIZE  # unpatched there are others
    stock, ours, *own_models = models_of(
        kind, ("auto", "own") if masks_of_chunks else ("auto",), **settings
    )
    autocast = kind == "autocast"  # which leaves float64 as it is
    step(ours, batch, autocast)
    calls.clear()
    computed = step(ours, batch, autocast)
    assert {shape[-1] for shape in calls} == (
        {32} if kind in ("a compiled MLP", "other modules beside") else INPUTS
    )
    calls.clear()
    if masks_of_chunks:
        step(own_models[0], batch)
    assert_near(computed, step(own_models[0] if masks_of_chunks else stock, batch, autocast))
    assert not calls


@pytest.mark.parametrize(
    ("kind", "saves", "offload", "chunk", "rows"), thinned(ROWS, lambda *row: row == FAST_CASE)
)
def test_covering_design(kind, saves, offload, chunk, rows, calls, float64_oracle):
    check(kind, saves, offload, chunk, rows, calls)


def weights_of_another_layer(monkeypatch):
    """Weights that came to the device first are taken for those of each later layer."""
    cache, real = {}, Adaptation._base

    def base(self, *args):
        weights = real(self, *args)
        return cache.setdefault(weights[0].shape, weights)

    monkeypatch.setattr(Adaptation, "_base", base)


def compiled_parts_are_overlooked(monkeypatch):
    monkeypatch.setattr(adapters, "compiled_submodules", lambda layer: [])


def unmasked(monkeypatch):
    monkeypatch.setattr(Adaptation, "_mask", lambda self, x, adapter: None)


def variants_are_overlooked(monkeypatch):
    real = adapters._why_not

    def why_not(*args):
        why = real(*args)
        return None if why is not None and "Dora" in why else why

    monkeypatch.setattr(adapters, "_why_not", why_not)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        (weights_of_another_layer, "weights on the host"),
        (compiled_parts_are_overlooked, "a compiled MLP"),
        (unmasked, "dropout"),
        (variants_are_overlooked, "DoRA"),
    ],
)
def test_mutants(mutant, kind, calls, float64_oracle, monkeypatch):
    mutant(monkeypatch)
    # RuntimeError: torch.compile fails on an autograd Function that shares a product.
    with pytest.raises((AssertionError, streambp.StreamBPError, RuntimeError)):
        check(kind, (), "none", 8, 2, calls)
