"""Two ranks, gloo, CPU: streamed models under DDP, FSDP2 and DeepSpeed against the bare engine and a single process."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys

import pytest

BAR = 1e-6
NOTHING_CACHED = {
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
}  # fmt: skip
SMALL = {"reduce_bucket_size": 500, "stage3_prefetch_bucket_size": 100}
CPU = {"device": "cpu"}

FAST = {
    "ddp": [{"accumulation": 3}],
    "fsdp": [{}],
    "deepspeed": [{"stage": 2}, {"stage": 3, "zero": NOTHING_CACHED, "checkpointing": True}],
}
FULL = {
    "ddp": [
        {}, {"model": "llama", "frozen": True}, {"options": {"static_graph": True}}, {"tied": True},
        {"options": {"find_unused_parameters": True}, "lora": True}, {"model": "qwen3_moe"},
    ],
    "fsdp": [{"reshard": False}, {"offload": True}, {"model": "llama"}, {"tied": True}],
    "deepspeed": [
        {"stage": 1}, {"stage": 1, "accumulation": 3, "lora": True},
        {"stage": 2, "accumulation": 3, "zero": {"overlap_comm": True, "reduce_bucket_size": 500}},
        {"stage": 2, "zero": {"offload_optimizer": CPU}, "frozen": True},
        {"stage": 3, "zero": NOTHING_CACHED, "tied": True, "checkpointing": True},
        {"stage": 3, "zero": NOTHING_CACHED, "lora": True},
        {"stage": 3, "zero": NOTHING_CACHED, "frozen": True, "eval": True, "accumulation": 3},
        {"stage": 3, "zero": {**NOTHING_CACHED, **SMALL}},
        {"stage": 3, "zero": {**NOTHING_CACHED, "offload_param": CPU, "offload_optimizer": CPU}},
        {"stage": 3, "zero": NOTHING_CACHED, "zero_init": True},
        {"stage": 3, "model": "llama"},
    ],
}  # fmt: skip


def run(engine, cases):
    """Rank 0's results of a two-rank run of the worker."""
    return run_module("tests.distributed.worker", engine, json.dumps(cases), deepspeed=engine == "deepspeed")


def run_module(module, *arguments, deepspeed=True, ranks=2):
    """What rank 0 of the processes that run `module RANK PORT *arguments` prints after RESULT."""
    if deepspeed and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port, *arguments], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=180)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return json.loads(next(line for line in outputs[0].splitlines() if line.startswith("RESULT ")).removeprefix("RESULT "))


def check(rows, cases):
    assert [row["case"] for row in rows] == cases
    for row in rows:
        for when in ("before", "after"):
            assert row[when]["unpatched engine"] <= BAR, row
            assert row[when].get("single process", 0.0) <= BAR, row
            gathers, stock = row[when]["counts"].get("gathers per parameter and micro-step"), row["stock counts"]
            print(row["case"], "patched", when, row[when], "unpatched", stock, row.get("checkpointing counts", ""))
            if gathers is not None and not row["case"].get("eval"):
                assert gathers <= 2


@pytest.mark.parametrize("engine", FAST)
def test_engine(engine):
    check(run(engine, FAST[engine]), FAST[engine])


@pytest.mark.full
@pytest.mark.parametrize(("engine", "case"), [(engine, case) for engine, cases in FULL.items() for case in cases], ids=str)
def test_every_setting(engine, case):
    """Each in processes of its own: engines leave state behind."""
    check(run(engine, [case]), [case])
