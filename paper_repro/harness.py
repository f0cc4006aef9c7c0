"""Runs one (method, shape, length) at a time in a process of its own, and keeps the rows in a CSV file.

Rows are printed and stored as they are measured. A child that ends without one, or before its last, gives a row that says
how it ended; the sweep goes on.

[Note: measurement] Forward and backward, gradients None at the start, the third iteration counts: the first pins memory and
makes kernels, and what "auto" has learnt from it changes the second. On a GPU the peak is the
allocator's; on a CPU it is counted: the bytes of all storages made since the step began and still alive.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from paper_repro.losses import OBJECTIVES, Objective
from paper_repro.methods import METHODS, Method, Unavailable
from paper_repro.rows import Deadline, add_minutes, first_line, run_child
from paper_repro.shapes import build, make_batch
from streambp.planner.count import LiveBytes

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table. seconds and bytes are of the third forward and backward; [Note: measurement]."""

    experiment: str
    objective: str
    shape: str
    trained: str
    method: str
    tokens: int
    rows: int
    chunk_size: str
    status: str
    seconds: float | None
    peak_gib: float | None
    reserved_gib: float | None
    host_gib: float | None
    seed: int
    device: str
    versions: str
    commit: str
    date: str


@dataclasses.dataclass(frozen=True)
class Job:
    """What a child process measures."""

    experiment: str
    method: str
    shape: str
    lengths: tuple[int, ...]
    objective: str = "sft"
    lora: bool = False
    rows: int = 1
    chunk_size: int | str = "auto"
    budget_gib: float | None = None
    seed: int = 0
    device: str = "cuda"
    until_oom: bool = True


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="CSV file; its rows are kept and new ones added")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    add_minutes(parser)
    return parser


def run(job: Job, output: Path, deadline: Deadline | None = None) -> list[Row]:
    """Measure a job in a fresh process; print and store each row as it comes. There is at least one."""
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        show(row)
        store(row, output)

    def line(text: str) -> None:
        if text.startswith("ROW "):
            keep(Row(**json.loads(text.removeprefix("ROW "))))

    command = [sys.executable, "-m", "paper_repro.harness", json.dumps(dataclasses.asdict(job))]
    ended = run_child(command, ROOT, deadline or Deadline(float("inf")), line)
    if ended.code != 0 or not rows:
        following = job.lengths[min(len(rows), len(job.lengths) - 1)]
        on = rows[-1].device if rows else job.device  # this process must not touch the GPU
        keep(Row(**row_of(job, following, str(ended), on)))
    return rows


def sweep(jobs: Iterable[Job], output: Path, deadline: Deadline) -> None:
    """`run` them until the time is over, and say what was left out."""
    late = []
    for job in jobs:
        if deadline.left:
            run(job, output, deadline)
        else:
            late.append(f"{job.objective} {job.method}")
    if late:
        print(f"not run, {deadline.minutes:g} minutes are over: {', '.join(late)}", flush=True)


def show(row: Row) -> None:
    seconds = f"{row.seconds:9.3f} s" if row.seconds is not None else " " * 11
    peak = f"{row.peak_gib:8.3f} GiB" if row.peak_gib is not None else " " * 12
    what = f"{row.shape:<10} {row.trained:<5} {row.objective:<5} {row.method:<22}"
    print(f"{what} {row.rows} x {row.tokens:>8} {seconds} {peak} {row.status}", flush=True)


def store(row: Row, output: Path) -> None:
    new = not output.exists()
    with output.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(dataclasses.asdict(row))


def child(job: Job) -> None:
    device = torch.device(job.device)
    if device.type == "cuda" and job.budget_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.budget_gib * 2**30 / total))
    try:
        model = build(job.shape, job.lora, device, job.seed)
        method = METHODS[job.method]()
        method.prepare(model, job.chunk_size)
    except Unavailable as error:
        print("ROW", json.dumps(row_of(job, job.lengths[0], str(error))), flush=True)
        return
    except torch.OutOfMemoryError:
        print("ROW", json.dumps(row_of(job, job.lengths[0], "out of memory")), flush=True)
        return
    for length in job.lengths:
        try:
            figures = measure(method, model, OBJECTIVES[job.objective], length, job)
            print("ROW", json.dumps(row_of(job, length, "ok", **figures)), flush=True)
        except Unavailable as error:
            print("ROW", json.dumps(row_of(job, length, str(error))), flush=True)
            return
        except torch.OutOfMemoryError:
            print("ROW", json.dumps(row_of(job, length, "out of memory")), flush=True)
            if job.until_oom:
                return
        except Exception as error:  # the next length may do
            print(
                "ROW", json.dumps(row_of(job, length, f"failed: {type(error).__name__}: {first_line(error)}")), flush=True
            )


def measure(method: Method, model: PreTrainedModel, objective: Objective, length: int, job: Job) -> dict[str, float | None]:
    """[Note: measurement]"""
    ids = make_batch(model, length, job.seed, job.rows)
    on_gpu = model.device.type == "cuda"
    figures: dict[str, float | None] = {}
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with method.step(model):
            loss = objective(method, model, ids, job.seed)
        loss.backward()
        del loss
        if on_gpu:
            torch.cuda.synchronize()
        figures["seconds"] = time.perf_counter() - start
    if on_gpu:
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        figures["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    else:  # counting slows the step down, so it has one of its own
        model.zero_grad(set_to_none=True)
        with LiveBytes() as count:
            with method.step(model):
                loss = objective(method, model, ids, job.seed)
            loss.backward()
        figures["peak_gib"] = count.peak / 2**30
    patched = getattr(model, "_streambp", None)
    if patched is not None and patched.state.offloader is not None:
        figures["host_gib"] = patched.state.offloader.host_bytes / 2**30
    return figures


def row_of(job: Job, length: int, status: str, on: str | None = None, **figures: float | None) -> dict[str, object]:
    """on: the device's name; None: look it up."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    empty = {"seconds": None, "peak_gib": None, "reserved_gib": None, "host_gib": None}
    rounded = {name: None if value is None else round(value, 4) for name, value in {**empty, **figures}.items()}
    return dataclasses.asdict(
        Row(
            job.experiment,
            job.objective,
            job.shape,
            "LoRA" if job.lora else "full",
            job.method,
            length,
            job.rows,
            str(job.chunk_size),
            status,
            rounded["seconds"],
            rounded["peak_gib"],
            rounded["reserved_gib"],
            rounded["host_gib"],
            job.seed,
            on or device_name(job.device),
            versions(),
            commit.stdout.strip() or "unknown",
            datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        )
    )


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def versions() -> str:
    """Of everything that takes part, "torch 2.13.0; ..."."""
    found = []
    for name in ("torch", "transformers", "trl", "peft", "liger-kernel", "deepspeed"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "; ".join(found)


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    child(Job(**{**values, "lengths": tuple(values["lengths"])}))
