"""The "streambp" section of a DeepSpeed config.

covers: integrations/deepspeed.py
"""

from __future__ import annotations

import base64
import json
import sys
import types

import pytest

import streambp
from streambp.integrations import deepspeed as plugin
from tests.families import build
from tests.model.test_training import train

SETTINGS = {
    "zero_optimization": {"stage": 2},
    "streambp": {"chunk_size": 512, "saves": ["kv"], "head": False},
}


@pytest.mark.parametrize("form", ["dictionary", "file", "base64"])
def test_initialize_patches_and_hands_on_the_rest(form, tmp_path, monkeypatch):
    arguments = {}
    stand_in = types.SimpleNamespace(
        initialize=lambda **kwargs: arguments.update(kwargs) or "engine"
    )
    monkeypatch.setitem(sys.modules, "deepspeed", stand_in)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SETTINGS))
    encoded = base64.urlsafe_b64encode(json.dumps(SETTINGS).encode()).decode()
    config = {"dictionary": SETTINGS, "file": str(path), "base64": encoded}[form]
    model = build("qwen3")
    assert plugin.initialize(model=model, config=config, optimizer="optimizer") == "engine"
    assert arguments == {
        "model": model,
        "config": {"zero_optimization": {"stage": 2}},
        "optimizer": "optimizer",
    }
    description = streambp.describe(model)
    assert (description.chunk_size, description.saves) == ("512", ("kv",))
    assert SETTINGS["streambp"]


def test_without_a_section_nothing_is_patched(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "deepspeed", types.SimpleNamespace(initialize=lambda **kwargs: kwargs)
    )
    model = build("qwen3")
    plugin.initialize(
        types.SimpleNamespace(deepspeed_config=None), model, config={"train_batch_size": 2}
    )
    with pytest.raises(streambp.StreamBPError, match="not patched"):
        streambp.describe(model)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"streambp": {"chunksize": 5}}, "chunksize"),
        ({"streambp": {"chunk_size": "large"}}, "chunk_size"),
        ({"streambp": {"saves": "kv"}}, "saves"),
        ({"streambp": ["kv"]}, "streambp"),
        (
            {"streambp": {}, "activation_checkpointing": {"partition_activations": True}},
            "activation_checkpointing",
        ),
    ],
)
def test_bad_sections_name_the_key(settings, key):
    with pytest.raises(streambp.StreamBPError, match=key):
        plugin.stream_config(settings)


@pytest.mark.full
def test_callback_patches_a_trainers_model(tmp_path, attended_chunks):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    # set afterwards: DeepSpeed itself is not under test here
    arguments.deepspeed = {"streambp": {"chunk_size": 5}}
    model = build("qwen3")
    plugin.DeepSpeedStreamCallback().on_init_end(arguments, None, None, model=model)
    train(model, tmp_path)
    assert streambp.describe(model).chunk_size == "5"
    assert attended_chunks.count(5) > 10
