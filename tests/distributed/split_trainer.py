"""HF Trainer on sequences that accelerate splits with Ulysses, unpatched or patched; rank 0 saves
the weights.

torchrun --nproc-per-node 2 -m tests.distributed.split_trainer OUTPUT {stock,streamed,"streamed from stock",...}

"streamed from stock" goes on, streamed, from the checkpoint of "stock", and starts the data anew:
accelerate 1.15 cannot skip batches that it splits. So the data repeat themselves from that step on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from transformers import Trainer, TrainingArguments

import streambp
from tests.distributed.watch import engines_seen
from tests.families import build, make_batch

LENGTH, STEPS, SAVED_AT, PERIOD = 24, 4, 2, 8
SETTINGS = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True,
}  # fmt: skip


def rows(count, seed):
    batch = make_batch("plain", length=LENGTH, rows=count, seed=seed)
    batch["labels"][:, : LENGTH // 2 + 1] = -100  # no label at all on the first rank
    positions = torch.arange(LENGTH)
    return [
        {"input_ids": i, "labels": y, "position_ids": positions}
        for i, y in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


class InOrder(Trainer):
    def _get_train_sampler(self, *args):
        """None: rows in order."""


def main():
    output, run_name = Path(sys.argv[1]), sys.argv[2]
    patched, _, saved = run_name.partition(" from ")
    deepspeed.init_distributed(dist_backend="gloo")
    split = ParallelismConfig(
        sp_backend="deepspeed", sp_size=2,
        sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa", sp_seq_length_is_variable=True),
    )  # fmt: skip
    arguments = TrainingArguments(
        str(output / run_name), max_steps=STEPS,
        per_device_train_batch_size=2, per_device_eval_batch_size=2, learning_rate=0.1, optim="sgd",
        optim_args="momentum=0.9", lr_scheduler_type="constant", parallelism_config=split, deepspeed=SETTINGS,
        use_cpu=True, report_to=[], gradient_accumulation_steps=2, disable_tqdm=True, eval_strategy="steps", eval_steps=2,
        save_strategy="no" if saved else "steps", save_steps=SAVED_AT, ignore_data_skip=bool(saved),
    )  # fmt: skip
    model = build("qwen3", seed=1 if saved else 0)
    rank = int(os.environ["RANK"])
    if patched == "streamed":
        streambp.patch(model, streambp.StreamConfig(chunk_size=(5, 7)[rank], saves=("attn_out",)))
    trainer = InOrder(
        model, arguments, train_dataset=2 * rows(PERIOD, seed=1), eval_dataset=rows(4, seed=2)
    )
    with engines_seen() as engines:
        trainer.train(
            resume_from_checkpoint=str(output / saved / f"checkpoint-{SAVED_AT}") if saved else None
        )
    weights = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().double().clone()
    if rank == 0:
        logged = [
            entry[key]
            for entry in trainer.state.log_history
            for key in ("eval_loss", "train_loss")
            if key in entry
        ]
        results = {
            "weights": weights,
            "logged": logged,
            "engines": sorted(engines),
            "steps": trainer.state.global_step,
        }
        torch.save(results, output / f"{run_name}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
