"""One rank of a two-rank run: trains tiny models under an engine, unpatched and patched, and prints
what it found as JSON.

python -m tests.distributed.worker RANK PORT ENGINE '[{"stage": 3, ...}, ...]'

A case may name another "engine", under the process group of the first: DDP and FSDP2 go together.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import faulthandler
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import streambp
from streambp.attention import attend
from streambp.distributed.host import engine_host_use
from streambp.offload import free_memory
from streambp.planner import stored_counts
from tests.distributed.engines import ENGINES, InFloat64, SingleProcess
from tests.distributed.traffic import Gathers, Traffic
from tests.distributed.watch import engines_seen, operations_seen
from tests.families import make_batch
from tests.oracle import lift_float32_casts

STEPS = 4  # optimizer steps, if the case does not say
CASE_TIMEOUT_SECONDS = 120  # for one case; then a rank that hangs says where, and ends
ROW_PREFIX = "ROW "


def batches(rank, case):
    """Every micro-batch of a rank; lengths, and so numbers of chunks, differ between ranks."""
    for index in range(case.get("steps", STEPS) * case.get("accumulation", 1)):
        length = (17, 23, 11, 31)[index % 4] * case.get("longer", 1) + 6 * rank
        if "shared_on" not in case:
            mode = "left-padded"
            if "padded_on" in case:
                mode = "right-padded" if case["padded_on"] == rank else "plain"
            if index < case.get("padded_from", 0):
                mode = "plain"
            batch = make_batch(mode, length=length, seed=10 * index + rank)
            if case.get("unlabelled_on") == rank and index % 2 == 0:
                batch["labels"].fill_(-100)
            yield batch
            continue
        batch = make_batch("plain", length=length, seed=10 * index + rank)
        if case["shared_on"] == rank:  # on the other ranks rows have nothing in common
            for name in ("input_ids", "labels"):
                batch[name][1, :-6] = batch[name][0, :-6]
        elif case.get("alone"):
            batch = {name: value[:1] for name, value in batch.items()}
        yield batch


@dataclasses.dataclass
class TrainingResult:
    """Gradients of every step and weights after the last, by name; losses of evaluations;
    collectives; the engines of its forwards; how its layers ran, and their classes; what
    `describe` says about offloading, and the bytes of the engine's own; what it says about the
    head, about saves, about adapters, and about rows that share prefixes; how often an adapted
    Linear was one operation; how often attention's forward ran in the last micro-batch."""

    gradients: dict = dataclasses.field(default_factory=dict)
    weights: dict = dataclasses.field(default_factory=dict)
    losses: dict = dataclasses.field(default_factory=dict)
    counts: dict = dataclasses.field(default_factory=dict)
    engines: set = dataclasses.field(default_factory=set)
    paths: list = dataclasses.field(default_factory=list)
    kinds: list = dataclasses.field(default_factory=list)
    host: dict = dataclasses.field(default_factory=dict)
    head: str = ""
    saves: str = ""
    adapters: list = dataclasses.field(default_factory=list)
    shared: list = dataclasses.field(default_factory=list)
    operations: int = 0
    attended: int = 0


