"""One rank of a run of two (or four: two groups of two) in which sequences are split over the ranks
by DeepSpeed Ulysses.

python -m tests.distributed.split_worker RANK PORT '{"gradients": [{"mode": "packed"}, ...], "engines": [...]}' WORLD_SIZE

Every case is computed in a single process, unpatched; by unpatched Ulysses where it can; and by
streamed layers, whose chunks differ between ranks: "gradients" of one step, in float64 with float32
casts lifted unless the case says otherwise; weights after a few steps under "engines", in float32;
the error of "bf16" gradients.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import streambp
from tests import zoo
from tests.distributed.recorded import RecordedMode
from tests.distributed.traffic import Gathers
from tests.distributed.watch import engines_seen, operations_seen
from tests.families import FAMILIES, build, make_batch
from tests.oracle import lift_float32_casts, relative_l2, worst_error
from tests.seeds import seed_torch

RANKS = 2
LENGTH = 24
CHUNKS = ([5, 7], [12, 3])  # of rank 0 and rank 1
STEPS = 4
DEFAULT_FAMILY = "qwen3"  # of a case that names none


def model_for(case):
    name = case.get("family", DEFAULT_FAMILY)
    model = (build if name in FAMILIES else zoo.build)(
        name, getattr(torch, case.get("dtype", "float64")), **case.get("changes", {})
    )
    if case.get("frozen"):
        model.get_input_embeddings().requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    if case.get("lora"):
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
        )
        seed_torch(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def whole_batch(case):
    length = case.get("length", LENGTH)
    batch = make_batch(case.get("mode", "plain"), length=length, seed=case.get("seed", 1))
    positions = torch.arange(length).expand_as(batch["input_ids"])
    return {"position_ids": positions, **batch}


def shard(batch, rank):
    """This rank's part, with labels shifted before the cut, as DeepSpeed's data loader adapter
    makes it."""
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    full_batch = {**batch, "labels": labels, "shift_labels": labels}
    length = labels.shape[1] // RANKS
    part = slice(rank * length, (rank + 1) * length)
    return {name: tensor[:, part].contiguous() for name, tensor in full_batch.items()}, (
        labels != -100
    ).sum()


class counted:  # noqa: N801 - used like a function
    """Counts torch.distributed's exchanges, forward and backward."""

    def __init__(self):
        self.counts, self.phase = Counter(), "forward"

    def __enter__(self):
        self.real = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather")}
        for name, function in self.real.items():

            def call(*args, function=function, name=name, **kwargs):
                self.counts[f"{name} {self.phase}"] += 1
                return function(*args, **kwargs)

            setattr(dist, name, call)
        return self

    def __exit__(self, *_):
        for name, function in self.real.items():
            setattr(dist, name, function)


def gradients_of(model, batch, items, reduce):
    """Loss and gradients, the sum over ranks; what was exchanged."""
    with counted() as counter:
        loss = model(**batch, num_items_in_batch=items, use_cache=False).loss
        counter.phase = "backward"
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if reduce:
        wide = torch.promote_types(loss.dtype, torch.float32)
        gradients = {name: gradient.to(wide, copy=True) for name, gradient in gradients.items()}
        for gradient in (loss := loss.detach(), *gradients.values()):
            dist.all_reduce(gradient)
    return loss.detach(), gradients, dict(counter.counts)


def single_process(case):
    batch = whole_batch(case)
    items = (batch["labels"][:, 1:] != -100).sum()
    return gradients_of(model_for(case), batch, items, reduce=False)


