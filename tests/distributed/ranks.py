"""Runs the worker on two ranks and brings back its rows."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys

import pytest

from tests.distributed.worker import DONE, SECONDS


def run(engine, cases):
    """Rank 0's rows, one for each case."""
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    if any(case.get("lora") for case in cases):
        pytest.importorskip("peft", reason="peft is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.distributed.worker"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port, engine, json.dumps(cases)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=SECONDS * len(cases) + 60)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    rows = [line.removeprefix(DONE) for line in outputs[0].splitlines() if line.startswith(DONE)]
    if len(rows) < len(cases):
        raise AssertionError("\n".join(output[-4000:] for output in outputs))
    return [json.loads(row) for row in rows]
