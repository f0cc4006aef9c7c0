"""The example runs as a user would run it, at a small size; at its default size in the full
tier."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import zoo

ROOT = Path(__file__).parents[2]


def run_example(*arguments, **kwargs):
    return run_script("long_context_sft.py", *arguments, **kwargs)


def run_script(name, *arguments, **kwargs):
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, **kwargs
    )


def run_here(*arguments, name="long_context_sft.py"):
    """As `run_script`, in this process. What it exits with is the return code, and the end of
    stderr."""
    output = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.syspath_prepend(ROOT / "examples")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        try:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        except SystemExit as end:
            return subprocess.CompletedProcess(
                arguments, end.code, output.getvalue(), f"{output.getvalue()}{end.code}"
            )
    return subprocess.CompletedProcess(arguments, 0, output.getvalue(), "")


def check_run(result, folder):
    """The run succeeded; the ratio of the activation peaks."""
    assert result.returncode == 0, result.stderr[-3000:]
    first, last = map(float, re.search(r"loss\s+([\d.]+) -> ([\d.]+)", result.stdout).groups())
    assert last < first
    assert re.search(r"tokens/s\s+[\d,]+", result.stdout)
    assert "--- sample ---" in result.stdout
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(tokenizer)
    return float(re.search(r"ratio\s+([\d.]+)", result.stdout).group(1))


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A run from scratch at a small size: its text, its output folder and its result."""
    folder = tmp_path_factory.mktemp("example")
    text = folder / "text.txt"
    text.write_text((ROOT / "LICENSE").read_text() * 3)
    result = run_example(
        "--data", text, "--seq-len", 1024, "--steps", 8, "--chunk-size", 128, "--hidden-size", 64, "--layers", 2,
        "--vocab-size", 600, "--output", folder / "out",
    )  # fmt: skip
    return text, folder / "out", result


@pytest.mark.full
def test_small_run(small_run):
    _, output, result = small_run
    # at this size a block of logits is half the sequence; test_default_run has 0.5
    assert check_run(result, output) < 1


@pytest.mark.full
def test_lora_on_a_given_model(small_run, tmp_path):
    text, checkpoint, _ = small_run
    pytest.importorskip("peft")
    result = run_here(
        "--model", checkpoint, "--data", text, "--seq-len", 512, "--steps", 20, "--chunk-size", 128, "--lora",
        "--learning-rate", 1e-2, "--output", tmp_path / "lora",
    )  # fmt: skip
    assert check_run(result, tmp_path / "lora") < 1
    assert (tmp_path / "lora" / "adapter_model.safetensors").exists()


@pytest.mark.full
def test_a_hybrid_as_the_given_model(small_run, tmp_path):
    """Qwen3.5's layers with linear attention stream as those with softmax attention do."""
    text, checkpoint, _ = small_run
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.save_pretrained(tmp_path / "hybrid")
    zoo.build("qwen3_5_text", torch.float32, vocab_size=len(tokenizer)).save_pretrained(
        tmp_path / "hybrid"
    )
    result = run_example(
        "--model", tmp_path / "hybrid", "--data", text, "--seq-len", 512, "--steps", 12, "--chunk-size", 64,
        "--learning-rate", 1e-2, "--output", tmp_path / "out",
    )  # fmt: skip
    assert check_run(result, tmp_path / "out") < 1
    assert "streams: 2 x Qwen3_5DecoderLayer (model.layers.0 .. model.layers.1)" in result.stdout
    assert "checkpoints:" not in result.stdout
    plain, streamed = re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", result.stdout)
    assert [float(value) for value in streamed] == pytest.approx(
        [float(value) for value in plain], rel=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "missing.txt"], "missing.txt"),
        (["--data", "short.txt"], "Pass more text"),
        (["--steps", "0"], "steps"),
        (["--chunk-size", "0"], "auto"),
        (["--model", "missing"], "Pass --model"),
    ],
)
def test_bad_usage_says_what_to_do(arguments, message, tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("too short")
    monkeypatch.chdir(tmp_path)
    # any other exception than SystemExit, whose traceback a user would see, ends the test
    result = run_here(*arguments)
    assert result.returncode not in (0, None)
    assert message in result.stderr


@pytest.mark.full
def test_default_run(tmp_path):
    result = run_example(cwd=tmp_path)
    print(result.stdout)
    assert check_run(result, tmp_path / "runs" / "long_context_sft") <= 0.5
