"""`streambp launch` in front of programs that know nothing of it, against the same programs without
it.

covers: launch/__main__.py, launch/site/sitecustomize.py
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streambp.cli import main
from tests.hangs import HANG
from tests.launch import programs

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(programs.__file__))
LOSSES, WEIGHTS = 1e-5, 1e-4  # absolute; of the distance moved


@pytest.fixture(autouse=True)
def this_copy(monkeypatch):
    """Programs import the streambp that is tested here."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    )


def assert_same_training(result, expected):
    first_weights = {
        name: weight.detach() for name, weight in programs.model_of().named_parameters()
    }
    assert set(result["weights"]) == set(expected["weights"]) == set(first_weights)
    assert len(result["losses"]) == len(expected["losses"]) > 0
    assert (
        max(abs(a - b) for a, b in zip(result["losses"], expected["losses"], strict=True)) <= LOSSES
    )
    change_norm = math.sqrt(
        sum(
            float((expected["weights"][n] - first_weights[n]).double().pow(2).sum())
            for n in first_weights
        )
    )
    difference_norm = math.sqrt(
        sum(
            float((expected["weights"][n] - w).double().pow(2).sum())
            for n, w in result["weights"].items()
        )
    )
    assert difference_norm <= WEIGHTS * change_norm
    for name in set(expected) - {"losses", "weights"}:
        assert abs(result[name] - expected[name]) <= LOSSES


def without(kind, folder):
    """The program's own results, without launch."""
    folder.mkdir()
    model, losses, metrics = programs.KINDS[kind](folder / "out")
    return {
        "losses": losses,
        "weights": {n: w.detach() for n, w in model.named_parameters()},
        **metrics,
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "flags"),
    [("trainer", []), pytest.param("loop", ["--at", "train"], marks=pytest.mark.full)],
)
def test_a_program_trains_as_without_launch(kind, flags, tmp_path, capfd):
    """The Trainer's has `model_init` and metrics on logits; the loop's models come from a config
    and from files."""
    assert (
        main(
            [
                "launch",
                "--chunk-size",
                "5",
                *flags,
                "--",
                sys.executable,
                PROGRAM,
                kind,
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    stderr = capfd.readouterr().err
    assert_same_training(torch.load(tmp_path / "out"), without(kind, tmp_path / "plain"))
    report = stderr.partition("end of")[2]
    for text in ("streams: 2 x Qwen3DecoderLayer", "chunk_size  5", "blockwise loss, no logits\n"):
        assert text in stderr.partition("end of")[0]  # after the first step
        assert text in report
    assert "costs memory" not in report


@pytest.mark.full
def test_a_script_run_by_the_module(tmp_path):
    """`python -m streambp.launch`: the hook comes when transformers is imported already. The loop's
    models."""
    command = [
        sys.executable,
        "-m",
        "streambp.launch",
        "--chunk-size",
        "5",
        "--at",
        "train",
        PROGRAM,
        "loop",
        "out",
    ]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANG
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "streams: 2 x Qwen3DecoderLayer" in result.stderr
    assert_same_training(torch.load(tmp_path / "out"), without("loop", tmp_path / "plain"))
