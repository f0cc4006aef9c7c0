"""Our trainers beside TRL's on two ranks, under each engine: losses of every step, and how far the
weights moved.

covers: distributed/engines.py, integrations/trl/trainer.py
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import streambp
from tests.families import build

pytest.importorskip("trl", reason="TRL is not installed")

from accelerate.utils import ParallelismConfig

from streambp.integrations.trl import (
    StreamDPOConfig,
    StreamDPOTrainer,
    StreamGRPOConfig,
    StreamGRPOTrainer,
    StreamPPOConfig,
    StreamPPOTrainer,
    StreamSFTTrainer,
)
from streambp.integrations.trl.trainer import StreamedTrainer
from tests.distributed import trl_worker
from tests.hangs import HANG
from tests.integrations import test_trl

MAX_RELATIVE_ERROR = 1e-4  # float32; of the distance that the weights moved


def run(trainers, objectives, engine, folder):
    """What the trainers found, by objective: one start of two ranks for all of them."""
    if engine in ("zero2", "zero3", "ulysses"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    folder.mkdir(exist_ok=True)
    build("qwen3").save_pretrained(folder / "model")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    arguments = [
        "-m",
        "tests.distributed.trl_worker",
        ",".join(trainers),
        ",".join(objectives),
        engine,
        str(folder),
    ]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    result = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    results = {
        name: [torch.load(folder / f"{name}-{trainer}.pt") for trainer in trainers]
        for name in objectives
    }
    names = {"zero2": "zero-2", "zero3": "zero-3", "ulysses": "zero-3"}
    for trainer in (run_result for runs in results.values() for run_result in runs):
        assert trainer["engines"] == [names.get(engine, engine)]
        assert trainer.get("paths") in (None, ["streams"])
    return results


def compare(expected, result):
    assert result["log"] == pytest.approx(expected["log"], rel=1e-4, abs=1e-5)
    assert len(result["log"]) == 3
    assert expected["after"].keys() == result["after"].keys()
    names = expected["before"].keys() & result["after"].keys()
    assert len(names) >= 24
    weight_change, error = (
        torch.stack([(a[name].double() - b[name].double()).norm() for name in names]).norm()
        for a, b in ((expected["after"], expected["before"]), (expected["after"], result["after"]))
    )
    assert weight_change > 0
    print(f"apart {error / weight_change:.1e} of the distance moved")
    assert error <= MAX_RELATIVE_ERROR * weight_change


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("objective", ["SFT", "DPO", "GRPO"])
def test_as_trls_own(objective, engine, tmp_path):
    compare(
        *(
            run([trainer], [objective], engine, tmp_path)[objective][0]
            for trainer in ("theirs", "ours")
        )
    )


@pytest.mark.full
def test_under_fsdp2(tmp_path):
    runs = run(["theirs", "ours"], ["SFT", "DPO", "GRPO"], "fsdp2", tmp_path)
    for theirs, ours in runs.values():
        compare(theirs, ours)
    ((mutant,),) = run(["mutant"], ["SFT"], "fsdp2", tmp_path).values()
    with pytest.raises(AssertionError):
        compare(runs["SFT"][0], mutant)


@pytest.mark.full
def test_grpo_with_packed_rows_and_a_stand_in_for_vllm_under_fsdp2(tmp_path):
    """Completions come from `trl_worker.VLLMStandIn`, which gets the weights of each step by TRL's
    code; the importance-sampling correction of TRL reads their log-probabilities."""
    ((theirs, ours),) = run(["theirs", "ours"], [trl_worker.BY_VLLM], "fsdp2", tmp_path).values()
    compare(theirs, ours)
    shared = re.search(r"computed as (\d+)", ours["described"])
    assert shared, ours["described"]
    # two rows share a prompt of at least 66 tokens, beside completions of at most five
    assert 66 <= int(shared[1]) <= 71 + 2 * 5
    assert len(ours["synced"]) == len(theirs["synced"]) == 3
    for our_weights, their_weights in zip(ours["synced"], theirs["synced"], strict=True):
        assert our_weights.keys() == their_weights.keys() == ours["before"].keys()
        assert our_weights == pytest.approx(their_weights, rel=1e-4, abs=1e-4)
    assert ours["synced"][0] != ours["synced"][2]  # the later weights, not the first again


@pytest.mark.full
def test_sft_under_ulysses(tmp_path):
    """accelerate's sp_size=2 on ZeRO-3. Rows are padded on the right, where unpatched Ulysses loses
    nothing by its mask."""
    theirs, ours = (
        run([trainer], ["SFT"], "ulysses", tmp_path)["SFT"][0] for trainer in ("theirs", "ours")
    )
    compare(theirs, ours)
    assert "split over 2 ranks" in ours["described"]


@pytest.mark.full
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_ppo_as_under_ddp(engine, tmp_path):
    compare(
        *(
            run(["ours"], ["PPO"], engine_name, tmp_path / engine_name)["PPO"][0]
            for engine_name in ("ddp", engine)
        )
    )


@pytest.mark.parametrize(
    "split", [{"cp_size": 2}, {"sp_size": 2, "sp_backend": "deepspeed"}], ids=str
)
def test_objectives_that_cannot_split_sequences_say_so(split, tmp_path, monkeypatch):
    """By the config; by TRL itself; and by what accelerate was told elsewhere, which configs do not
    see."""
    parallelism = ParallelismConfig(**split)
    message = f"{next(iter(split))}=2, which splits each sequence"
    config = StreamDPOConfig(str(tmp_path), parallelism_config=parallelism, bf16=False)
    with pytest.raises(streambp.StreamBPError, match=message):
        StreamDPOTrainer(model=build("qwen3"), args=config, train_dataset=test_trl.pairs())
    for kind in (StreamGRPOConfig, StreamPPOConfig):
        with pytest.raises(ValueError, match="does not support sequence-dim parallelism"):
            kind(str(tmp_path), parallelism_config=parallelism, bf16=False)
    monkeypatch.setattr(
        StreamedTrainer,
        "accelerator",
        SimpleNamespace(parallelism_config=parallelism),
        raising=False,
    )
    for trainer in (StreamDPOTrainer, StreamGRPOTrainer, StreamPPOTrainer, StreamSFTTrainer):
        monkeypatch.setattr(trainer.__mro__[2], "__init__", lambda self, *args, **kwargs: None)
        with (
            contextlib.nullcontext()
            if trainer is StreamSFTTrainer
            else pytest.raises(streambp.StreamBPError, match=message)
        ):
            StreamedTrainer.__init__(trainer.__new__(trainer))
