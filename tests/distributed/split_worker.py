"""One rank of a two-rank run in which sequences are split over the ranks by DeepSpeed Ulysses.

python -m tests.distributed.split_worker RANK PORT gradients '[{"mode": "packed", ...}, ...]'

Every case is computed in a single process, unpatched; by unpatched Ulysses where it can; and by streamed layers, whose
chunks differ between ranks. In float64 with float32 casts lifted, unless the case says otherwise.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import streambp
from tests.families import build, make_batch
from tests.oracle import lift_float32_casts, worst_error

RANKS = 2
LENGTH = 24
CHUNKS = ([5, 7], [12, 3])  # of rank 0 and rank 1


def model_for(case):
    model = build(case.get("family", "qwen3"), getattr(torch, case.get("dtype", "float64")), **case.get("changes", {}))
    if case.get("frozen"):
        model.get_input_embeddings().requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    if case.get("lora"):
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
        torch.manual_seed(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def whole_batch(case):
    batch = make_batch(case.get("mode", "plain"), length=LENGTH, seed=case.get("seed", 1))
    positions = torch.arange(LENGTH).expand_as(batch["input_ids"])
    return {"position_ids": positions, **batch}


def shard(batch, rank):
    """This rank's part, with labels shifted before the cut, as DeepSpeed's data loader adapter makes it."""
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    whole = {**batch, "labels": labels, "shift_labels": labels}
    part = slice(rank * LENGTH // RANKS, (rank + 1) * LENGTH // RANKS)
    return {name: tensor[:, part].contiguous() for name, tensor in whole.items()}, (labels != -100).sum()


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
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if reduce:
        for gradient in (loss := loss.detach(), *found.values()):
            dist.all_reduce(gradient)
    return loss.detach(), found, dict(counter.counts)


def single_process(case):
    batch = whole_batch(case)
    items = (batch["labels"][:, 1:] != -100).sum()
    return gradients_of(model_for(case), batch, items, reduce=False)


def register():
    """Ulysses as accelerate registers it; once a process, for models with these sizes of heads."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        build("qwen3"), "sdpa", sequence_parallel_size=RANKS, micro_batch_size=2, disable_in_eval=True
    )


def compare(case, rank, reference):
    batch, items = shard(whole_batch(case), rank)
    loss, gradients, _ = reference
    result = {"case": case}
    if case.get("stock"):
        stock_loss, stock, result["stock counts"] = gradients_of(model_for(case), dict(batch), items, reduce=True)
        result["stock"] = max(worst_error(stock, gradients), abs(stock_loss / loss - 1).item())
    for sizes in CHUNKS:
        config = streambp.StreamConfig(chunk_size=sizes[rank], **case.get("config", {}))
        model = streambp.patch(model_for(case), config)
        ours_loss, ours, counts = gradients_of(model, dict(batch), items, reduce=True)
        result[f"single process, chunks {sizes}"] = max(worst_error(ours, gradients), abs(ours_loss / loss - 1).item())
        if case.get("stock"):
            result[f"unpatched Ulysses, chunks {sizes}"] = worst_error(ours, stock)
        result["counts"] = counts
        result["described"] = str(streambp.describe(model))
    return result


def run_gradients(rank, cases):
    patch = pytest.MonkeyPatch()
    lift_float32_casts(patch)
    references = [single_process(case) for case in cases]
    register()
    return [compare(case, rank, reference) for case, reference in zip(cases, references, strict=True)]


RUNS = {"gradients": run_gradients}


def main():
    rank, port, what, cases = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    results = RUNS[what](rank, cases)
    if rank == 0:
        print("RESULT", json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
