"""A `patch` that is refused leaves what was there: an unpatched model as it was, a patched one with
its patch.

covers: model/patch_rollback.py, model/patching.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import modeling_utils

import streambp
from streambp.errors import ConfigError, MissingLibraryError, StreamBPError, UnsupportedModelError
from streambp.model import installed_patch, patch_rollback, patching
from streambp.model.causal_lm import CausalLMForward
from streambp.model.wrappers import BackboneForward, LayerForward
from streambp.offload.manager import OffloadManager
from tests.families import build, make_batch
from tests.tiers import thinned

STREAM_CONFIG = streambp.StreamConfig(chunk_size=5, saves=("attn_out",))
EARLIER_PATCHES = {
    "plain": STREAM_CONFIG,
    "defaults": streambp.StreamConfig(),
    "offload": streambp.StreamConfig(chunk_size=5, saves=("attn_out", "kv"), offload="cpu"),
    "weights": streambp.StreamConfig(chunk_size=5, saves=(), weights="cpu"),
    "compiled": streambp.StreamConfig(chunk_size=5, saves=(), kernels="compiled"),
    "lazy": streambp.StreamConfig(chunk_size=5, lazy_logits=True),
}


def snapshot(model):
    """All that stands in modules and their tables, by identity and in its order, and in wrappers of
    the patch."""
    rows = []
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            inside = (
                list(value.items())
                if isinstance(value, dict)
                else value
                if isinstance(value, list)
                else ()
            )
            rows.append((name, key, id(value), [*map(id, inside)] if isinstance(value, list) else [
                (k, id(v)) for k, v in inside]))  # fmt: skip
    state = model.__dict__.get("_streambp")
    for wrapper in () if state is None else state.wrappers:
        rows.append(
            (type(wrapper).__name__, [(key, id(value)) for key, value in vars(wrapper).items()])
        )
    return rows


def unchanged(model, monkeypatch):
    """The config is enough."""


def interrupt(target, name):
    """Somebody's interrupt, in the middle of a patch."""

    def prepare(model, monkeypatch):
        def stop(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(target, name, stop)

    return prepare


def third_party_attention(model, monkeypatch):
    """Another library's attention under the model's name."""
    space = {"__name__": "another.library"}
    exec("def attend(module, query, key, value, mask, **kwargs):\n    return query, None", space)
    monkeypatch.setitem(
        modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", space["attend"]
    )


def without_layers(model, monkeypatch):
    """Somebody has replaced the layers by modules that cannot be streamed."""
    monkeypatch.setitem(model.model._modules, "layers", nn.ModuleList([nn.Identity()]))


CASES = {
    "no config": (unchanged, StreamBPError, "chunk_size=5"),
    "no such Linear": (unchanged, ConfigError, streambp.StreamConfig(saves=("mlp.nobody",))),
    "more layers than there are": (unchanged, ConfigError, streambp.StreamConfig(saves=("attn_out@99",))),
    "liger": (unchanged, (MissingLibraryError, ConfigError), streambp.StreamConfig(kernels="liger")),
    "foreign attention": (third_party_attention, UnsupportedModelError, STREAM_CONFIG),
    "no layers": (without_layers, UnsupportedModelError, STREAM_CONFIG),
    "stopped in kernels": (interrupt(patching, "choose_kernels"), KeyboardInterrupt, STREAM_CONFIG),
    "stopped in a layer": (interrupt(LayerForward, "install"), KeyboardInterrupt, STREAM_CONFIG),
    "stopped in the model": (interrupt(CausalLMForward, "install"), KeyboardInterrupt,
        STREAM_CONFIG),
    "stopped in the backbone": (interrupt(BackboneForward, "__init__"), KeyboardInterrupt,
        STREAM_CONFIG),
    "stopped in memory": (interrupt(OffloadManager, "__init__"), KeyboardInterrupt,
        EARLIER_PATCHES["offload"]),
    "stopped at the head": (interrupt(patching, "copy_head"), KeyboardInterrupt, STREAM_CONFIG),
}  # fmt: skip


FAST_CASES = (
    "no such Linear",
    "liger",
    "foreign attention",
    "stopped in a layer",
    "stopped at the head",
)


def step(model, batch):
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def check(case, first, monkeypatch):
    prepare, error, config = CASES[case]
    model = build("llama", torch.float64).train()
    batch = make_batch("plain", length=16)
    if first is not None:
        streambp.patch(model, EARLIER_PATCHES[first])
    expected = step(model, batch)
    described = None if first is None else str(streambp.describe(model))
    snapshot_before = snapshot(model)
    with monkeypatch.context() as within:
        prepare(model, within)
        with pytest.raises(error):
            streambp.patch(model, config)
    assert snapshot(model) == snapshot_before
    assert (None if first is None else str(streambp.describe(model))) == described
    loss, gradients = step(model, batch)
    assert loss == expected[0]
    assert all(torch.equal(gradients[name], grad) for name, grad in expected[1].items())
    # And what was there comes off as ever.
    streambp.unpatch(model)
    assert not installed_patch.is_patched(model)
    assert not any(
        "forward" in module.__dict__ or "_streambp" in module.__dict__ for module in model.modules()
    )


@pytest.mark.parametrize("first", [None, "plain"])
@pytest.mark.parametrize("case", thinned(CASES, lambda case: case in FAST_CASES))
def test_a_refused_patch_leaves_what_was_there(case, first, monkeypatch):
    check(case, first, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("first", [name for name in EARLIER_PATCHES if name != "plain"])
@pytest.mark.parametrize("case", ["no such Linear", "stopped at the head"])
def test_whatever_the_first_patch_was(case, first, monkeypatch):
    check(case, first, monkeypatch)


@pytest.mark.parametrize("case", ["no such Linear", "stopped at the head"])
def test_mutant_nothing_is_put_back(case, monkeypatch):
    monkeypatch.setattr(patch_rollback.AttributeCopy, "restore", lambda self: None)
    with pytest.raises(AssertionError):
        check(case, "plain", monkeypatch)


@pytest.mark.parametrize("case", ["stopped in a layer", "stopped at the head"])
def test_mutant_tables_stay_as_they_are(case, monkeypatch):
    monkeypatch.setattr(patch_rollback, "CHANGED_TABLES", ())
    with pytest.raises(AssertionError):
        check(case, "plain", monkeypatch)


def test_a_part_of_a_patched_model_is_left_alone(monkeypatch):
    model = streambp.patch(build("llama", torch.float64), STREAM_CONFIG)
    snapshot_before = snapshot(model)
    with pytest.raises(StreamBPError, match="part of a model that is patched"):
        streambp.patch(model.model, STREAM_CONFIG)
    assert snapshot(model) == snapshot_before
