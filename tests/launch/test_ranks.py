"""`streambp launch` in front of torchrun: two ranks, DDP and DeepSpeed ZeRO-3, against the same
command without it.

covers: cli/runs.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from streambp.cli import main
from tests.distributed.test_trainer import CONFIG, train
from tests.distributed.worker import distance
from tests.families import LENGTH, build


def check_trained_alike(ours, stock, name):
    first_weights = {at: p.detach().double() for at, p in build("qwen3").named_parameters()}
    weights = [{at: w.double() for at, w in run["weights"].items()} for run in (ours, stock)]
    print(
        f"{name}: weights moved by {distance(weights[1], first_weights):.1e}, apart "
        f"{distance(*weights):.1e}"
    )
    assert distance(*weights) <= 1e-4 * distance(weights[1], first_weights)
    assert ours["loss"] == pytest.approx(stock["loss"], abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("loop", "flags"), [("trainer", []), ("accelerate", ["--at", "train"])])
def test_zero_3_trains_as_without_launch(loop, flags, tmp_path, monkeypatch, capfd):
    """The Trainer's model is patched before `deepspeed.initialize`, the loop's after it."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    settings = {**CONFIG, "zero_optimization": {"stage": 3}}
    stock = train(loop, settings, tmp_path / "stock")
    config, output = tmp_path / "ds.json", tmp_path / "output.pt"
    config.write_text(json.dumps(settings))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)  # it would mean DDP
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
    ]
    command += ["tests.distributed.trainer_script", loop, str(config), str(output)]
    capfd.readouterr()
    assert main(["launch", "--chunk-size", "5", *flags, "--", *command]) == 0
    ours = torch.load(output, weights_only=True)
    for run in (stock, ours):
        assert (run["engines"], run["distributed_type"]) == (["zero-3"], "DEEPSPEED")
    assert stock["chunks"] == []
    assert LENGTH not in ours["chunks"]
    assert ours["chunks"].count(LENGTH % 5) >= 6  # a last chunk of every layer and step
    report = capfd.readouterr().err.partition("end of")[2]
    assert "(rank 0); process" in report  # both did the same
    assert "streams: 2 x" in report
    assert "blockwise loss, no logits" in report
    check_trained_alike(ours, stock, loop)


@pytest.mark.full
def test_ddp_trains_as_without_launch(tmp_path, monkeypatch, capfd):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")  # the script imports it
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
    ]
    runs = []
    for launch in ([], ["launch", "--chunk-size", "5", "--"]):
        output = tmp_path / f"output{len(runs)}.pt"
        command = [*torchrun, "tests.distributed.trainer_script", "trainer", "-", str(output)]
        capfd.readouterr()
        assert (
            main([*launch, *command]) if launch else subprocess.run(command, check=False).returncode
        ) == 0
        runs.append(torch.load(output, weights_only=True))
    stock, ours = runs
    assert [run["engines"] for run in runs] == [["ddp"], ["ddp"]]
    assert (stock["chunks"], LENGTH in ours["chunks"]) == ([], False)
    report = capfd.readouterr().err.partition("end of")[2]
    assert "streams: 2 x" in report
    assert "blockwise loss, no logits" in report
    check_trained_alike(ours, stock, "DDP")
