"""Long sequences under DeepSpeed ZeRO-3; how they stream stands in the DeepSpeed config's "streambp" section.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/deepspeed_zero3/train.py     # two CPU ranks, a small model
    torchrun --nproc-per-node 8 examples/deepspeed_zero3/train.py --model Qwen/Qwen3-8B --seq-len 65536

The only difference from a plain DeepSpeed script is where `initialize` comes from.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from streambp.integrations.deepspeed import initialize

CONFIG = Path(__file__).with_name("ds_config.json")
VOCABULARY = 97


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ZeRO-3 with streamed layers.")
    parser.add_argument(
        "--model", help="checkpoint folder or hub id; a small model from scratch if left out"
    )
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def build_model(name: str | None) -> torch.nn.Module:
    torch.manual_seed(0)
    if name:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=16, **sizes)
    )


def make_batch(length: int, seed: int) -> torch.Tensor:
    """Tokens [1, length] by a rule: nine times in ten a token is followed by its fixed successor, else by any. A model
    that has learnt it has a loss of 0.77."""
    successor = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0)).tolist()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
    follows = (torch.rand(length, generator=generator) < 0.9).tolist()
    for t in range(1, length):
        if follows[t]:
            tokens[t] = successor[tokens[t - 1]]
    return torch.tensor([tokens])


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    rank = int(os.environ["RANK"])
    model = build_model(args.model).train()
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=str(CONFIG))
    for step in range(args.steps):
        input_ids = make_batch(args.seq_len, seed=1000 * step + rank).to(engine.device)
        loss = engine(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
