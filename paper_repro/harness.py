"""Runs one (method, shape, length) at a time in a process of its own, and keeps the rows in a CSV file.

Rows are printed and stored as they are measured. A child that ends without one, or before its last, gives a row that says
how it ended; the sweep goes on. A row whose gradients are not finite, or whose kernels are not those that its method stands
for, says so instead of "ok". What a row has is in `paper_repro/figures.py`. [Note: measurement]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import datetime
import functools
import importlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

import streambp
from paper_repro.figures import (
    GIB,
    LONGEST_TIMELINE,
    commit,
    counted_peak,
    run_steps,
    versions,
    wrong_paths,
)
from paper_repro.losses import OBJECTIVES, Objective
from paper_repro.methods import Method, Unavailable
from paper_repro.recipes import METHODS
from paper_repro.rows import Deadline, add_minutes, first_line, run_child
from paper_repro.shapes import build, make_batch
from streambp.device import allocator_bytes, is_accelerator, reports_memory

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table. seconds and bytes are of the third forward and backward; [Note: measurement].

    The columns from first_seconds on are those of `Figures`; kernels: what attended, and which of ours ran. step: what
    a streamed one did, by `streambp.last_step`, and the bytes that were predicted for it.
    """

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
    first_seconds: float | None = None
    retries: int | None = None
    kernel_share: float | None = None
    gradient_buffers: int | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    kernels: str = ""
    step: str = ""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a child process measures.

    micro_batches: to a step. adamw: a step ends with AdamW's, whose states are there from the second on. moved: the model
    is patched on the CPU, and moved. steps: of which the last is timed; two where each takes long.
    """

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
    micro_batches: int = 1
    adamw: bool = False
    moved: bool = False
    steps: int = 3


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="CSV file; its rows are kept and new ones added"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    add_minutes(parser)
    return parser


def run(job: Job, output: Path, deadline: Deadline | None = None, fork: bool = False) -> list[Row]:
    """Measure a job in a fresh process, or in a fork of this one; print and store each row as it comes: one at least."""
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        show(row)
        store(row, output)

    def line(text: str) -> None:
        if text.startswith("ROW "):
            keep(Row(**json.loads(text.removeprefix("ROW "))))

    command = [sys.executable, "-m", "paper_repro.harness", json.dumps(dataclasses.asdict(job))]
    ended = run_child(
        functools.partial(child, job) if fork else command,
        ROOT,
        deadline or Deadline(float("inf")),
        line,
    )
    if ended.code != 0 or not rows:
        following = job.lengths[min(len(rows), len(job.lengths) - 1)]
        on = rows[-1].device if rows else job.device  # this process must not touch the GPU
        keep(Row(**row_of(job, following, str(ended), on)))
    return rows


def sweep(jobs: Iterable[Job], output: Path, deadline: Deadline) -> None:
    """`run` them until the time is over, and say what was left out."""
    skipped_jobs = []
    for job in jobs:
        if deadline.left:
            run(job, output, deadline)
        else:
            skipped_jobs.append(f"{job.objective} {job.method}")
    if skipped_jobs:
        print(
            f"not run, {deadline.minutes:g} minutes are over: {', '.join(skipped_jobs)}", flush=True
        )


def show(row: Row) -> None:
    seconds = f"{row.seconds:9.3f} s" if row.seconds is not None else " " * 11
    peak = f"{row.peak_gib:8.3f} GiB" if row.peak_gib is not None else " " * 12
    label = f"{row.shape:<10} {row.trained:<5} {row.objective:<5} {row.method:<22}"
    columns = (
        "first_seconds",
        "reserved_gib",
        "retries",
        "kernel_share",
        "gradient_buffers",
        "loss",
        "gradient_norm",
    )
    figures = [
        f"{name} {getattr(row, name):g}" for name in columns if getattr(row, name) is not None
    ]
    print(f"{label} {row.rows} x {row.tokens:>8} {seconds} {peak} {row.status}", flush=True)
    if figures:
        print(f"{'':<11}{', '.join(figures)}; {row.kernels}", flush=True)
    if row.step:
        print(f"{'':<11}{row.step}", flush=True)


def store(row: Row, output: Path) -> None:
    """Append the row; a file of fewer columns gets the new ones, empty."""
    fields = [field.name for field in dataclasses.fields(Row)]
    with output.open(newline="") if output.exists() else contextlib.nullcontext() as file:
        reader = None if file is None else csv.DictReader(file)
        earlier = [] if reader is None or reader.fieldnames == fields else list(reader)
        writes_all = reader is None or bool(earlier)
    with output.open("w" if writes_all else "a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if writes_all:
            writer.writeheader()
        writer.writerows(earlier)
        writer.writerow(dataclasses.asdict(row))


def child(job: Job) -> None:
    device = torch.device(job.device)
    if device.type == "cuda" and job.budget_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.budget_gib * 2**30 / total))
    try:
        model = build(job.shape, job.lora, device, job.seed)
        method = METHODS[job.method]()
        if job.moved:  # made on the device, whose random numbers take no minute
            model.cpu()
        method.prepare(model, job.chunk_size)
        model.to(device)
    except Unavailable as error:
        print("ROW", json.dumps(row_of(job, job.lengths[0], str(error))), flush=True)
        return
    except torch.OutOfMemoryError:
        print("ROW", json.dumps(row_of(job, job.lengths[0], "out of memory")), flush=True)
        return
    for length in job.lengths:
        try:
            figures, problems = measure(method, model, OBJECTIVES[job.objective], length, job)
            status = f"failed: {'; '.join(problems)}" if problems else "ok"
            print("ROW", json.dumps(row_of(job, length, status, **figures)), flush=True)
        except Unavailable as error:
            print("ROW", json.dumps(row_of(job, length, str(error))), flush=True)
            return
        except torch.OutOfMemoryError:
            print("ROW", json.dumps(row_of(job, length, "out of memory")), flush=True)
            if job.until_oom:
                return
        except Exception as error:  # the next length may do
            print(
                "ROW",
                json.dumps(
                    row_of(job, length, f"failed: {type(error).__name__}: {first_line(error)}")
                ),
                flush=True,
            )


def measure(
    method: Method, model: PreTrainedModel, objective: Objective, length: int, job: Job
) -> tuple[dict[str, float | str | None], list[str]]:
    """The row's own figures, and what must not be. [Note: measurement]"""
    ids = make_batch(model, length, job.seed, job.rows)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = (
        torch.optim.AdamW(trained, lr=1e-6, fused=is_accelerator(model.device))
        if job.adamw
        else None
    )
    start = 0

    def forward() -> Tensor:
        nonlocal start
        start = allocator_bytes(model.device, "allocated") if reports_memory(model.device) else 0
        for _ in range(job.micro_batches - 1):
            with method.step(model):
                loss = objective(method, model, ids, job.seed)
            loss.backward()
        with method.step(model):
            return objective(method, model, ids, job.seed)

    def update() -> None:
        assert optimizer is not None
        optimizer.step()
        optimizer.zero_grad()

    step_figures = run_steps(
        model,
        forward,
        None if optimizer is None else update,
        length <= LONGEST_TIMELINE and job.steps > 2,
        job.steps,
    )
    problems = [*step_figures.problems, *method.missing(step_figures, model.device.type)]
    patched = getattr(model, "_streambp", None)
    if patched is not None:
        problems += wrong_paths(model)
    offloader = None if patched is None else patched.offloader
    figures: dict[str, float | str | None] = {
        "seconds": step_figures.seconds,
        "first_seconds": step_figures.first,
        "peak_gib": counted_peak(model, forward)
        if step_figures.peak_gib is None
        else step_figures.peak_gib,
        "reserved_gib": step_figures.reserved_gib,
        "host_gib": None if offloader is None else offloader.host_bytes / GIB,
        "retries": step_figures.retries,
        "kernel_share": step_figures.kernel_share,
        "gradient_buffers": step_figures.buffers if patched is not None else None,
        "loss": step_figures.loss,
        "gradient_norm": step_figures.norm,
        "kernels": ", ".join(step_figures.ran),
        "step": "" if patched is None else told(model, start),
    }
    return figures, problems


