"""One rank of several over which torch's context parallelism splits sequences.

python -m tests.distributed.context_worker RANK PORT '{"gradients": [{"mode": "packed"}], "training": [{}], ...}' WORLD_SIZE

Every case is computed by the unpatched model in a single process, on whole sequences, and by
streamed layers under torch's own context manager, whose chunks differ between ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.functional import pad

import streambp
from streambp.attention.spans import BlockKind, Tiling
from streambp.errors import StreamBPError
from streambp.known_names import GATHER, REDUCE_SCATTER
from streambp.sharded import gathered_keys, split_attention
from tests.distributed import context_mutants, ring_on_cpu
from tests.distributed.recorded import RecordedMode
from tests.distributed.split_worker import (
    float64_gradients,
    gradients_of,
    lifted,
    model_for,
    whole_batch,
)
from tests.distributed.watch import operations_seen
from tests.oracle import relative_l2, worst_error

CHUNKS = (5, 7, 3, 12)  # of each rank
OTHER_CHUNKS = (12, 1, 2, 3)
STEPS = 4
EXCHANGES = {
    "lists": ("all_gather",),
    "gathers": GATHER,
    "sums": REDUCE_SCATTER,
    "trades": ("all_to_all_single",),
}


def as_trainer_gives(case):
    """Whole sequences with labels shifted before they are split, as Trainer hands them to
    `context_parallel`."""
    batch = whole_batch(case)
    batch["position_ids"] = batch["position_ids"].clone()
    batch["shift_labels"] = pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    batch["labels"] = batch["labels"].clone()
    for name in case.get("without", ()):
        del batch[name]
    return batch, (whole_batch(case)["labels"][:, 1:] != -100).sum()


@contextlib.contextmanager
def split(mesh, batch, case):
    """torch's context manager around a batch, whose tensors are cut in place."""
    from torch.distributed.tensor.experimental._attention import _cp_options

    previous = _cp_options.enable_load_balance
    _cp_options.enable_load_balance = case.get("order", "head-tail") == "head-tail"
    set_rotate_method(case.get("rotate", "allgather"))
    outside = case.get("outside", ())
    buffers = [tensor for name, tensor in batch.items() if name not in outside]
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
            for name in outside:
                batch[name] = (
                    batch[name].chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
                )
            yield
    finally:
        _cp_options.enable_load_balance = previous


@contextlib.contextmanager
def record_attention(record):
    """Which collectives are issued, in order, with the elements that this rank hands in; pairs that
    are attended."""
    record["issued"], record["pairs"] = [], 0
    with pytest.MonkeyPatch.context() as patch:
        for kind, names in EXCHANGES.items():
            name = next(name for name in names if hasattr(dist, name))
            real = getattr(dist, name)

            def call(output, sent, *args, function=real, kind=kind, **kwargs):
                record["issued"].append((kind, sent.numel()))
                return function(output, sent, *args, **kwargs)

            patch.setattr(dist, name, call)

        def attend(q, kv_storage, layout, chunk, *args, real=split_attention.attend_blocks):
            for block in layout.blocks(chunk.start, chunk.stop, Tiling()):
                assert block.kind in (BlockKind.FULL, BlockKind.CAUSAL, BlockKind.BAND)
                read = sum(
                    k <= q
                    if block.kind is BlockKind.CAUSAL
                    else block.kind is BlockKind.FULL or k > q - block.window
                    for q in range(block.q0, block.q1)
                    for k in range(block.k0, block.k1)
                )
                record["pairs"] += read * (block.b1 - block.b0) * q.shape[1]
            return real(q, kv_storage, layout, chunk, *args)

        patch.setattr(split_attention, "attend_blocks", attend)
        yield


def all_parts(mine):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return parts


def config_of(case, rank):
    chunks = OTHER_CHUNKS if case.get("chunks") == "others" else case.get("chunks", CHUNKS)
    settings = {
        "chunk_size": chunks[rank],
        **case.get("config", {}),
        **case.get("configs", [{}] * 9)[rank],
    }
    return streambp.StreamConfig(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    )


def gradients(case, rank, mesh):
    """The streamed model's error against a single process, and what the ranks did."""
    result, record = {"case": case}, {}
    expected_loss = expected = None
    batch, items = as_trainer_gives(case)
    if rank == 0:
        expected_loss, expected, _ = gradients_of(
            model_for(case), whole_batch(case), items, reduce=False
        )
    if case.get("stock"):
        with ring_on_cpu.rotations() as rotated:
            result["unpatched"] = ring_error(case, batch, items, mesh, expected)
        result["rotated"] = sorted(rotated)
        batch, _ = as_trainer_gives(case)
    model = streambp.patch(model_for(case), config_of(case, rank))
    with pytest.MonkeyPatch.context() as patch:
        if case.get("heads") == 1:
            patch.setattr(gathered_keys, "DEFAULT_KEY_BYTES", 1)
        alike = RecordedMode(json.dumps(case)) if "configs" in case else contextlib.nullcontext()
        with (
            split(mesh, batch, case),
            record_attention(record),
            context_mutants.applied(case.get("mutant")),
            alike,
            operations_seen() as operations,
        ):
            loss, ours, _ = gradients_of(model, batch, items, reduce=False)
    loss, ours = summed(loss, ours)
    result["issued alike"] = all(
        issued == record["issued"] for issued in all_parts(record["issued"])
    )
    result["issued"] = [name for name, _ in record["issued"]]
    result["pairs"] = all_parts(record["pairs"])
    result["described"] = str(streambp.describe(model))
    result["operations"] = len(operations)
    if rank == 0:
        result["error"] = max(worst_error(ours, expected), abs(loss / expected_loss - 1).item())
    return result


