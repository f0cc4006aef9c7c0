"""`chunk_size="auto"` and `saves="auto"` are one rule through every door: the device's memory
decides wherever it is known.

covers: integrations/deepspeed.py, integrations/trl/trainer.py, integrations/trl/ppo.py,
launch/process.py, planner/auto.py
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import streambp
from streambp.model.wrappers import LayerForward
from streambp.offload import free_memory
from streambp.offload.policy import SavesPolicy
from streambp.planner import auto
from tests.families import build

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def profiles():
    return []


@pytest.fixture(autouse=True)
def counted_once(profiles, monkeypatch):
    """All doors are given the same model: its step is counted by the first that asks."""
    real = auto.survey

    def survey(*args, **kwargs):
        profiles.extend([] if profiles else [real(*args, **kwargs)])
        return profiles[0]

    monkeypatch.setattr(auto, "survey", survey)
    monkeypatch.setattr(auto, "_costs", lambda *_: {})


@pytest.fixture(autouse=True)
def memory_that_is_known(monkeypatch):
    monkeypatch.setattr(free_memory, "free_memory", lambda device: 10**12)


def model():
    return build("qwen3", torch.bfloat16)


def by_patch():
    return streambp.patch(model())


def by_deepspeeds_section(monkeypatch):
    deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

    from streambp.integrations.deepspeed import initialize

    monkeypatch.setattr(deepspeed, "initialize", lambda model, config, **kwargs: model)
    return initialize(model=model(), config={"streambp": {}})


def by_deepspeeds_callback(tmp_path):
    from streambp.integrations.deepspeed import DeepSpeedStreamCallback

    path = tmp_path / "config.json"
    path.write_text(json.dumps({"streambp": {}}))
    patched_model = model()
    DeepSpeedStreamCallback().on_init_end(
        type("Arguments", (), {"deepspeed": str(path)})(), None, None, model=patched_model
    )
    return patched_model


def by_trls_trainers():
    from streambp.integrations.trl.trainer import add_streamed_head
    from streambp.model.fused_head import FusedHead

    patched_model = model()
    add_streamed_head(streambp.StreamConfig(), FusedHead, patched_model)
    return patched_model


def by_launch(monkeypatch):
    from streambp.launch import process

    # The account that it would print at the end.
    monkeypatch.setattr(process.atexit, "register", lambda function, **kwargs: None)
    patched_model = model()
    assert process.LaunchedProcess(streambp.StreamConfig()).patch_model(patched_model)
    return patched_model


def check(patched_model: nn.Module):
    state = patched_model._streambp
    assert isinstance(state.saves_policy, SavesPolicy)
    layer_states = [w.layer_state for w in state.wrappers if isinstance(w, LayerForward)]
    assert all(
        layer_state.saves_policy is state.saves_policy
        and layer_state.chunk_rule == state.saves_policy.chunk
        for layer_state in layer_states
    )
    assert state.saves_policy.figures.need is None  # nothing is decided yet
    state.saves_policy.begin_forward(torch.device("cpu"))
    assert isinstance(state.saves_policy.figures.need, auto.StepNeed)


def test_patch():
    check(by_patch())


def test_deepspeeds_section(monkeypatch):
    check(by_deepspeeds_section(monkeypatch))


def test_deepspeeds_callback(tmp_path):
    check(by_deepspeeds_callback(tmp_path))


def test_trls_trainers():
    pytest.importorskip("trl", reason="TRL is not installed")
    check(by_trls_trainers())


def test_launch(monkeypatch):
    check(by_launch(monkeypatch))


def test_ppos_value_model():
    pytest.importorskip("trl", reason="TRL is not installed")
    from streambp.integrations.trl import ppo

    assert ppo.patch is auto.patch is streambp.patch
