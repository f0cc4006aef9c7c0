"""HF Trainer on two ranks under DDP and FSDP2; it and accelerate with a DeepSpeed config that says
how to stream.

covers: distributed/engines.py, integrations/deepspeed.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.distributed.ranks import launch
from tests.distributed.worker import distance
from tests.families import LENGTH, build
from tests.hangs import HANG

CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
}  # fmt: skip


def train(loop, settings, folder):
    """What two ranks saved."""
    folder.mkdir()
    config, output = folder / "ds.json", folder / "output.pt"
    config.write_text(json.dumps(settings))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
    ]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    environment.pop("ACCELERATE_USE_CPU", None)  # it would mean DDP
    result = subprocess.run(
        [*command, "tests.distributed.trainer_script", loop, str(config), str(output)],
        capture_output=True, text=True, check=False, env=environment, timeout=HANG,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return torch.load(output, weights_only=True)


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("loop", ["trainer", "accelerate"])
def test_a_config_with_a_section_trains_as_one_without(loop, stage, tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    settings = {**CONFIG, "zero_optimization": {"stage": stage}}
    stock = train(loop, settings, tmp_path / "stock")
    ours = train(
        loop, {**settings, "streambp": {"chunk_size": 5, "saves": ["attn_out"]}}, tmp_path / "ours"
    )
    for run in (stock, ours):
        assert (run["engines"], run["distributed_type"]) == ([f"zero-{stage}"], "DEEPSPEED")
    assert stock["chunks"] == []
    assert LENGTH not in ours["chunks"]
    assert ours["chunks"].count(LENGTH % 5) >= 6  # a last chunk of every layer and step
    initial = {name: p.detach().double() for name, p in build("qwen3").named_parameters()}
    weights = {
        name: {n: w.double() for n, w in run["weights"].items()}
        for name, run in (("ours", ours), ("stock", stock))
    }
    weight_change = distance(weights["stock"], initial)
    assert weight_change > 1e-3
    print(
        f"{loop}, stage {stage}: weights moved by {weight_change:.1e}, apart "
        f"{distance(weights['ours'], weights['stock']):.1e}"
    )
    assert distance(weights["ours"], weights["stock"]) <= 1e-6
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_under_torchs_engines(engine, tmp_path):
    """Accumulation, clipping, evaluation, and training that goes on from a checkpoint; in
    float64."""
    names = [f"{how} {engine}" for how in ("stock", "streamed", "mutant")]
    names.insert(2, f"streamed {engine} from streamed {engine}")
    outputs, codes = launch(
        "tests.distributed.context_trainer",
        str(tmp_path),
        "trainer",
        ",".join(names),
        "2",
        seconds=HANG,
    )
    assert codes == [0, 0], [output[-4000:] for output in outputs]
    stock, streamed, resumed, mutant = (
        torch.load(tmp_path / f"trainer-{name}.pt") for name in names
    )
    assert all(run["engines"] == [engine] for run in (stock, streamed, resumed))
    assert streamed["paths"] == resumed["paths"] == ["streams"]
    initial = {name: p.detach() for name, p in build("qwen3", torch.float64).named_parameters()}
    weight_change, lost, *errors = (
        distance(a["weights"], b) for a, b in
        ((stock, initial), (mutant, stock["weights"]), (streamed, stock["weights"]), (resumed, streamed["weights"]))
    )  # fmt: skip
    print(
        f"{engine}: weights moved by {weight_change:.1e}, apart {errors[0]:.1e}, resumed {errors[1]:.1e}, "
        f"a mutant {lost:.1e}"
    )
    assert weight_change > 1e-3
    assert lost > 1e-9
    assert max(errors) <= 1e-12
    for mine, theirs in zip(streamed["logged"], stock["logged"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
