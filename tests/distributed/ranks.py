"""Runs a module on several ranks and brings back what they printed.

A rank that is killed says first where it was.

[Note: ranks that are forked] A fresh Python takes seconds for its imports. Ranks are forked from
one server instead, that imports torch and the workers' modules once for each process of tests, and
does nothing with them: each rank still starts without a process group, without DeepSpeed and
without a tensor.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.worker import CASE_TIMEOUT_SECONDS, ROW_PREFIX
from tests.hangs import HANG

TRACEBACK_SIGNAL = getattr(signal, "SIGUSR1", None)  # Windows has none
TRACEBACK_SECONDS = 2


def run(engine, cases):
    """Rank 0's rows of the worker on two ranks, one for each case, all of whose runs trained under
    that engine."""
    if engine == "deepspeed":
        need_deepspeed()
    if any(case.get("lora") for case in cases):
        pytest.importorskip("peft", reason="peft is not installed")
    outputs, _ = launch(
        "tests.distributed.worker",
        engine,
        json.dumps(cases),
        seconds=CASE_TIMEOUT_SECONDS * len(cases) + 60,
    )
    rows = [
        line.removeprefix(ROW_PREFIX)
        for line in outputs[0].splitlines()
        if line.startswith(ROW_PREFIX)
    ]
    if len(rows) < len(cases):
        raise AssertionError("\n".join(output[-4000:] for output in outputs))
    results = [json.loads(row) for row in rows]
    for row, case in zip(results, cases, strict=True):
        names = {"ddp": "ddp", "fsdp": "fsdp2", "deepspeed": f"zero-{case.get('stage')}"}
        expected = names[case.get("engine", engine)]
        for name in {"unpatched", "before", "after", "checkpointing"} & row.keys():
            assert row[name].pop("engines") == [expected], (case, name)
    return results


def run_split(*arguments, ranks=2):
    """What rank 0 of the worker for split sequences prints after RESULT."""
    need_deepspeed()
    return result_of(
        *launch("tests.distributed.split_worker", *arguments, ranks=ranks, seconds=HANG)
    )


def need_deepspeed() -> None:
    """Skip without DeepSpeed, and build its extension before a rank needs it."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    failed = build_extension()
    assert not failed, failed


@functools.cache
def build_extension() -> str:
    """Build what DeepSpeed compiles at its start, or find it built; why that failed, or "".

    On a busy machine a compiler takes minutes, more than ranks have. A rank that is killed in the
    middle leaves torch's lock file, for which all later ones would wait without a word.
    """
    outputs, codes = launch("tests.distributed.extension", ranks=1, seconds=HANG)
    if codes == [0]:
        return ""
    return (
        f"DeepSpeed's extension was not built in {HANG} s. If an earlier build was killed, delete "
        "the file lock in its folder, in $TORCH_EXTENSIONS_DIR or ~/.cache/torch_extensions.\n"
        + outputs[0][-3000:]
    )


def result_of(outputs, codes):
    """What rank 0 printed after RESULT, if no rank failed."""
    for output, code in zip(outputs, codes, strict=True):
        assert code == 0, output[-4000:]
    return json.loads(
        next(x for x in outputs[0].splitlines() if x.startswith("RESULT ")).removeprefix("RESULT ")
    )


@functools.cache
def server() -> BaseContext:
    """[Note: ranks that are forked] Not all libraries survive a fork elsewhere than on Linux: there
    each rank imports."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "tests.distributed.worker",
            "tests.distributed.split_worker",
            "tests.distributed.context_worker",
            "tests.distributed.decisions",
            "torch.distributed.pipelining",
        ]
    )
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def as_program(module: str, arguments: tuple[str, ...], output: Path) -> None:
    """In a rank: the module's `main` as `python -m module *arguments` calls it. What it prints goes
    to a file.

    A file, not a pipe: a rank whose pipe is full of warnings would wait for its reader, and the
    other rank for it.
    """
    with output.open("w") as file:
        for printed in (1, 2):
            os.dup2(file.fileno(), printed)
    if TRACEBACK_SIGNAL is not None:
        faulthandler.register(TRACEBACK_SIGNAL)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


def say_where(process: Any) -> None:
    """A rank whose time is over prints what its threads are in."""
    if TRACEBACK_SIGNAL is None or process.pid is None or not process.is_alive():
        return
    os.kill(process.pid, TRACEBACK_SIGNAL)
    process.join(timeout=TRACEBACK_SECONDS)


def launch(module, *arguments, ranks=2, seconds):
    """Outputs and exit codes of `python -m module RANK PORT *arguments`, killed when the time is
    over."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = [
            server().Process(
                target=as_program, args=(module, (str(rank), port, *arguments), file), daemon=True
            )
            for rank, file in enumerate(files)
        ]
        deadline = time.monotonic() + seconds
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(timeout=max(0.1, deadline - time.monotonic()))
            for process in processes:
                say_where(process)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [file.read_text() if file.exists() else "" for file in files], [
            process.exitcode for process in processes
        ]
