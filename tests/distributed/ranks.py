"""Runs the worker on two ranks and brings back its rows."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile

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
    # Files, not pipes: a rank whose pipe is full of warnings would wait for its reader, and the other rank for it.
    with tempfile.TemporaryFile("w+") as first, tempfile.TemporaryFile("w+") as second:
        ranks = [
            subprocess.Popen(
                [*command, str(rank), port, engine, json.dumps(cases)], env=environment, stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank, file in enumerate((first, second))
        ]  # fmt: skip
        try:
            for process in ranks:
                process.wait(timeout=SECONDS * len(cases) + 60)
        finally:
            for process in ranks:
                process.kill()
        for file in (first, second):
            file.seek(0)
        outputs = [file.read() for file in (first, second)]
    rows = [line.removeprefix(DONE) for line in outputs[0].splitlines() if line.startswith(DONE)]
    if len(rows) < len(cases):
        raise AssertionError("\n".join(output[-4000:] for output in outputs))
    return [json.loads(row) for row in rows]
