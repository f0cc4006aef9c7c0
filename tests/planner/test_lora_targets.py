"""Models whose Linears peft does not all adapt: what is left out is named, and can be chosen.

covers: planner/adapters.py, planner/skeleton.py, planner/report.py
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import BertForMaskedLM, ModernBertModel

from streambp.cli import commands
from streambp.errors import ConfigError
from streambp.planner import Memory, Setting, adapters
from streambp.planner.plan import plan_profile
from streambp.planner.profile import ParameterGroup, from_json, to_json
from streambp.planner.profile_cache import CountRequest
from streambp.planner.report import plan_table
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import streamed_recipe, survey
from tests import zoo
from tests.tiers import thinned

peft = pytest.importorskip("peft", reason="adapters need peft")

MAMBAS = ("mamba", "falcon_h1", "mamba2", "falcon_mamba", "nemotron_h")
GIB = 2**30


def adapted_names(model):
    """The last part of the path of each Linear with adapters."""
    return {
        path.split(".")[-3] for path, _ in model.named_modules() if path.endswith(".lora_A.default")
    }


def check_left_out(name):
    skeleton = Skeleton(zoo.tiny_config(name), torch.bfloat16, 4, 16, "cuda")
    assert skeleton.without_adapters == ("out_proj",)
    names = adapted_names(skeleton.model)
    assert names
    assert "out_proj" not in names
    assert "lm_head" not in names


@pytest.mark.parametrize("name", thinned(MAMBAS, lambda name: name == "falcon_h1"))
def test_what_peft_refuses_is_left_out(name):
    check_left_out(name)


def test_a_refusal_that_nobody_asks_for_is_seen(monkeypatch):
    monkeypatch.setattr(adapters, "_is_refused", lambda model, name: False)
    with pytest.raises(ConfigError, match="peft adds no adapters"):
        check_left_out("falcon_h1")


def test_other_models_have_adapters_on_every_linear():
    skeleton = Skeleton(zoo.tiny_config("qwen3"), torch.bfloat16, 4, 16, "cuda")
    assert skeleton.without_adapters == ()
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adapted_names(skeleton.model) == expected


def test_targets_are_those_that_were_named():
    options = {"lora": 4, "lora_targets": ("q_proj", "v_proj")}
    skeleton = CountRequest(zoo.tiny_config("qwen3"), **options).skeleton()
    assert adapted_names(skeleton.model) == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match="--lora-targets q_proj,k_proj"):
        CountRequest(zoo.tiny_config("qwen3"), lora=4, lora_targets=("nothing",)).skeleton()
    with pytest.raises(ConfigError, match="out_proj"):
        CountRequest(zoo.tiny_config("falcon_h1"), lora=4, lora_targets=("out_proj",)).skeleton()


def test_targets_that_the_model_does_not_have_are_named():
    """peft adapts the others, so that a list of usual names serves many models."""
    targets = ("q_proj", "gate_up_proj")
    skeleton = CountRequest(zoo.tiny_config("qwen3"), lora=4, lora_targets=targets).skeleton()
    assert adapted_names(skeleton.model) == {"q_proj"}
    assert skeleton.without_adapters == ("gate_up_proj",)


@pytest.mark.full
def test_the_plan_names_them():
    request = CountRequest(zoo.tiny_config("falcon_h1"), lora=4)
    profile = survey(request.skeleton(), [streamed_recipe()], accumulating=False, tree=False)
    assert from_json(json.loads(json.dumps(to_json(profile)))) == profile
    table = plan_table(plan_profile(profile, 4096, Memory(80 * GIB), Setting()), modules=False)
    assert "Without adapters: out_proj, which peft refuses or the model does not have" in table


def test_experts_that_stay_whole_are_told(counted):
    """Of 4 bits; not where all weights have 16, and not of a model without experts."""
    dense = ParameterGroup("dense", 1_000_000, 600_000, 0, 0)
    experts = ParameterGroup("expert", 9_000_000, 18_000_000, 0, 0)
    for groups, is_printed in (
        ((dense, experts), True),
        ((dense,), False),
        ((dataclasses.replace(dense, bytes=2_000_000), experts), False),
    ):
        profile = dataclasses.replace(counted, groups=groups)
        table = plan_table(plan_profile(profile, 4096, Memory(80 * GIB), Setting()), modules=False)
        words = "9.00M parameters of experts stay in bfloat16, 0.0 GiB: bitsandbytes quantizes"
        assert (words in table) == is_printed
        assert "of experts in 4 bits" not in table


def test_experts_in_4_bits_name_what_packs_them(counted):
    dense = ParameterGroup("dense", 1_000_000, 600_000, 0, 0)
    experts = ParameterGroup("expert", 9_000_000_000, 5_000_000_000, 0, 0)
    profile = dataclasses.replace(counted, groups=(dense, experts))
    table = plan_table(plan_profile(profile, 4096, Memory(80 * GIB), Setting()), modules=False)
    text = " ".join(table.split())
    assert "9.00B parameters of experts in 4 bits, by bitsandbytes' replace_parameter_4bit" in text
    assert "load_in_4bit=True alone leaves them in bfloat16, 16.8 GiB" in text
    experts_in_8_bits = dataclasses.replace(experts, bytes=9_000_000_000)
    profile = dataclasses.replace(counted, groups=(dense, experts_in_8_bits))
    table = plan_table(plan_profile(profile, 4096, Memory(80 * GIB), Setting()), modules=False)
    assert "of experts" not in table


@pytest.fixture(scope="module")
def counted():
    request = CountRequest(zoo.tiny_config("qwen3"), lora=4)
    return survey(request.skeleton(), [streamed_recipe()], accumulating=False, tree=False)


def test_targets_on_the_command_line():
    line = ["plan", "m", "--gpu-memory", "8GiB", "--lora", "8", "--lora-targets", "q_proj,v_proj"]
    assert commands.parse(line).lora_targets == "q_proj,v_proj"


@pytest.mark.parametrize("model", [BertForMaskedLM, ModernBertModel])
def test_encoders_get_adapters(model):
    """They do not generate, which peft's class of causal language models takes for granted."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 64, "pad_token_id": 0,
    }  # fmt: skip
    config = model.config_class(**sizes, architectures=[model.__name__])
    skeleton = Skeleton(config, torch.bfloat16, 4, 16, "cuda")
    assert adapted_names(skeleton.model)
    assert skeleton.without_adapters == ()
