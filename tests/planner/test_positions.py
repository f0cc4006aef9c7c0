"""Rows beyond a model's positions are warned of, and the printed line extends them.

covers: model/positions.py, cli/runs.py
"""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from streambp import cli
from streambp.cli import runs
from streambp.model import positions
from streambp.model.positions import positions_warning
from tests import zoo
from tests.planner.released import RELEASED_CONFIGS
from tests.planner.test_fastest import method, two_speeds

planning = sys.modules["streambp.planner.plan"]
CODE = re.compile(r"this config: (.*)")


def check_line(name, length):
    """The line runs; the angles of the model are then scaled, and its steps run."""
    config = zoo.tiny_config(name)
    line = positions_warning(config, length)
    assert line.startswith(f"Rows of {length:,} tokens exceed the model's ")
    exec(CODE.search(line)[1], {"config": config})
    assert config.get_text_config().max_position_embeddings >= length
    assert positions_warning(config, length) is None
    model = AutoModelForCausalLM.from_config(config)
    rotary = [part for part in model.modules() if hasattr(part, "inv_freq")]
    plain = AutoModelForCausalLM.from_config(zoo.tiny_config(name))
    plain_rotary = [part for part in plain.modules() if hasattr(part, "inv_freq")]
    assert len(rotary) == len(plain_rotary) > 0
    for extended_part, plain_part in zip(rotary, plain_rotary, strict=True):
        assert not torch.equal(extended_part.inv_freq, plain_part.inv_freq)
    ids = torch.randint(0, config.vocab_size, (1, 33))
    assert torch.isfinite(model(input_ids=ids, labels=ids, use_cache=False).loss)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_line_extends_the_model(name):
    max_positions = zoo.tiny_config(name).max_position_embeddings
    check_line(name, 3 * max_positions)


def test_a_factor_that_is_too_small_is_seen(monkeypatch):
    real = positions.yarn_fields
    halved = {"factor": 1.5}
    monkeypatch.setattr(positions, "yarn_fields", lambda *args: real(*args) | halved)
    with pytest.raises(AssertionError):
        check_line("llama", 3 * zoo.tiny_config("llama").max_position_embeddings)


def test_released_models():
    """What a model reaches, extended or not, is the bar; a factor grows from the original."""
    qwen = RELEASED_CONFIGS["Qwen3-8B"]()
    assert positions_warning(qwen, 40_960) is None
    assert '"factor": 2.0, "original_max_position_embeddings": 40960' in positions_warning(
        qwen, 65_536
    )
    gpt_oss = RELEASED_CONFIGS["gpt-oss-20b"]()
    assert positions_warning(gpt_oss, 131_072) is None
    assert '"factor": 64.0, "original_max_position_embeddings": 4096' in positions_warning(
        gpt_oss, 262_144
    )
    assert "take shorter rows" in positions_warning(zoo.tiny_config("gpt2"), 10**6)


def planned(tmp_path, monkeypatch, *options):
    """The words of a plan of a tiny model; a step takes a third of the time with Liger."""
    slow, fast = method("streambp", 8, 3e9), method("streambp", 8, 1e9)

    def counted(request, *_):
        profile = two_speeds()
        return type(profile)(
            **{**vars(profile), "methods": (fast if request.with_liger else slow,)}
        )

    monkeypatch.setattr(planning, "count_profile", counted)
    zoo.tiny_config("qwen3").save_pretrained(tmp_path)
    return cli.main(["plan", str(tmp_path), "--gpu-memory", "80GiB", "--full", *options])


def test_both_are_printed_by_a_plan(tmp_path, monkeypatch, capsys):
    max_positions = zoo.tiny_config("qwen3").max_position_embeddings
    monkeypatch.setattr(runs, "fusion", lambda *_: None)
    assert planned(tmp_path, monkeypatch, "--seq-len", str(2 * max_positions)) == 0
    output = capsys.readouterr().out
    assert f"Warning: Rows of {2 * max_positions:,} tokens exceed" in output
    assert "With liger-kernel, which is not installed here: " in output
    assert planned(tmp_path, monkeypatch, "--seq-len", str(max_positions), "--kernels", "own") == 0
    output = capsys.readouterr().out
    assert "Warning" not in output
    assert "liger-kernel" not in output
    assert planned(tmp_path, monkeypatch, "--seq-len", str(2 * max_positions), "--json") == 0
    printed = capsys.readouterr()
    json.loads(printed.out[printed.out.index("{") :])


def test_installed_kernels_are_not_offered(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "fusion", lambda *_: "liger")
    assert planned(tmp_path, monkeypatch, "--seq-len", "64") == 0
    assert "liger-kernel" not in capsys.readouterr().out


def test_gpu_memory_in_decimal_units_is_told_in_gib(tmp_path, monkeypatch, capsys):
    """24GB are 22.4 GiB, and a card of that name has 24."""
    monkeypatch.setattr(runs, "fusion", lambda *_: "liger")
    assert planned(tmp_path, monkeypatch, "--seq-len", "64", "--gpu-memory", "24GB") == 0
    assert "24GB are 22.4 GiB. A GPU that is sold with 24 GB" in capsys.readouterr().out
    assert planned(tmp_path, monkeypatch, "--seq-len", "64", "--gpu-memory", "24GiB") == 0
    assert "is sold with" not in capsys.readouterr().out
