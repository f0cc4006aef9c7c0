"""One sequence over several ranks by torch's context parallelism: each rank gathers keys and values, and streams its shard.

    torchrun --nproc-per-node 2 examples/context_parallel/train.py                              # CPU ranks, a small model
    torchrun --nproc-per-node 8 examples/context_parallel/train.py --model Qwen/Qwen3-8B --seq-len 1048576

Parameters are sharded over the same ranks with FSDP2. On GPUs, HF Trainer and TRL's SFTTrainer do the same with
`ParallelismConfig(cp_size=...)`; this loop needs neither them nor accelerate, which wants a GPU for FSDP2. The task shows
that ranks see each other's tokens: half of the sequence names a token again and again among others, the other half asks.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import streambp

QUESTION = 1  # a token that asks


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="One sequence over several ranks, keys and values gathered."
    )
    parser.add_argument(
        "--model", help="checkpoint folder or hub id; a small model from scratch if left out"
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        default=512,
        help="of the whole sequence; twice the ranks must divide it",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        help="sequences at a time; 8 from scratch, 1 for --model, if left out",
    )
    parser.add_argument(
        "--chunk-size", type=int, default=64, help="tokens of a rank's shard at a time"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--learning-rate", type=float, help="1e-2 from scratch, 1e-5 for --model, if left out"
    )
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


def whole_batch(
    vocabulary: int, rows: int, length: int, step: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """[rows, length] each, the same on every rank. Labels are shifted before the cut: a shard's last one is elsewhere."""
    draw = torch.Generator().manual_seed(step)
    answer = torch.randint(2, min(vocabulary, 32), (rows, 1), generator=draw)
    ids = torch.randint(2, min(vocabulary, 32), (rows, length), generator=draw)
    ids[:, : length // 2 : 2] = answer
    ids[:, length // 2 :] = QUESTION
    labels = torch.full_like(ids, -100)
    labels[:, length // 2 : -1] = answer
    positions = torch.arange(length).repeat(rows, 1)
    batch = {
        "input_ids": ids,
        "labels": labels,
        "shift_labels": labels.clone(),
        "position_ids": positions,
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def main() -> None:
    args = parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = build_model(args.model).to(device).train()
    streambp.patch(model, streambp.StreamConfig(chunk_size=args.chunk_size, saves=("attn_out",)))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate or (1e-5 if args.model else 1e-2)
    )
    rows = args.batch_size or (1 if args.model else 8)
    for step in range(args.steps):
        batch = whole_batch(model.config.vocab_size, rows, args.seq_len, step, device)
        items = (batch["labels"] != -100).sum()
        with context_parallel(mesh, buffers=list(batch.values()), buffer_seq_dims=[1] * len(batch)):
            loss = model(**batch, num_items_in_batch=items, use_cache=False).loss
            (
                loss * mesh.size()
            ).backward()  # FSDP2 takes the mean over ranks, of whom each has a part of the sum
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if dist.get_rank() == 0:
        print(streambp.describe(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
