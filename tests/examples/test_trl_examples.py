"""The TRL examples run offline on a CPU and learn, with matplotlib or without; long_context_sft has
tests of its own."""

from __future__ import annotations

import importlib.util
import json
import re
import sys

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

from tests.examples.test_long_context_sft import ROOT, run_here, run_script

LEARNED_TEXTS = {
    "sft": ("mean_token_accuracy", 0.9),
    "dpo": ("rewards/accuracies", 0.9),
    "grpo": ("reward", 0.8),
    "ppo": ("reward", 0.8),
}
DATA = ROOT / "examples" / "data"
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
UNQUANTISED = pytest.mark.skipif(
    not HAS_BITSANDBYTES, reason="bitsandbytes, which quantises, is not installed"
)
QUANTISED = [16, pytest.param(4, marks=UNQUANTISED)]


def last(output, key):
    return float(re.search(rf"^{key}: [-\d.]+ -> ([-\d.]+)$", output, re.MULTILINE).group(1))


def test_short_run_without_matplotlib(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run_here("--steps", 2, "--chunk-size", 4, "--output", tmp_path, name="dpo.py")
    assert result.returncode == 0, result.stderr[-3000:]
    assert re.search(r"^loss: [\d.]+ -> [\d.]+$", result.stdout, re.MULTILINE)
    assert "no plot: matplotlib is not installed" in result.stdout
    assert not (tmp_path / "dpo.png").exists()


def test_rows_that_are_not_there(tmp_path):
    result = run_here("--data", tmp_path / "nothing.jsonl", "--output", tmp_path, name="sft.py")
    assert "nothing.jsonl does not exist" in str(result.returncode)


@pytest.mark.full
@pytest.mark.parametrize("name", LEARNED_TEXTS)
def test_default_run_learns(name, tmp_path):
    result = run_script(f"{name}.py", "--output", tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    key, bar = LEARNED_TEXTS[name]
    assert last(result.stdout, key) >= bar
    assert (tmp_path / f"{name}.png").exists() == (
        importlib.util.find_spec("matplotlib") is not None
    )


@pytest.mark.full
@pytest.mark.parametrize("bits", QUANTISED)
def test_adapters_on_frozen_weights(bits, tmp_path):
    """Of 4 bits where bitsandbytes is installed, which has kernels for CPUs."""
    result = run_script("qlora.py", "--bits", bits, "--output", tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert last(result.stdout, "mean_token_accuracy") >= 0.75  # from 0.18
    assert "streams: 2 x Qwen3DecoderLayer" in result.stdout
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_without_bitsandbytes_the_way_out_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "bitsandbytes" else real(name, *a),
    )
    result = run_here("--steps", 1, "--output", tmp_path, name="qlora.py")
    assert "--bits 16" in str(result.returncode)


def test_the_data_are_conversations_as_trl_has_them():
    """Each file's rows are of the type that TRL takes them for, and are what toy.py writes."""
    from trl import is_conversational

    columns = {
        "chats": {"messages"}, "completions": {"prompt", "completion"}, "prompts": {"prompt", "answer"},
        "preferences": {"prompt", "chosen", "rejected"},
    }  # fmt: skip
    for name, expected in columns.items():
        rows = [
            json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()
        ]
        assert len(rows) == 104
        assert all(set(row) == expected and is_conversational(row) for row in rows)
