"""The distributed examples on two CPU ranks, and what happens to a job when one rank raises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


def torchrun(script, *arguments, timeout=240):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=timeout
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp2", "deepspeed_zero3"])
def test_loss_falls(name):
    if name == "deepspeed_zero3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    result = torchrun(EXAMPLES / name / "train.py")
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.full
def test_sequence_parallel(tmp_path):
    """The asking half of every sequence is on rank 1, what it asks for on rank 0."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    result = torchrun(EXAMPLES / "sequence_parallel" / "train.py", "--output", str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)", result.stdout, re.MULTILINE)]
    assert len(losses) == 30
    assert losses[-1] < 0.5 * losses[0]
    assert "split over 2 ranks" in result.stdout


BREAKS = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import streambp
from tests.families import build, make_batch
dist.init_process_group("gloo")
model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=5))
mlp = model.model.layers[1].mlp
real, calls = type(mlp).forward, []
def forward(x):
    calls.append(1)
    if dist.get_rank() == 1 and len(calls) == 14:
        raise ValueError("injected in the middle of a step")
    return real(mlp, x)
mlp.forward = forward
wrapped = DistributedDataParallel(model)
for seed in range(3):
    wrapped(**make_batch("plain", seed=seed), use_cache=False).loss.backward()
"""


BREAKS_BETWEEN_EXCHANGES = """
import os, deepspeed, streambp
from tests.distributed.split_worker import model_for, register, shard, whole_batch
deepspeed.init_distributed(dist_backend="gloo")
rank = int(os.environ["RANK"])
register()
model = streambp.patch(model_for({}), streambp.StreamConfig(chunk_size=5))
mlp = model.model.layers[1].mlp
real, calls = type(mlp).forward, []
def forward(x):
    calls.append(1)
    if rank == 1 and len(calls) == 14:
        raise ValueError("injected in the middle of a step")
    return real(mlp, x)
mlp.forward = forward
for seed in range(3):
    batch, items = shard(whole_batch({"seed": seed}), rank)
    model(**batch, num_items_in_batch=items, use_cache=False).loss.backward()
"""


@pytest.mark.full
@pytest.mark.parametrize("breaks", [BREAKS, BREAKS_BETWEEN_EXCHANGES], ids=["ddp", "split sequences"])
def test_a_rank_that_raises_ends_the_job_with_its_error(breaks, tmp_path):
    script = tmp_path / "breaks.py"
    script.write_text(breaks)
    start = time.monotonic()
    result = torchrun(script, timeout=120)
    assert result.returncode != 0
    assert "injected in the middle of a step" in result.stderr
    assert time.monotonic() - start < 100  # a hang, not a speed
