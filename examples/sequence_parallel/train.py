"""One sequence over several ranks: DeepSpeed Ulysses splits it, each rank streams its shard, HF Trainer drives.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/sequence_parallel/train.py       # two CPU ranks, a small model
    torchrun --nproc-per-node 8 examples/sequence_parallel/train.py --model Qwen/Qwen3-8B --seq-len 524288

The only difference from a script without streambp is `streambp.patch`. The task shows that ranks see each other's tokens:
half of the sequence names a token again and again among others, the other half asks for it, on other ranks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import streambp

CONFIG = Path(__file__).with_name("ds_config.json")
QUESTION = 1  # a token that asks


class Questions(Dataset[dict[str, torch.Tensor]]):
    """Sequences whose second half asks for the token that fills half of the first half."""

    def __init__(self, vocabulary: int, length: int, count: int) -> None:
        self.vocabulary, self.length, self.count = min(vocabulary, 32), length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        answer, *_ = torch.randint(2, self.vocabulary, (1,), generator=draw)
        ids = torch.randint(2, self.vocabulary, (self.length,), generator=draw)
        ids[: self.length // 2 : 2] = answer
        ids[self.length // 2 :] = QUESTION
        labels = torch.full_like(ids, -100)
        labels[self.length // 2 + 1 :] = answer
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(self.length)}


class PrintLoss(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            print(f"step {state.global_step}: loss {float(logs['loss']):.3f}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One sequence over several ranks, streamed.")
    parser.add_argument(
        "--model", help="checkpoint folder or hub id; a small model from scratch if left out"
    )
    parser.add_argument(
        "--seq-len", type=int, default=512, help="of the whole sequence; ranks share it"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        help="sequences at a time; 8 from scratch, 1 for --model, if left out",
    )
    parser.add_argument("--chunk-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--learning-rate", type=float, help="1e-2 from scratch, 1e-5 for --model, if left out"
    )
    parser.add_argument("--output", default="runs/sequence_parallel")
    return parser.parse_args()


def build_model(name: str | None) -> PreTrainedModel:
    torch.manual_seed(0)
    if name:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = Qwen3Config(
        vocab_size=32,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.05,
        **sizes,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    args = parse_args()
    batch_size = args.batch_size or (1 if args.model else 8)
    deepspeed.init_distributed()
    split = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=int(os.environ["WORLD_SIZE"]),
        sp_handler=DeepSpeedSequenceParallelConfig(
            sp_attn_implementation="sdpa", sp_seq_length_is_variable=True
        ),
    )
    settings = TrainingArguments(
        args.output, max_steps=args.steps, learning_rate=args.learning_rate or (1e-5 if args.model else 1e-2),
        per_device_train_batch_size=batch_size, parallelism_config=split, deepspeed=str(CONFIG), logging_steps=1,
        report_to=[], save_strategy="no", lr_scheduler_type="constant", disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
    )  # fmt: skip
    model = streambp.patch(
        build_model(args.model), streambp.StreamConfig(chunk_size=args.chunk_size)
    )
    data = Questions(model.config.vocab_size, args.seq_len, count=args.steps * batch_size)
    trainer = Trainer(model, settings, train_dataset=data, callbacks=[PrintLoss()])
    trainer.train()
    if trainer.is_world_process_zero():
        print(streambp.describe(model))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
