"""Long sequences under FSDP2: patch the model, then `fully_shard` whole decoder layers as ever.

torchrun --nproc-per-node 2 examples/fsdp2/train.py                                  # two CPU ranks, a small model
torchrun --nproc-per-node 8 examples/fsdp2/train.py --model Qwen/Qwen3-8B --seq-len 65536
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import streambp

VOCABULARY = 97


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="FSDP2 with streamed layers.")
    parser.add_argument(
        "--model", help="checkpoint folder or hub id; a small model from scratch if left out"
    )
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
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
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    model = build_model(args.model).to(device).train()
    streambp.patch(model, streambp.StreamConfig(chunk_size=args.chunk_size, saves=("attn_out",)))
    for layer in model.get_decoder().layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if args.model else 3e-3)
    for step in range(args.steps):
        input_ids = make_batch(args.seq_len, seed=1000 * step + dist.get_rank()).to(device)
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