@functools.cache
def register():
    """Ulysses as accelerate registers it; once a process, for models with these sizes of heads."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        build("qwen3"),
        "sdpa",
        sequence_parallel_size=RANKS,
        micro_batch_size=2,
        disable_in_eval=True,
    )


def compare(case, rank, reference):
    batch, items = shard(whole_batch(case), rank)
    loss, gradients, _ = reference
    result = {"case": case}
    if case.get("stock"):
        stock_loss, stock, result["stock counts"] = gradients_of(
            model_for(case), dict(batch), items, reduce=True
        )
        model = model_for(case)
        model.gradient_checkpointing_enable()
        *_, result["checkpointing counts"] = gradients_of(model, dict(batch), items, reduce=False)
        result["stock"] = max(worst_error(stock, gradients), abs(stock_loss / loss - 1).item())
    for sizes in CHUNKS:
        settings = {
            "chunk_size": sizes[rank],
            **case.get("config", {}),
            **case.get("configs", [{}] * 9)[rank],
        }
        config = streambp.StreamConfig(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        )
        model = streambp.patch(model_for(case), config)
        alike = (
            RecordedMode(json.dumps([case, sizes]))
            if "configs" in case
            else contextlib.nullcontext()
        )
        with alike, operations_seen() as operations:
            ours_loss, ours, counts = gradients_of(model, dict(batch), items, reduce=True)
        result[f"single process, chunks {sizes}"] = max(
            worst_error(ours, gradients), abs(ours_loss / loss - 1).item()
        )
        if case.get("stock"):
            result[f"unpatched Ulysses, chunks {sizes}"] = worst_error(ours, stock)
        result["counts"], result["layers"] = counts, model.config.num_hidden_layers
        result["described"] = str(streambp.describe(model))
        result["operations"] = len(operations)
    return result


def engine_batches(case, replica):
    """Every micro-batch of every step; each group of ranks that shares sequences has its own."""
    for index in range(STEPS * case.get("accumulation", 1)):
        yield whole_batch({"mode": "right-padded", **case, "seed": index + 100 * replica})


def train_alone(case):
    """The same steps in a single process on whole sequences.

    DeepSpeed 0.19 averages gradients over all ranks in ZeRO-3, but sums those of one sequence's
    ranks in ZeRO-1 and -2, where it trains on RANKS times the loss.
    """
    scale = RANKS if case["stage"] < 3 else 1
    model, accumulation = model_for({"dtype": "float32", **case}), case.get("accumulation", 1)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    replicas = case.get("ranks", RANKS) // RANKS
    for index, batches in enumerate(
        zip(*(engine_batches(case, replica) for replica in range(replicas)), strict=True)
    ):
        for batch in batches:
            loss = model(**batch, use_cache=False).loss
            (scale * loss / accumulation / replicas).backward()
        if (index + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}


def share_of_mean(loss, batch, group):
    """Has the gradient of the mean over all labels of the sequences. accelerate and Trainer form it
    with a differentiable all_gather, whose backward adds up all ranks' means (and which gloo does
    not have in a group without rank 0)."""
    mine = (batch["shift_labels"] != -100).sum()
    total = mine.clone()
    dist.all_reduce(total, group=group)
    return RANKS * loss * mine / total


def train_split(rank, case, mpu, patched):
    import deepspeed

    model, accumulation = model_for({"dtype": "float32", **case}), case.get("accumulation", 1)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case["stage"], **case.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    config = streambp.StreamConfig(chunk_size=CHUNKS[0][rank % RANKS], **case.get("config", {}))
    if patched == "before":
        streambp.patch(model, config)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
    if patched == "after":
        streambp.patch(engine.module, config)
    engine.train()
    group = mpu.get_sequence_parallel_group()
    with counted() as counter, Gathers() as gathers, engines_seen() as engines:
        for index, full_batch in enumerate(engine_batches(case, rank // RANKS)):
            if index == 1:
                first = gathers.copy()
            batch, _ = shard(full_batch, rank % RANKS)
            counter.phase = "forward"
            loss = share_of_mean(engine(**batch, use_cache=False).loss, batch, group)
            counter.phase = "backward"
            engine.backward(loss)
            engine.step()
            if case.get("eval"):
                counter.phase = "eval"
                engine.eval()
                with torch.no_grad():
                    engine(**batch, use_cache=False)
                engine.train()
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=case["stage"] == 3):
            if parameter.requires_grad:
                weights[name] = parameter.detach().double().clone()
    micro_steps = STEPS * accumulation
    counts = {
        name: count / micro_steps
        for name, count in counter.counts.items()
        if name.startswith("all_to_all")
    }
    counts["engines"] = sorted(engines)
    if case["stage"] == 3:
        counts["gathers in the first micro-step"] = max(first.values())
        counts["gathers per parameter"] = max((gathers - first).values()) / (micro_steps - 1)
    return weights, counts


def compare_training(case, rank, single_process):
    stock, counts = train_split(rank, case, register(), None)
    result = {"case": case, "stock": worst_error(stock, single_process), "stock counts": counts}
    for patched in ("before", "after"):
        weights, counts = train_split(rank, case, register(), patched)
        errors = {
            "unpatched Ulysses": worst_error(weights, stock),
            "single process": worst_error(weights, single_process),
        }
        result[patched] = {**errors, "counts": counts}
    return result


def lifted(function):
    """`function` with float64's casts to float32 lifted."""

    def run(*args):
        with pytest.MonkeyPatch.context() as patch:
            lift_float32_casts(patch)
            return function(*args)

    return run


@lifted
def float64_gradients(case):
    """Of the model that has the same weights in bfloat16, or in the case's dtype."""
    batch = whole_batch(case)
    model = model_for({"dtype": "bfloat16", **case}).double()
    return gradients_of(model, batch, (batch["labels"][:, 1:] != -100).sum(), reduce=False)[1]


def compare_bf16(case, rank, truth):
    """Relative error of the whole gradient."""
    batch, items = shard(whole_batch(case), rank)
    model, result = model_for({**case, "dtype": "bfloat16"}), {"case": case}
    for name in ("stock", "ours"):
        if name == "ours":
            streambp.patch(model, streambp.StreamConfig(chunk_size=case["chunks"][rank]))
        _, gradients, result[f"{name} counts"] = gradients_of(
            model, dict(batch), items, reduce=True
        )
        result[name] = relative_l2(gradients, truth)
        model.zero_grad(set_to_none=True)
    return result


# What is computed in a single process, before Ulysses takes the attention functions over; and what
# is compared with it.
RUNS = {
    "gradients": (lifted(single_process), lifted(compare)),
    "bf16": (float64_gradients, compare_bf16),
    "engines": (train_alone, compare_training),
}


def main():
    rank, port, runs, world_size = (
        int(sys.argv[1]),
        sys.argv[2],
        json.loads(sys.argv[3]),
        sys.argv[4],
    )
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world_size,
        "DS_ACCELERATOR": "cpu",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    single_process = {kind: [RUNS[kind][0](case) for case in cases] for kind, cases in runs.items()}
    register()
    results = {
        kind: [
            RUNS[kind][1](case, rank, reference)
            for case, reference in zip(cases, single_process[kind], strict=True)
        ]
        for kind, cases in runs.items()
    }
    if rank == 0:
        print("RESULT", json.dumps(results), flush=True)
    dist.barrier()  # a rank that leaves early can take gloo down under the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