def told(model: PreTrainedModel, start: int) -> str:
    """What the last step of a patched model did. start: bytes that were allocated before it."""
    record, state = streambp.last_step(model), model._streambp  # type: ignore[union-attr]
    assert record is not None
    text = f"{record}; {record.short_steps} steps let go of saves"
    if record.least_free is not None:
        text += f", {record.least_free / GIB:.3g} GiB were free at least"
    policy = state.saves_policy
    if policy is None or policy.figures.need is None:
        return text
    chunk = record.rows * min(record.chunk_size, record.tokens // record.rows)
    saved_bytes = record.needed if record.needed is not None else record.saved_bytes or 0.0
    need, waiting = peak_of(
        policy.figures.need.bytes_by_layer(record.tokens, chunk, 0.0), saved_bytes, policy.layers
    )
    parts = (
        f"{start / GIB:.3g} at the start, {need / GIB:.3g} of a step without saves, "
        f"{waiting / GIB:.3g} of {saved_bytes / GIB:.3g}"
    )
    return f"{text}; predicted {(start + need + waiting) / GIB:.4g} GiB: {parts} of saves"


def peak_of(
    phases: Iterable[tuple[float, float]], saved_bytes: float, layers: int
) -> tuple[float, float]:
    """Bytes that a step without saves takes in the phase of its peak, and those of `saved_bytes`
    that are there then, as much of each layer. phases: the last layer that waits for its backward,
    and bytes."""

    def saved_at(layer: float) -> float:
        return saved_bytes * (min(layer, layers - 1) + 1) / layers

    layer, need = max(phases, key=lambda phase: phase[1] + saved_at(phase[0]))
    return need, saved_at(layer)


def row_of(
    job: Job, length: int, status: str, on: str | None = None, **figures: float | str | None
) -> dict[str, object]:
    """on: the device's name; None: look it up."""
    empty = dict.fromkeys(("seconds", "peak_gib", "reserved_gib", "host_gib"))
    row: dict[str, object] = {
        "experiment": job.experiment,
        "objective": job.objective,
        "shape": job.shape,
        "trained": ("LoRA" if job.lora else "full") + " AdamW" * job.adamw,
        "method": job.method,
        "tokens": length,
        "rows": job.rows,
        "chunk_size": str(job.chunk_size),
        "status": status,
        **empty,
        **{
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in figures.items()
        },
        "seed": job.seed,
        "device": on or device_name(job.device),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    return row


def device_name(device: str) -> str:
    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device).get_device_name())


if __name__ == "__main__":
    if "STREAMBP_TEST_DEVICE" in os.environ:  # it may be one that has to be registered
        importlib.import_module("tests.device")
    values = json.loads(sys.argv[1])
    child(Job(**{**values, "lengths": tuple(values["lengths"])}))
