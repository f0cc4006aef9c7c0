"""`describe` tells of the model as it is now, whatever became of its layers after `patch`.

covers: model/describe.py, model/patching.py, reporting.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import streambp
from streambp.layer import call
from streambp.model import describe as describing
from streambp.model.steps import Steps
from streambp.reporting import report_safely
from tests import zoo
from tests.families import build, make_batch
from tests.model.test_contract import check_agree
from tests.seeds import seed_torch
from tests.versions import needs_states

CONFIG = streambp.StreamConfig(chunk_size=5)
STREAMS, UNPATCHED, REMOVED = "streams", "unpatched", "removed"


def rows(model):
    return [(layer.name, layer.path) for layer in streambp.describe(model).layers]


def pruned(model):
    model.model.layers = model.model.layers[1:]


def replaced_by_a_layer(model):
    model.model.layers[1] = type(model.model.layers[1])(model.config, 1).double()


def replaced_by_nothing(model):
    model.model.layers[1] = PassedModule()


class PassedModule(nn.Module):
    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (pruned, [("model.layers.0", STREAMS), ("model.layers.1", STREAMS), ("layer 0", REMOVED)]),
        (
            replaced_by_a_layer,
            [
                ("model.layers.0", STREAMS),
                ("model.layers.1", UNPATCHED),
                ("model.layers.2", STREAMS),
                ("layer 1", REMOVED),
            ],
        ),
        (
            replaced_by_nothing,
            [("model.layers.0", STREAMS), ("model.layers.2", STREAMS), ("layer 1", REMOVED)],
        ),
    ],
)
def test_layers_that_came_and_went_after_patch(change, expected, float64_oracle):
    stock = build("llama", torch.float64, num_hidden_layers=3)
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    for model in (stock, ours):
        seed_torch(0)
        change(model)
    assert rows(ours) == expected
    check_agree(stock, ours, **make_batch("plain"))
    assert rows(ours) == expected
    text = str(streambp.describe(ours))
    assert "taken out of the model after streambp.patch" in text
    assert ("patch the model again" in text) == (change is replaced_by_a_layer)
    if change is replaced_by_a_layer:
        assert rows(streambp.patch(ours, CONFIG)) == [
            (f"model.layers.{index}", STREAMS) for index in range(3)
        ]


def test_layers_that_peft_repeats(float64_oracle):
    """Its copies of streamed layers stream."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj"], layer_replication=[[0, 2], [1, 3]], init_lora_weights=False
    )
    models = []
    for patch in (False, True):
        model = build("llama", torch.float64, num_hidden_layers=3)
        model = streambp.patch(model, CONFIG) if patch else model
        seed_torch(0)
        models.append(peft.get_peft_model(model, lora))
    expected = [(f"base_model.model.model.layers.{index}", STREAMS) for index in range(4)]
    assert [row for row in rows(models[1]) if row[1] != REMOVED] == expected
    check_agree(*models, **make_batch("plain"))


def test_layers_inside_checkpoint_wrappers_are_no_others():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    ours = streambp.patch(build("llama", torch.float64), CONFIG)
    apply_activation_checkpointing(
        ours, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer"
    )
    assert [path for _, path in rows(ours)] == [STREAMS, STREAMS]


class Wrapping(nn.Module):
    """As DDP and engines hold a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_what_a_wrapper_was_patched_with_is_told_and_taken_off_by_the_model_inside():
    inner = build("qwen3")
    outer = streambp.patch(Wrapping(inner), CONFIG)
    assert rows(inner) == [(name, STREAMS) for name in ("model.layers.0", "model.layers.1")]
    for part in (inner.model, inner.model.layers[0]):  # not all that streams
        for question in (streambp.describe, streambp.unpatch):
            with pytest.raises(
                streambp.StreamBPError,
                match=r"part of a Wrapping that was given.*Pass the whole model",
            ):
                question(part)
    assert streambp.unpatch(inner) is inner
    assert "_streambp" not in outer.__dict__
    assert not any("forward" in module.__dict__ for module in outer.modules())
    assert streambp.unpatch(inner) is inner  # nothing happens


@pytest.mark.parametrize(
    "broken",
    ["_layers", "_saves_texts", "_describe_offload", "_describe_attention", "head_text", "_notes"],
)
def test_a_part_that_cannot_be_told_says_why(broken, monkeypatch):
    model = streambp.patch(build("qwen3"), CONFIG)
    full_text = str(streambp.describe(model))

    def fails(*_):
        raise KeyError("a hook of\nanother library")

    monkeypatch.setattr(describing, broken, fails)
    text = str(streambp.describe(model))
    assert r"could not be told (KeyError: 'a hook of\nanother library')" in text
    assert len(set(full_text.splitlines()) & set(text.splitlines())) >= 4


def test_without_told_a_part_that_fails_ends_the_report(monkeypatch):
    """The mutant of reports."""
    monkeypatch.setattr(describing, "report_safely", lambda part, *args, otherwise: part(*args))
    with pytest.raises(KeyError):
        test_a_part_that_cannot_be_told_says_why("_layers", monkeypatch)


def test_a_report_of_an_error_that_cannot_be_shown():
    class HostileError(Exception):
        def __str__(self):
            raise ValueError("no text")

        __repr__ = __str__

    def fails():
        raise HostileError

    assert (
        report_safely(fails, otherwise=str) == "HostileError: a HostileError that cannot be shown"
    )


@pytest.mark.parametrize(
    ("family", "mode", "why"),
    [
        pytest.param("lfm2", "plain", call.REASON_LONG_CHUNK_STATES.format(2), marks=needs_states),
        ("qwen3", "prefix", call.REASON_LONG_CHUNK_MASK),
    ],
)
def test_why_a_chunk_is_longer_than_asked_for(family, mode, why):
    """26 tokens in chunks of 5 leave one; a mask may have no end in the middle of an image."""
    model = streambp.patch(
        zoo.build(family, torch.float32) if family == "lfm2" else build(family),
        streambp.StreamConfig(chunk_size=5),
    )
    batch = make_batch("plain", length=26)
    if mode == "prefix":
        mask = torch.ones(26, 26).tril()
        mask[3:12, 3:12] = 1
        batch["attention_mask"] = torch.where(
            mask[None, None] > 0, 0.0, torch.finfo(torch.float32).min
        ).expand(2, 1, -1, -1)
    model(**batch, use_cache=False).loss.backward()
    text = str(streambp.describe(model))
    assert f"tokens: {why}" in text
    assert (
        sum(
            reason in text
            for reason in (call.REASON_LONG_CHUNK_MASK, call.REASON_LONG_CHUNK_STATES.format(2))
        )
        == 1
    )


def test_layers_that_another_module_calls():
    model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=5))
    x = torch.randn(2, 26, 32, requires_grad=True)
    positions = torch.arange(26)[None]
    embedded = model.model.rotary_emb(x, positions)
    with torch.no_grad():
        model.model.layers[0](x, position_embeddings=embedded)
    assert str(streambp.describe(model)).startswith("last step: none with gradients yet")
    model.model.layers[0](x, position_embeddings=embedded).sum().backward()
    assert str(streambp.describe(model)).startswith(f"last step: {describing.OTHER_CALLER_TEXT}")
    model(**make_batch("plain", length=26), use_cache=False).loss.backward()
    assert str(streambp.describe(model)).startswith("last step: 52 tokens")


def test_a_report_that_forgets_other_callers_is_found(monkeypatch):
    forgotten = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(Steps, "bypasses_backbone", forgotten, raising=False)
    with pytest.raises(AssertionError):
        test_layers_that_another_module_calls()
