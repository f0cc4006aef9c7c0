"""`verify --random`: models of random weights, cut to a few layers.

covers: verify/random_model.py
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import streambp
from streambp import cli
from streambp.errors import ConfigError
from streambp.verify import compare, random_model
from streambp.verify.random_model import cut_config
from tests import zoo
from tests.tiers import thinned

KINDS = ["sliding_attention"] * 5 + ["full_attention"]


def config(family, **changes):
    return zoo.tiny_config(family, num_hidden_layers=12, **changes)


def qwen():
    return config("qwen3", layer_types=["full_attention"] * 12)


def model_of(source, layers=None, dtype=torch.float32, seed=0):
    return random_model.random_model(source, layers, dtype, seed)


def shapes(model):
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def test_the_first_layers_are_those_of_the_full_model():
    small_model = model_of(qwen(), 2)
    full = AutoModelForCausalLM.from_config(qwen())
    assert small_model.depth == 12
    assert small_model.layers == 2
    expected = {}
    for name, shape in shapes(full).items():
        if "layers." not in name or name.split(".")[2] in ("0", "1"):
            expected[name] = shape
    assert shapes(small_model.model) == expected


def test_each_kind_of_layer_by_default():
    source = config("gemma3_text", layer_types=KINDS * 2)
    small_model = model_of(source)
    assert small_model.layers == small_model.min_layers == 6
    assert small_model.model.config.layer_types == KINDS
    assert "all kinds" in small_model.note()
    fewer = model_of(source, 2)
    assert fewer.model.config.layer_types == KINDS[:2]
    assert "--layers 6" in fewer.note()
    assert source.num_hidden_layers == 12
    assert source.layer_types == KINDS * 2


def test_weights_are_random_and_of_the_seed():
    model = model_of(qwen(), 2).model
    for name, parameter in model.named_parameters():
        assert not bool((parameter == parameter.flatten()[0]).all()), name
    same_seed = model_of(qwen(), 2).model
    other_seed = model_of(qwen(), 2, seed=1).model
    for parameter, equal_parameter, other_parameter in zip(
        model.parameters(), same_seed.parameters(), other_seed.parameters(), strict=True
    ):
        assert torch.equal(parameter, equal_parameter)
        assert not torch.equal(parameter, other_parameter)


def test_the_random_state_of_the_program_is_left():
    state_before = torch.get_rng_state()
    model_of(qwen(), 1)
    assert torch.equal(torch.get_rng_state(), state_before)


def test_memory_is_checked_before_a_model_is_made(monkeypatch):
    monkeypatch.setattr(compare, "available_memory", lambda: 1000)
    monkeypatch.setattr(random_model, "_vary_constants", None)
    with pytest.raises(streambp.StreamBPError, match="of host memory"):
        model_of(qwen(), 2)


def test_too_many_layers_are_refused():
    with pytest.raises(ConfigError, match="has 12 layers"):
        model_of(qwen(), 13)


def cut_to_two(name):
    """A family's depth follows from its configuration."""
    source = zoo.tiny_config(name)
    layer_count = max(1, source.get_text_config().num_hidden_layers - 1)
    small_model = model_of(source, layer_count)
    assert small_model.layers == layer_count
    return small_model


@pytest.mark.parametrize(
    "name", thinned(["qwen3_5_text", "gpt_oss", "deepseek_v3", "gpt2", "jamba"], "gpt_oss".__eq__)
)
def test_families_that_are_cut_stream(name):
    result = compare.verify(cut_to_two(name).model, seq_len=60)
    assert result.exact, str(result)


def test_layers_that_share_keys_are_cut_with_their_source():
    source = zoo.tiny_config("gemma3n_text")
    depth = source.num_hidden_layers
    assert source.num_kv_shared_layers == 2
    assert cut_config(source, depth - 1, depth).num_kv_shared_layers == 1
    assert cut_config(source, depth - 3, depth).num_kv_shared_layers == 0


def test_a_depth_that_no_field_says():
    with pytest.raises(streambp.StreamBPError, match="num_hidden_layers"):
        model_of(zoo.tiny_config("xlstm"), 1)


def test_the_command_reads_a_config_alone(tmp_path, capsys):
    config("llama").save_pretrained(tmp_path)
    arguments = ["verify", "--random", str(tmp_path / "config.json"), "--seq-len", "64"]
    assert cli.main([*arguments, "--layers", "2"]) == 0
    assert "the first 2 of 12 layers" in capsys.readouterr().out
    assert cli.main(["verify", "--random", str(tmp_path), "--seq-len", "64"]) == 0
    assert "the first 1 of 12 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "2"], "Add --random"),
        (["--random", "--layers", "0"], "from 1"),
        (["--random", "--layers", "99"], "Pass a smaller number"),
        (["--random", "--against", "nothing"], "must be among"),
    ],
)
def test_bad_usage(options, message, tmp_path, capsys):
    config("llama").save_pretrained(tmp_path)
    capsys.readouterr()
    assert cli.main(["verify", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err
