"""Our trainers beside TRL's on two ranks, under DDP and DeepSpeed: losses of every step, and how far the weights moved.

covers: distributed/engines.py, integrations/trl/trainer.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.families import build

pytest.importorskip("trl", reason="TRL is not installed")

BAR = 1e-4  # float32; of the distance that the weights moved


def run(trainer, objective, engine, folder):
    if engine != "ddp":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    folder.mkdir(exist_ok=True)
    build("qwen3").save_pretrained(folder / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "tests.distributed.trl_worker", trainer, objective, engine, str(folder)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=180
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = torch.load(folder / f"{trainer}.pt")
    assert found["engines"] == [engine.replace("zero", "zero-")]
    return found


def compare(expected, found):
    assert found["log"] == pytest.approx(expected["log"], rel=1e-4, abs=1e-5)
    assert len(found["log"]) == 3
    assert expected["after"].keys() == found["after"].keys()
    names = expected["before"].keys() & found["after"].keys()
    assert len(names) >= 24
    moved, apart = (
        torch.stack([(a[name].double() - b[name].double()).norm() for name in names]).norm()
        for a, b in ((expected["after"], expected["before"]), (expected["after"], found["after"]))
    )
    assert moved > 0
    print(f"apart {apart / moved:.1e} of the distance moved")
    assert apart <= BAR * moved


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("objective", ["SFT", "DPO", "GRPO"])
def test_as_trls_own(objective, engine, tmp_path):
    compare(*(run(trainer, objective, engine, tmp_path) for trainer in ("theirs", "ours")))


@pytest.mark.full
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_ppo_as_under_ddp(engine, tmp_path):
    compare(*(run("ours", "PPO", which, tmp_path / which) for which in ("ddp", engine)))