def train(engine_class, rank, case, patched):
    """Some optimizer steps under an engine.

    With "resume", a second engine with other weights takes over half-way, from a checkpoint. The
    first one is unpatched if resume is "from unpatched".
    """
    case = copy.deepcopy(case)
    steps, accumulation, resume = (
        case.get("steps", STEPS),
        case.get("accumulation", 1),
        case.get("resume"),
    )
    engine = engine_class(case, rank, None if resume == "from unpatched" else patched)
    stream, result = list(batches(rank, case)), TrainingResult()
    traffic, gathers = Traffic(), Gathers()
    for step in range(steps):
        if resume and step == steps // 2:
            engine = restart(engine, lambda: engine_class(case, rank, patched, seed=1))
        micro_batches = stream[step * accumulation : (step + 1) * accumulation]
        for micro, batch in enumerate(micro_batches):
            with (
                gathers if case.get("stage") == 3 else contextlib.nullcontext(),
                counting(case, traffic),
                engines_seen() as engines,
                operations_seen() as operations,
                forwards_of_attention() as attended,
                known_memory(case, rank),
            ):
                engine.micro_step(batch, last=micro == accumulation - 1)
            result.attended = len(attended)
            result.engines |= engines
            result.operations += len(operations)
        result.gradients.update(
            {f"{step}.{name}": gradient for name, gradient in engine.gradients().items()}
        )
        with counting(case, traffic):
            engine.step()
        if case.get("eval"):
            result.losses[f"{step}"] = engine.evaluate(micro_batches[0]).double()
    result.weights = engine.weights()
    result.counts = counts_of(traffic, gathers, result.weights, steps * accumulation)
    described = streambp.describe(engine.wrapped) if patched in ("before", "after") else None
    if described is not None:
        result.paths, result.head = (
            sorted({layer.path for layer in described.layers}),
            described.head,
        )
        result.saves = str(described.saves)
        result.kinds = sorted({layer.kind for layer in described.layers})
        result.adapters = [note for note in described.notes if "adapters" in note]
        result.shared = [note for note in described.notes if note.startswith("rows: ")]
    if described is not None and "stream" in case:
        result.host = {
            "describe": described.offload,
            **dataclasses.asdict(engine_host_use(engine.module)),
        }
        result.host["trainable"] = 4 * sum(w.numel() for w in result.weights.values())
    return result


@contextlib.contextmanager
def forwards_of_attention():
    """A list with an entry for each chunk and layer whose attention is computed."""
    forwards, real = [], attend.MergedOutput.__init__

    def count_forward(self, *args, **kwargs):
        forwards.append(1)
        real(self, *args, **kwargs)

    attend.MergedOutput.__init__ = count_forward
    try:
        yield forwards
    finally:
        attend.MergedOutput.__init__ = real


@contextlib.contextmanager
def known_memory(case, rank):
    """A device that has so many bytes free on this rank, with "free"."""
    with pytest.MonkeyPatch.context() as patch:
        if "free" in case:
            patch.setattr(free_memory, "free_memory", lambda device: case["free"][rank])
        yield


def counting(case, traffic):
    return traffic if case.get("count") else contextlib.nullcontext()


def restart(engine, make):
    """Save, throw away, start anew with other weights, load."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    engine.save(Path(folder[0]))
    saved = engine.weights()
    new_engine = make()
    start_distance = distance(new_engine.weights(), saved)
    assert start_distance > 0.1, start_distance  # so that a load that does nothing would be seen
    new_engine.load(Path(folder[0]))
    return new_engine


def counts_of(traffic, gathers, weights, micro_steps):
    numel = sum(w.numel() for w in weights.values())
    counts = {
        f"{kind} x trainable parameters": n / numel / micro_steps
        for kind, n in traffic.elements.items()
    }
    counts |= {f"calls {kind}": n / micro_steps for kind, n in traffic.calls.items()}
    if gathers:
        counts["gathers per parameter"] = max(gathers.values()) / micro_steps
    return counts


def train_alone(case, engine_class=SingleProcess):
    """The same steps in this process, without an engine and unpatched: gradients averaged over both
    ranks' batches."""
    engine, result = engine_class(case), TrainingResult()
    steps, accumulation = case.get("steps", STEPS), case.get("accumulation", 1)
    streams = [list(batches(rank, case)) for rank in range(2)]
    for step in range(steps):
        for micro in range(step * accumulation, (step + 1) * accumulation):
            for stream in streams:
                engine.micro_step(stream[micro], last=True, share=1 / len(streams))
        result.gradients.update(
            {f"{step}.{name}": gradient for name, gradient in engine.gradients().items()}
        )
        engine.step()
        if case.get("eval"):
            result.losses[f"{step}"] = engine.evaluate(
                streams[dist.get_rank()][step * accumulation]
            ).double()
    result.weights = engine.weights()
    return result


def distance(tensors, expected):
    """Relative, of all entries taken together; None counts as zero."""
    assert tensors.keys() == expected.keys(), sorted(tensors.keys() ^ expected.keys())[:4]
    pairs = [
        (f, e)
        for f, e in ((tensors[name], expected[name]) for name in expected)
        if f is not None or e is not None
    ]
    difference = sum(
        float(((0 if f is None else f) - (0 if e is None else e)).square().sum()) for f, e in pairs
    )
    return (
        difference / max(sum(float(e.square().sum()) for _, e in pairs if e is not None), 1e-300)
    ) ** 0.5


