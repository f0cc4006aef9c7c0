"""`streambp launch -- trl ...` against `trl ...`: TRL's own scripts, which run in processes that
accelerate starts.

covers: cli/runs.py
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streambp.cli import main

pytest.importorskip("trl", reason="TRL is not installed")

from tests.integrations.test_trl import pairs, prompts, texts, tokenizer
from tests.launch.programs import model_of
from tests.launch.test_programs import ROOT

LOSSES, WEIGHTS = 1e-5, 1e-4  # absolute; of the distance moved
DATA = {"sft": texts, "dpo": pairs, "grpo": prompts}
LORA = (
    "--use_peft",
    "--lora_r",
    "4",
    "--lora_dropout",
    "0",
    "--lora_target_modules",
    "q_proj",
    "down_proj",
)
GRPO = (
    "--reward_funcs",
    "tests.launch.programs.reward",
    "--num_generations",
    "2",
    "--max_completion_length",
    "8",
)


def train(kind, folder, name, *launch):
    """Two steps; the log, the weights, and the exit code."""
    output = folder / name
    command = [
        sys.executable, "-m", "trl.cli.main", *kind, "--model_name_or_path", str(folder / "model"),
        "--dataset_name", str(folder / "data"), "--output_dir", str(output), "--max_steps", "2", "--optim", "sgd",
        "--learning_rate", "1.0", "--lr_scheduler_type", "constant", "--max_grad_norm", "0", "--report_to", "none",
        "--use_cpu", "--bf16", "false", "--dtype", "float32", "--per_device_train_batch_size", "2", "--logging_steps", "1",
        "--save_steps", "2", "--save_only_model", "--seed", "3",
    ]  # fmt: skip
    if launch:
        code = main([*launch, "--", *command])
    else:
        code = subprocess.run(
            command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ).returncode
    assert code == 0
    state = json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry], load_file(
        next(output.glob("*.safetensors"))
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [("sft",), ("sft", "--packing", "--max_length", "32"), ("sft", *LORA), ("dpo",), ("dpo", *LORA),
             ("grpo", *GRPO, "--beta", "0.1")],
    ids=["sft", "sft-packing", "sft-lora", "dpo", "dpo-lora", "grpo"],
)  # fmt: skip
def test_a_command_trains_as_without_launch(kind, tmp_path, monkeypatch, capfd):
    if LORA[0] in kind:
        pytest.importorskip("peft", reason="peft is not installed")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model_of().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    DATA[kind[0]]().to_json(tmp_path / "data" / "train.jsonl")
    expected_log, expected = train(kind, tmp_path, "plain")
    capfd.readouterr()
    log, weights = train(kind, tmp_path, "launched", "launch", "--chunk-size", "5")
    report = capfd.readouterr().err.partition("end of")[2]

    assert "streams: 2 x Qwen3DecoderLayer" in report
    assert "blockwise loss, no logits\n" in report
    assert "costs memory" not in report
    if kind[0] == "grpo" or kind == ("dpo",):
        # the reference
        assert (
            "2 x Qwen3ForCausalLM, patched" in report
            or report.count("Qwen3ForCausalLM, patched") == 2
        )
    assert len(log) == len(expected_log) == 2
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(log, expected_log, strict=True)) <= LOSSES
    assert set(weights) == set(expected)
    difference, change = (
        distance(weights, expected),
        change_norm(expected, tmp_path, LORA[0] in kind),
    )
    print(f"{kind[0]}: weights moved by {change:.1e}, apart {difference:.1e}")
    assert change > 0
    assert difference <= WEIGHTS * change


def distance(first, second):
    return math.sqrt(
        sum(float((first[name].double() - second[name].double()).pow(2).sum()) for name in second)
    )


def change_norm(weights, folder: Path, adapters):
    """LoRA's B starts at zero; what A moves is left out, which makes the bound narrower."""
    if adapters:
        return distance({name: torch.zeros_like(w) for name, w in weights.items()},
                        {name: w for name, w in weights.items() if "lora_B" in name})  # fmt: skip
    start = load_file(folder / "model" / "model.safetensors")
    assert set(weights) <= set(start)
    return distance(start, weights)
