"""One rank of a two-rank run: trains a tiny model under an engine, unpatched and patched, and prints what it found as JSON.

python -m tests.distributed.worker RANK PORT ENGINE '{"stage": 3, ...}'
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist

import streambp
from tests import zoo
from tests.families import FAMILIES, SIZES, build, make_batch

STEPS = 4


def model_for(case):
    torch.manual_seed(0)
    name = case.get("model", "qwen3")
    if case.get("zero_init"):  # weights are elsewhere as soon as they are made
        model_class, config_class, extra = FAMILIES[name]
        return model_class(config_class(**{**SIZES, **extra, "pad_token_id": None}, attn_implementation="sdpa")).train()
    changes = {"tie_word_embeddings": True} if case.get("tied") else {}
    model = (
        zoo.build(name, torch.float32, **changes) if name == "qwen3_moe" else build(name, num_hidden_layers=2, **changes)
    )
    if case.get("frozen"):
        model.get_input_embeddings().requires_grad_(False)
    if case.get("lora"):
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    return model.to(getattr(torch, case.get("dtype", "float32")))


def batches(rank, case):
    """Every micro-batch of a rank; lengths, and so numbers of chunks, differ between ranks."""
    for index in range(STEPS * case.get("accumulation", 1)):
        yield make_batch("left-padded", length=(17, 23, 11, 31)[index % 4] + 6 * rank, seed=10 * index + rank)


def config():
    return streambp.StreamConfig(chunk_size=5)


def weights_of(model):
    return {
        name.removeprefix("module."): p.detach().double().clone() for name, p in model.named_parameters() if p.requires_grad
    }


def single_process(case):
    """The same steps without an engine: gradients averaged over both ranks' batches."""
    model, accumulation = model_for(case), case.get("accumulation", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    streams = [list(batches(rank, case)) for rank in range(2)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(step * accumulation, (step + 1) * accumulation):
            for stream in streams:
                (model(**stream[micro], use_cache=False).loss / accumulation / 2).backward()
        optimizer.step()
    return weights_of(model)


def run_ddp(rank, case, patched):
    from torch.nn.parallel import DistributedDataParallel

    model, accumulation = model_for(case), case.get("accumulation", 1)
    if patched == "before":
        streambp.patch(model, config())
    wrapped = DistributedDataParallel(model, **case.get("options", {}))
    if patched == "after":
        streambp.patch(wrapped, config())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    stream = list(batches(rank, case))
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulation):
            sync = micro == accumulation - 1
            context = torch.enable_grad() if sync else wrapped.no_sync()
            with context:
                (wrapped(**stream[step * accumulation + micro], use_cache=False).loss / accumulation).backward()
        optimizer.step()
    return weights_of(wrapped), {}


def run_fsdp(rank, case, patched):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = model_for(case)
    if patched == "before":
        streambp.patch(model, config())
    options = {"reshard_after_forward": case.get("reshard", True)}
    if case.get("offload"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if case.get("mixed"):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if patched == "after":
        streambp.patch(model, config())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counts = Counter()
    with counted(counts):
        for batch in batches(rank, case):
            optimizer.zero_grad()
            model(**batch, use_cache=False).loss.backward()
            optimizer.step()
    found = {n: p.full_tensor().detach().double() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return found, dict(counts)


class counted:  # noqa: N801 - used like a function
    """Counts torch.distributed's collectives."""

    NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "_all_gather_base", "all_gather", "reduce")

    def __init__(self, counts):
        self.counts = counts

    def __enter__(self):
        self.real = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}
        for name, function in self.real.items():

            def call(*args, function=function, name=name, **kwargs):
                self.counts[name] += 1
                return function(*args, **kwargs)

            setattr(dist, name, call)

    def __exit__(self, *_):
        for name, function in self.real.items():
            setattr(dist, name, function)


def run_deepspeed(rank, case, patched):
    import deepspeed

    stage, accumulation = case["stage"], case.get("accumulation", 1)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **case.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"bf16": {"enabled": True}} if case.get("dtype") == "bfloat16" else {}),
    }
    if case.get("zero_init"):
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = model_for(case)
    else:
        model = model_for(case)
    if patched == "before":
        streambp.patch(model, config())
    if patched == "checkpointing":
        model.gradient_checkpointing_enable()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if patched == "after":
        streambp.patch(engine.module, config())
    engine.train()
    gathers = Counter()
    with gathers_counted(gathers):
        for batch in batches(rank, case):
            engine.backward(engine(**batch, use_cache=False).loss)
            engine.step()
            if case.get("eval"):
                with torch.no_grad():
                    engine(**batch, use_cache=False)
    if stage < 3:
        return weights_of(engine.module), {}
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if parameter.requires_grad:
                found[name] = parameter.detach().double().clone()
    micro_steps = STEPS * accumulation
    return found, {"gathers per parameter and micro-step": max(gathers.values(), default=0) / micro_steps}


class gathers_counted:  # noqa: N801 - used like a function
    """How often ZeRO-3 gathers each parameter."""

    def __init__(self, counts):
        self.counts = counts

    def __enter__(self):
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

        self.owner, self.real = Coordinator, Coordinator._PartitionedParameterCoordinator__all_gather_params_

        def gather(coordinator, params, *args, **kwargs):
            self.counts.update(p.ds_id for p in params)
            return self.real(coordinator, params, *args, **kwargs)

        Coordinator._PartitionedParameterCoordinator__all_gather_params_ = gather

    def __exit__(self, *_):
        self.owner._PartitionedParameterCoordinator__all_gather_params_ = self.real


RUNS = {"ddp": run_ddp, "fsdp": run_fsdp, "deepspeed": run_deepspeed}


def distance(found, expected):
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:4]
    difference = sum((found[n] - expected[n]).square().sum() for n in expected)
    return float((difference / sum(e.square().sum() for e in expected.values())).sqrt())


def main():
    rank, port, engine, cases = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", DS_ACCELERATOR="cpu"
    )
    torch.set_num_threads(1)
    if engine == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", rank=rank, world_size=2)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=2)
    results = []
    for case in cases:
        row = {"case": case}
        single = single_process(case) if not {"dtype", "zero_init"} & case.keys() else None
        stock, stock_counts = RUNS[engine](rank, copy.deepcopy(case), None)
        row["stock counts"] = stock_counts
        if case.get("checkpointing"):
            row["checkpointing counts"] = RUNS[engine](rank, copy.deepcopy(case), "checkpointing")[1]
        for when in case.get("patched", ["before", "after"]):
            found, counts = RUNS[engine](rank, copy.deepcopy(case), when)
            row[when] = {"counts": counts, "unpatched engine": distance(found, stock)}
            if single is not None:
                row[when]["single process"] = distance(found, single)
        results.append(row)
    print("RESULT " + json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
