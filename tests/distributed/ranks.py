"""Runs a module on several ranks and brings back what they printed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from tests.distributed.worker import DONE, SECONDS


def run(engine, cases):
    """Rank 0's rows of the worker on two ranks, one for each case, all of whose runs trained under that engine."""
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    if any(case.get("lora") for case in cases):
        pytest.importorskip("peft", reason="peft is not installed")
    outputs, _ = launch("tests.distributed.worker", engine, json.dumps(cases), seconds=SECONDS * len(cases) + 60)
    rows = [line.removeprefix(DONE) for line in outputs[0].splitlines() if line.startswith(DONE)]
    if len(rows) < len(cases):
        raise AssertionError("\n".join(output[-4000:] for output in outputs))
    found = [json.loads(row) for row in rows]
    for row, case in zip(found, cases, strict=True):
        names = {"ddp": "ddp", "fsdp": "fsdp2", "deepspeed": f"zero-{case.get('stage')}"}
        expected = names[case.get("engine", engine)]
        for name in {"unpatched", "before", "after", "checkpointing"} & row.keys():
            assert row[name].pop("engines") == [expected], (case, name)
    return found


def run_split(*arguments, ranks=2):
    """What rank 0 of the worker for split sequences prints after RESULT."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    outputs, codes = launch("tests.distributed.split_worker", *arguments, ranks=ranks, seconds=180)
    for output, code in zip(outputs, codes, strict=True):
        assert code == 0, output[-4000:]
    return json.loads(next(x for x in outputs[0].splitlines() if x.startswith("RESULT ")).removeprefix("RESULT "))


def launch(module, *arguments, ranks=2, seconds):
    """Outputs and exit codes of `python -m module RANK PORT *arguments`, killed when the time is over."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module]
    with contextlib.ExitStack() as stack:
        # Files, not pipes: a rank whose pipe is full of warnings would wait for its reader, and the other rank for it.
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), port, *arguments], env=environment, stdout=file, stderr=subprocess.STDOUT
            )
            for rank, file in enumerate(files)
        ]
        deadline = time.monotonic() + seconds
        try:
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
        codes = [process.wait() for process in processes]
        for file in files:
            file.seek(0)
        return [file.read() for file in files], codes
