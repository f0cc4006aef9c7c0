"""The distributed examples on two CPU ranks, and what happens to a job when one rank raises."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.watch import TRAINED_PREFIX
from tests.hangs import HANG

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
WATCH_MODULE = "tests.distributed.watch"


def check_engine(result, engine):
    """Of every rank's training."""
    assert re.findall(rf"{TRAINED_PREFIX}(.*)", result.stdout) == [f" {engine}"] * 2


def torchrun(script, *arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=HANG,
    )


@pytest.mark.full
@pytest.mark.parametrize(("name", "engine"), [("fsdp2", "fsdp2"), ("deepspeed_zero3", "zero-3")])
def test_loss_falls(name, engine):
    if name == "deepspeed_zero3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    result = torchrun("-m", WATCH_MODULE, EXAMPLES / name / "train.py")
    assert result.returncode == 0, result.stderr[-3000:]
    check_engine(result, engine)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 40
    assert losses[0] > 4.0
    assert losses[-1] < 1.5  # ln(97) = 4.57 at the start; the rule's own entropy is 0.77


@pytest.mark.full
def test_context_parallel():
    """Every rank holds a part of the half that asks, and of the half that answers."""
    result = torchrun("-m", WATCH_MODULE, EXAMPLES / "context_parallel" / "train.py")
    assert result.returncode == 0, result.stderr[-3000:]
    check_engine(result, "fsdp2")
    losses = [
        float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)", result.stdout, re.MULTILINE)
    ]
    assert len(losses) == 30
    assert losses[-1] < 0.5 * losses[0]
    assert "split over 2 ranks (context parallelism)" in result.stdout


@pytest.mark.full
def test_pipeline_parallel():
    result = torchrun(EXAMPLES / "pipeline_parallel" / "train.py")
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [
        float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)", result.stdout, re.MULTILINE)
    ]
    assert len(losses) == 40
    assert losses[0] > 4.0
    assert losses[-1] < 1.5  # as in test_loss_falls
    assert result.stdout.count("streams: 2 x Qwen3DecoderLayer") == 2  # on each rank
    assert "head        blockwise loss, no logits" in result.stdout


@pytest.mark.full
def test_sequence_parallel(tmp_path):
    """The asking half of every sequence is on rank 1, what it asks for on rank 0."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    result = torchrun(
        "-m", WATCH_MODULE, EXAMPLES / "sequence_parallel" / "train.py", "--output", str(tmp_path)
    )
    assert result.returncode == 0, result.stderr[-3000:]
    check_engine(result, "zero-3")
    losses = [
        float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)", result.stdout, re.MULTILINE)
    ]
    assert len(losses) == 30
    assert losses[-1] < 0.5 * losses[0]
    assert "split over 2 ranks" in result.stdout


BREAKING_SCRIPT = """
import os, sys, torch, torch.distributed as dist
import streambp
from tests.distributed.watch import engine_of, tell
from tests.families import build, make_batch
engine = sys.argv[1]
if engine == "zero-3":
    import deepspeed
    deepspeed.init_distributed("gloo")
else:
    dist.init_process_group("gloo")
model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=5))
mlp = model.model.layers[1].mlp
real, steps, calls = type(mlp).forward, [], []
def forward(x):
    calls.extend([1] * (torch.is_grad_enabled() and len(steps) > 1))  # recomputations; in the first step layers are tried
    if dist.get_rank() == 1 and len(calls) == 2:
        raise ValueError("injected in the middle of a step")
    return real(mlp, x)
mlp.forward = forward
if engine == "ddp":
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
elif engine == "fsdp2":
    for layer in model.model.layers:
        torch.distributed.fsdp.fully_shard(layer)
    wrapped = torch.distributed.fsdp.fully_shard(model)
else:
    settings = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
tell(engine_of(wrapped))
for seed in range(3):
    steps.append(seed)
    loss = wrapped(**make_batch("plain", seed=seed), use_cache=False).loss
    wrapped.backward(loss) if engine == "zero-3" else loss.backward()
print("all steps done")
"""


BREAKS_BETWEEN_EXCHANGES = """
import contextlib, os, sys, torch, torch.distributed as dist, streambp
from streambp.model.split import find_split
from tests.distributed.context_worker import as_trainer_gives, gathered_keys, init_device_mesh, split
from tests.distributed.split_worker import model_for, register, shard, whole_batch
from tests.distributed.watch import tell
engine, phase = sys.argv[1:]
if engine == "Ulysses":
    import deepspeed
    deepspeed.init_distributed(dist_backend="gloo")
    register()
else:
    dist.init_process_group("gloo")
    gathered_keys.DEFAULT_KEY_BYTES = 1  # one head at a time, the next on its way
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
model = streambp.patch(model_for({}), streambp.StreamConfig(chunk_size=5))
steps, calls = [], []
def in_trial():
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_run_tests":
        frame = frame.f_back
    return frame is not None
def count(module, args):
    if torch.is_grad_enabled() == (phase == "backward") and len(steps) > 1 and not in_trial():
        calls.append(1)
    if rank == 1 and len(calls) == 2:
        raise ValueError("injected in the middle of a step")
model.model.layers[phase == "backward"].mlp.register_forward_pre_hook(count)
for seed in range(3):
    steps.append(seed)
    batch, items = shard(whole_batch({"seed": seed}), rank) if engine == "Ulysses" else as_trainer_gives({"seed": seed})
    with contextlib.nullcontext() if engine == "Ulysses" else split(mesh, batch, {}):
        if not seed:
            tell(engine if find_split(model.config, True) is not None else 'none')
        model(**batch, num_items_in_batch=items, use_cache=False).loss.backward()
print("all steps done")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "phase"),
    [*((engine, "backward") for engine in ("ddp", "fsdp2", "zero-3")),
     *itertools.product(("Ulysses", "ContextParallel"), ("forward", "backward"))],
)  # fmt: skip
def test_a_rank_that_raises_ends_the_job_with_its_error(engine, phase, tmp_path):
    """In a layer, after its first chunk; the other rank waits in a collective meanwhile."""
    if engine in ("zero-3", "Ulysses"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    script = tmp_path / "breaks.py"
    script.write_text(
        BREAKS_BETWEEN_EXCHANGES if engine in ("Ulysses", "ContextParallel") else BREAKING_SCRIPT
    )
    result = torchrun(script, engine, phase)  # a rank that hangs does so for half an hour
    assert result.returncode != 0
    assert "[rank1]: ValueError: injected in the middle of a step" in result.stderr
    assert "all steps done" not in result.stdout
    check_engine(result, engine)
