"""Adapters that move between unpatched and patched models: saved and loaded again, merged into the
weights, switched off for a while.

covers: model/adapters.py, layer/adapters.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.layer import adapted_linear as operation
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch

peft = pytest.importorskip("peft", reason="adapters need peft")

MAX_RELATIVE_ERROR = 1e-12
CONFIG = streambp.StreamConfig(chunk_size=5, unpatched_runs=False)
STEPS = 2
PATCH_ORDERS = {"unpatched, then patched": (False, True), "patched, then unpatched": (True, False)}


def make_model(patched, folder=None):
    """A model with new adapters, or with those of a folder."""
    model = build("qwen3", torch.float64)
    if folder is None:
        seed_torch(1)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    else:
        model = peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
    return streambp.patch(model.train(), CONFIG) if patched else model.train()


def steps_of(model, first, calls):
    """Some steps of SGD with momentum of its own; the operation ran if the model is patched."""
    calls.clear()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    for number in range(first, first + STEPS):
        model(**make_batch("left-padded", seed=number), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bool(calls) == any("_streambp" in vars(module) for module in model.modules())


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def through_a_folder(ways, folder, calls):
    """The adapters after steps of a model, and of another one that has loaded what it saved."""
    first, second = ways
    model = make_model(first)
    steps_of(model, 0, calls)
    model.save_pretrained(folder)
    model = make_model(second, folder)
    steps_of(model, STEPS, calls)
    return weights_of(model)


@pytest.mark.parametrize("way", PATCH_ORDERS)
def test_training_goes_on_from_a_saved_adapter(way, tmp_path, calls, float64_oracle):
    expected = through_a_folder((False, False), tmp_path / "stock", calls)
    grads = through_a_folder(PATCH_ORDERS[way], tmp_path / "ours", calls)
    assert worst_error(grads, expected) <= MAX_RELATIVE_ERROR


@pytest.mark.full
def test_mutant(tmp_path, calls, float64_oracle, monkeypatch):
    """Adapters without their scale."""
    monkeypatch.setattr(operation.AdapterScale, "b", 1.0)
    with pytest.raises(AssertionError):
        test_training_goes_on_from_a_saved_adapter("patched, then unpatched", tmp_path, calls, None)


def train_both(calls):
    """A model unpatched, and patched, after the same steps."""
    models = make_model(False), make_model(True)
    for model in models:
        steps_of(model, 0, calls)
    return models


def test_a_merged_model(calls, float64_oracle):
    """It has the same weights, and trains all of them without adapters."""
    models = [model.merge_and_unload().requires_grad_(True) for model in train_both(calls)]
    stock, ours = models
    assert worst_error(weights_of(ours), weights_of(stock)) <= MAX_RELATIVE_ERROR
    calls.clear()
    expected, grads = (gradients(model, **make_batch("plain"))[1] for model in models)
    assert worst_error(grads, expected) <= MAX_RELATIVE_ERROR
    assert not calls
    assert "with adapters" not in str(streambp.describe(ours))


def test_adapters_that_are_switched_off_for_a_while(calls, float64_oracle):
    """As a reference model in DPO and GRPO; training goes on as before."""
    models = train_both(calls)
    batch = make_batch("left-padded")
    calls.clear()
    losses = []
    for model in models:
        with model.disable_adapter(), torch.no_grad():
            losses.append(model(**batch, use_cache=False).loss)
    assert abs(losses[1] - losses[0]) <= MAX_RELATIVE_ERROR * abs(losses[0])
    assert not calls
    for model in models:
        steps_of(model, STEPS, calls)
    stock, ours = models
    assert worst_error(weights_of(ours), weights_of(stock)) <= MAX_RELATIVE_ERROR
    twin = copy.deepcopy(ours)
    streambp.unpatch(twin)
    calls.clear()
    grads, expected = (gradients(model, **batch)[1] for model in (twin, stock))
    assert worst_error(grads, expected) <= MAX_RELATIVE_ERROR
    assert not calls
