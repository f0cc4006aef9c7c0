"""One rank of two of which one has no label: each loss path under an engine, patched and unpatched,
with each count and each gradient that arrives at the loss.

python -m tests.distributed.empty_worker RANK PORT CASES

A case has an "engine", a "setup" and "paths" of tests/loss_paths.py, and may name a "mutant". All
engines share one process group. No step changes a weight, so that each cell starts from the same.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import sys
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.distributed.decisions import ENGINES
from tests.distributed.watch import engines_seen
from tests.distributed.worker import ROW_PREFIX, distance
from tests.families import make_batch
from tests.loss_mutants import MUTANTS
from tests.loss_paths import SETUPS, loss_of, prepare

PATH_TIMEOUT_SECONDS = 120  # then a rank that hangs says where, and ends
COUNTS = {"None": None, "0": 0, "tensor(0)": torch.tensor(0), "tensor(7)": torch.tensor(7)}
UPSTREAMS = ("0", "inf", "nan")
# the count and the upstream gradient of the rank without labels, or of both ranks
CELLS = [(count, "1", "own") for count in COUNTS]
CELLS += [("None", upstream, owner) for upstream in UPSTREAMS for owner in ("own", "both")]
CELLS += [("0", "inf", "own")]


class Still(torch.optim.SGD):
    """An optimizer that changes no weight: infinite gradients would spoil those of later steps."""

    def step(self, closure=None):
        return None


class Step:
    """What one rank does in a step.

    Attributes:
        batch: tokens and labels; none of the labels counts on the rank without.
        count: `num_items_in_batch` of this rank.
        upstream: the gradient that arrives at this rank's loss.
    """

    def __init__(self, rank, unlabelled, cell):
        count, upstream, owner = cell
        self.batch = make_batch("plain", length=17 + 6 * rank, seed=rank)
        self.count = None
        if rank == unlabelled:
            self.batch["labels"].fill_(-100)
            self.count = COUNTS[count]
        is_scaled = rank == unlabelled or owner == "both"
        self.upstream = float(upstream) if is_scaled else 1.0


def make_engine(case, rank, path, patched):
    """Return the engine's adapter of a prepared model (tests/distributed/engines.py)."""
    base, settings = ENGINES[case["engine"]]

    class Prepared(base):
        def wrap(self, model):
            prepare(model, path, patched, chunk_size=5 + 2 * rank)
            return super().wrap(model)

        def make_optimizer(self, model):
            return Still([p for p in model.parameters() if p.requires_grad], lr=0.1)

        def loss(self, step):
            loss = loss_of(self.wrapped, path, step.batch, step.count, patched)
            self.loss_before = float(loss.detach())
            return loss * step.upstream

    return Prepared({**settings, **SETUPS[case["setup"]]}, rank)


def gradients_of(engine, step):
    """Return the loss and the gradients of a step, whole."""
    engine.micro_step(step, last=True)
    gradients = engine.gradients()
    engine.step()
    return engine.loss_before, gradients


def finite_entries(gradient):
    """Return which entries of a gradient are finite; None without a gradient."""
    return None if gradient is None else gradient.isfinite().tolist()


def compare(ours, expected):
    """Return names whose finite entries are others than unpatched, and the distance of the finite
    ones."""
    unlike = []
    for name, gradient in expected.items():
        if finite_entries(gradient) != finite_entries(ours[name]):
            unlike.append(name)
    parts = []
    for gradients in (ours, expected):
        part = {}
        for name, gradient in gradients.items():
            if gradient is not None and expected[name] is not None:
                part[name] = torch.where(expected[name].isfinite(), gradient, 0.0)
        parts.append(part)
    return unlike, distance(*parts)


def run_path(case, rank, number, path):
    """Return a row for each cell."""
    unlabelled = number % 2
    with engines_seen() as engines:
        stock = make_engine(case, rank, path, patched=False)
        ours = make_engine(case, rank, path, patched=True)
        rows = []
        for cell in CELLS:
            step = Step(rank, unlabelled, cell)
            expected_loss, expected = gradients_of(stock, step)
            loss, gradients = gradients_of(ours, step)
            unlike, error = compare(gradients, expected)
            row = {"cell": [path, *cell], "unlike": unlike, "error": error}
            row["losses"] = [loss, expected_loss] if rank == unlabelled else None
            rows.append(row)
    assert engines == {case["engine"]}, engines
    return rows


def run(case, rank):
    """Return the rows of all paths of a case."""
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        if "mutant" in case:
            MUTANTS[case["mutant"]](patch)
        for number, path in enumerate(case["paths"]):
            faulthandler.dump_traceback_later(PATH_TIMEOUT_SECONDS, exit=True)
            rows += run_path(case, rank, number, path)
    return rows


def main():
    rank, port, cases = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    os.environ.update(
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK=str(rank),
        WORLD_SIZE="2",
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    patience = datetime.timedelta(seconds=PATH_TIMEOUT_SECONDS / 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=patience)
    if any(case["engine"].startswith("zero") for case in cases):
        import deepspeed

        deepspeed.init_distributed("gloo", rank=rank, world_size=2, timeout=patience)
    for case in cases:
        rows = [None, None]
        dist.all_gather_object(rows, run(case, rank))
        print(ROW_PREFIX + json.dumps({"case": case, "ranks": rows}), flush=True)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