def worst(tensors, expected):
    """The largest relative distance of a single entry, none counted as smaller than a hundredth of
    the mean entry."""
    sizes = {name: 0.0 if e is None else float(e.norm()) for name, e in expected.items()}
    floor = 0.01 * (sum(size**2 for size in sizes.values()) / len(sizes)) ** 0.5
    return max(
        distance({0: tensors[name]}, {0: e}) * sizes[name] / max(sizes[name], floor)
        for name, e in expected.items()
    )


def compare(result, expected):
    row = {
        "gradients": distance(result.gradients, expected.gradients),
        "weights": distance(result.weights, expected.weights),
    }
    row["worst gradient"] = worst(result.gradients, expected.gradients)
    if expected.losses:
        row["losses"] = distance(result.losses, expected.losses)
    return row


def train_in_float64(case):
    """The same steps without rounding: the distances from its gradients are rounding alone."""
    with pytest.MonkeyPatch.context() as context:
        lift_float32_casts(context)
        return train_alone(case, InFloat64)


def run(engine_class, rank, case):
    """A case's row: the distances of every patched run from the unpatched engine's and from the
    single process's."""
    row = {"case": case, "unpatched": {}}
    single_process = None if case.get("zero_init") else train_alone(case)
    stock = train(engine_class, rank, {**case, "resume": None}, None)
    row["unpatched"] |= {"counts": stock.counts, "engines": sorted(stock.engines)}
    row["unpatched"]["operations"] = stock.operations
    if single_process is not None:
        row["unpatched"]["single process"] = compare(stock, single_process)
    needs_truth = case.get("fixed") or (case.get("lora") and not case.get("dtype"))
    truth = train_in_float64(case) if needs_truth else None
    if truth is not None:
        row["unpatched"]["rounding"] = compare(stock, truth)
    if case.get("checkpointing"):
        result = train(engine_class, rank, case, "checkpointing")
        row["checkpointing"] = {"counts": result.counts, "engines": sorted(result.engines)}
    for when in case.get("patched", ["before", "after"]):
        result = train(engine_class, rank, case, when)
        row[when] = {
            "counts": result.counts,
            "engines": sorted(result.engines),
            "paths": result.paths,
            "kinds": result.kinds,
            "head": result.head,
        }
        row[when]["shared"], row[when]["saves"] = result.shared, result.saves
        row[when]["adapters"], row[when]["operations"] = result.adapters, result.operations
        if "shared_on" in case:
            row[when]["counts of ranks"] = [None] * dist.get_world_size()
            dist.all_gather_object(row[when]["counts of ranks"], result.counts)
        row[when]["unpatched"] = compare(result, stock)
        if truth is not None:
            row[when]["rounding"] = compare(result, truth)
        if single_process is not None:
            row[when]["single process"] = compare(result, single_process)
        if "free" in case:
            settings = {name: value for name, value in case.items() if name != "free"}
            without_saves = train(engine_class, rank, {**settings, "stream": {"saves": []}}, when)
            mine = (
                compare(result, without_saves),
                [result.counts, without_saves.counts],
                result.attended,
                without_saves.attended,
                result.saves,
            )
            row[when]["ranks"] = [None] * dist.get_world_size()
            dist.all_gather_object(row[when]["ranks"], mine)
        if case.get("stream", {}).get("offload"):
            without_saves = train(
                engine_class, rank, {**case, "stream": {**case["stream"], "offload": "none"}}, when
            )
            row[when]["not offloaded"], row[when]["host"] = (
                compare(result, without_saves),
                result.host,
            )
    return row


def main():
    rank, port, engine, cases = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE="2",
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    stored_counts.folder = lambda: Path(os.devnull) / "plans"
    if engine == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", rank=rank, world_size=2)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=2)
    for case in cases:
        faulthandler.dump_traceback_later(CASE_TIMEOUT_SECONDS, exit=True)
        print(
            ROW_PREFIX + json.dumps(run(ENGINES[case.get("engine", engine)], rank, case)),
            flush=True,
        )
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
