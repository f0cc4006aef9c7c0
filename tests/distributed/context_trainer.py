"""HF Trainer or TRL's SFTTrainer with accelerate's cp_size, on FSDP2, in float64; rank 0 saves
weights and what was logged.

python -m tests.distributed.context_trainer RANK PORT FOLDER {trainer,sft} {alone,stock,streamed,...} WORLD_SIZE

"streamed from stock" goes on, streamed, from the checkpoint of "stock". "stock ddp" and so on: HF
Trainer under DDP or FSDP2, whole sequences; "mutant ddp" streams wrongly. Several, with commas
between them, share a start.

accelerate takes FSDP2 only where it finds an accelerator, so it is told that it has found one; torch's ring, which
unpatched models train under, has no handler for a CPU's kernel (`ring_on_cpu.py`). Nothing else
stands in.
"""

from __future__ import annotations

import contextlib
import os
import sys

import pytest
import torch
import torch.distributed as dist

LENGTH, STEPS, SAVED_AT, CHUNKS = 24, 3, 2, (5, 7, 3, 12)
FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
UNSPLIT_ENGINES = ("ddp", "fsdp2")  # engines that split no sequence


class InFloat64:
    """torch for TRL's own loss, which sums in float32 whatever it is given."""

    def __getattr__(self, name):
        return getattr(torch, "float64" if name == "float32" else name)


def rows(count, seed):
    from tests.families import make_batch

    batch = make_batch("plain", length=LENGTH, rows=count, seed=seed)
    batch["labels"][:, : LENGTH // 3] = -100
    return [
        {"input_ids": i, "labels": y}
        for i, y in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


def create_trainer(objective, run_name, folder, world_size):
    """The trainer, which has patched its model if it streams."""
    import datasets
    import trl
    from accelerate.utils import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    import streambp
    from streambp.integrations.trl import StreamSFTConfig, StreamSFTTrainer
    from tests.families import build
    from tests.integrations.test_trl import tokenizer

    run, _, saved = run_name.partition(" from ")
    how, _, engine = run.partition(" ")
    streams, replicas = how in ("streamed", "mutant"), 2 if engine == "twice" else 1
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 1e-2,
        "optim": "sgd", "optim_args": "momentum=0.9",  # Adam would make the rounding of small gradients large
        "lr_scheduler_type": "constant", "report_to": [], "disable_tqdm": True,
        "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "eval_strategy": "steps", "eval_steps": SAVED_AT,
        "logging_steps": 1, "save_strategy": "no" if saved or replicas == 2 else "steps",
        "save_steps": SAVED_AT, "bf16": False,
    }  # fmt: skip
    if run_name == "alone" or engine == "ddp":
        settings |= {"use_cpu": True, "ddp_backend": "gloo"}
    else:
        settings |= {"fsdp": "full_shard", "fsdp_config": FSDP2}
    if engine not in UNSPLIT_ENGINES and run_name != "alone":
        settings["parallelism_config"] = ParallelismConfig(
            cp_size=world_size // replicas, dp_shard_size=replicas
        )
    output = f"{folder}/{objective} {run_name}"
    model, size = (
        build("qwen3", torch.float64, seed=1 if saved else 0),
        CHUNKS[int(os.environ["RANK"])],
    )
    if objective == "trainer":
        if streams:
            streambp.patch(model, streambp.StreamConfig(chunk_size=size, saves=("attn_out",)))
        return Trainer(
            model,
            TrainingArguments(output, **settings),
            train_dataset=rows(32, 1),
            eval_dataset=rows(4, 2),
        )
    settings |= {
        "max_length": LENGTH,
        "pad_to_multiple_of": 8,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    config, trainer = (
        (StreamSFTConfig, StreamSFTTrainer) if streams else (trl.SFTConfig, trl.SFTTrainer)
    )
    if streams:
        settings["stream_chunk_size"] = str(size)
    train, evaluate = (
        datasets.Dataset.from_list(
            [
                {"input_ids": row["input_ids"].tolist()[: LENGTH - 3 * (i % 3)]}
                for i, row in enumerate(rows(*of))
            ]
        )
        for of in ((32, 1), (4, 2))
    )
    return trainer(
        model,
        config(output, **settings),
        train_dataset=train,
        eval_dataset=evaluate,
        processing_class=tokenizer(),
    )


def let_accelerate_shard():
    """accelerate takes FSDP2 only where it finds an accelerator, so it is told that it has found
    one."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)


def mutate(monkeypatch):
    """Streamed layers take gradients for a thousandth more than they are."""
    from streambp.layer.function import StreamedLayer

    real = StreamedLayer.backward

    def scaled(ctx, *grads):
        return real(ctx, *(None if grad is None else 1.001 * grad for grad in grads))

    monkeypatch.setattr(StreamedLayer, "backward", staticmethod(scaled))


def train(folder, objective, run_name, world_size):
    """Trains, and saves what rank 0 found."""
    from accelerate.state import AcceleratorState

    from streambp import describe
    from tests.distributed import ring_on_cpu
    from tests.distributed.watch import engines_seen
    from tests.oracle import lift_float32_casts

    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        if run_name.startswith("mutant"):
            mutate(monkeypatch)
        lift_float32_casts(monkeypatch)
        monkeypatch.setattr("trl.kernels.chunked_logprob.torch", InFloat64())
        if run_name.startswith("stock") and not run_name.endswith(UNSPLIT_ENGINES):
            stack.enter_context(ring_on_cpu.enabled())
        trainer = create_trainer(objective, run_name, folder, world_size)
        engines = stack.enter_context(engines_seen())
        _, resumes, saved = run_name.partition(" from ")
        checkpoint = f"{folder}/{objective} {saved}/checkpoint-{SAVED_AT}"
        trainer.train(resume_from_checkpoint=checkpoint if resumes else None)
    weights = {}
    for name, parameter in trainer.model.named_parameters():
        full_weight = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        weights[name] = full_weight.detach().double().clone()
    if os.environ["RANK"] == "0":
        logged = [{key: value for key, value in entry.items() if "runtime" not in key and "per_second" not in key}
                  for entry in trainer.state.log_history]  # fmt: skip
        results = {"weights": weights, "logged": logged, "engines": sorted(engines)}
        if not run_name.startswith(("alone", "stock")):
            results["paths"] = sorted({layer.path for layer in describe(trainer.model).layers})
        torch.save(results, f"{folder}/{objective}-{run_name}.pt")


def main():
    rank, port, folder, objective, whats, world_size = sys.argv[1:]
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ |= {"MASTER_PORT": port}
    if not whats.endswith(("alone", "ddp")):
        let_accelerate_shard()
    for run_name in whats.split(","):
        train(folder, objective, run_name, int(world_size))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