def summed(loss, gradients):
    for tensor in (loss, *gradients.values()):
        dist.all_reduce(tensor)
    return loss, gradients


def ring_error(case, batch, items, mesh, expected):
    with ring_on_cpu.enabled(), split(mesh, batch, case):
        arguments = {**batch}
        arguments.pop("attention_mask", None)  # accelerate's hooks take it away
        loss, ring_gradients, _ = gradients_of(
            ring_on_cpu.causal(model_for(case)), arguments, items, reduce=False
        )
    _, ring_gradients = summed(loss, ring_gradients)
    return worst_error(ring_gradients, expected) if expected is not None else None


def precision(case, rank, mesh):
    """Errors of the whole gradient against float64: of streamed layers, and of torch's unpatched
    ring."""
    result, truth = {"case": case}, float64_gradients(case)
    for name in ("stock", "ours"):
        model, (batch, items) = model_for(case), as_trainer_gives(case)
        model = (
            ring_on_cpu.causal(model)
            if name == "stock"
            else streambp.patch(model, config_of(case, rank))
        )
        with ring_on_cpu.enabled(widens=True), split(mesh, batch, case):
            result[name] = relative_l2(gradients_of(model, batch, items, reduce=True)[1], truth)
    return result


ON_ONE_RANK = {
    "moved": lambda batch: batch["position_ids"].add_(1),
    "missing": lambda batch: batch.pop("position_ids"),
    "masked": lambda batch: batch.update(attention_mask=torch.ones_like(batch["input_ids"])),
    "a row less": lambda batch: batch.update({name: tensor[:1] for name, tensor in batch.items()}),
}


def refusal(case, rank, mesh):
    """The message on each rank."""
    batch, items = as_trainer_gives(case)
    model = streambp.patch(model_for(case), config_of(case, rank))
    message, mesh = None, init_device_mesh("cpu", case["mesh"]) if "mesh" in case else mesh
    try:
        with split(mesh, batch, case):
            if rank == 1 and "on rank 1" in case:
                ON_ONE_RANK[case["on rank 1"]](batch)
            gradients_of(model, batch, items, reduce=False)
    except (StreamBPError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    return {"case": case, "messages": all_parts(message)}


def entered(case, rank, mesh):
    """Only rank 0 splits its batch; the other trains on its whole batch, and ends."""
    batch, items = as_trainer_gives(case)
    model = streambp.patch(model_for(case), config_of(case, rank))
    with split(mesh, batch, case) if rank == 0 else contextlib.nullcontext():
        gradients_of(model, batch, items, reduce=False)
    sys.exit()


def training(case, rank, mesh):
    """Weights after a few steps of SGD, in float32, against a single process."""
    streams = {
        "ours": streambp.patch(model_for(case), config_of(case, rank)),
        "alone": model_for(case),
    }
    for name, model in streams.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            step_case = {**case, "seed": step}
            batch, items = as_trainer_gives(step_case)
            if name == "alone":
                gradients_of(model, whole_batch(step_case), items, reduce=False)
            else:
                with split(mesh, batch, step_case):
                    gradients_of(model, batch, items, reduce=False)
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    weights = [
        {name: p.detach().double() for name, p in model.named_parameters()}
        for model in streams.values()
    ]
    return {"case": case, "error": worst_error(*weights)}


RUNS = {
    "gradients": lifted(gradients), "precision": precision, "training": training, "refused": lifted(refusal),
    "entered": lifted(entered),
}  # fmt: skip


def main():
    rank, port, runs, world_size = (
        int(sys.argv[1]),
        sys.argv[2],
        json.loads(sys.argv[3]),
        int(sys.argv[4]),
    )
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    cases = list(
        itertools.chain.from_iterable(
            [(kind, case) for case in cases] for kind, cases in runs.items()
        )
    )
    results = {kind: [] for kind in runs}
    for kind, case in cases:
        results[kind].append(RUNS[kind](case, rank, mesh))
    if rank == 0:
        print("RESULT", json.dumps(results), flush=True)
    dist.barrier()  # a rank that leaves early can take gloo down under the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
