"""Pipeline parallelism: each rank has some of a model's decoder layers, and streams them for each micro-batch.

    torchrun --nproc-per-node 2 examples/pipeline_parallel/train.py                              # CPU ranks, a small model
    torchrun --nproc-per-node 8 examples/pipeline_parallel/train.py --model Qwen/Qwen3-8B --seq-len 65536

A stage is the transformers model itself with fewer layers: its own forward makes masks and positions, the first stage has
the embedding, and the last one has norm and head and returns the loss. So `streambp.patch` takes a stage as any model.
torch's schedules (GPipe, 1F1B) send hidden states forward and their gradients back.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import streambp

VOCABULARY = 97
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pipeline stages of streamed layers.")
    parser.add_argument(
        "--model", help="checkpoint folder or hub id; a small model from scratch if left out"
    )
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--chunk-size", type=int, default=128)
    parser.add_argument(
        "--microbatches",
        type=int,
        default=4,
        help="sequences of a step, one after the other in the pipeline",
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def build_model(name: str | None) -> PreTrainedModel:
    torch.manual_seed(0)
    if name:
        # on the host; a rank moves its stage
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=16, **sizes)
    )


class Stage(nn.Module):
    """The part of a model that one of several ranks has; the rest of the model is dropped.

    Models whose layers use other layers' keys and values, or are told apart by their number, cannot be cut in this way.
    """

    def __init__(self, model: PreTrainedModel, rank: int, ranks: int) -> None:
        super().__init__()
        self.first, self.last = rank == 0, rank == ranks - 1
        decoder, config = model.get_decoder(), model.config.get_text_config()
        tied = config.tie_word_embeddings and ranks > 1
        self.ends = dist.new_group([0, ranks - 1]) if tied else None
        layers = len(decoder.layers)
        mine = slice(layers * rank // ranks, layers * (rank + 1) // ranks)
        decoder.layers = decoder.layers[mine]
        config.num_hidden_layers = len(decoder.layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[mine]
        if not self.first:
            decoder.embed_tokens = None
        if not self.last:
            decoder.norm = nn.Identity()
        self.model = model if self.last else decoder

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """x: token ids [B, T] in the first stage, hidden states [B, T, h] in others. Returns hidden states [B, T, h], and
        in the last stage, which is given labels, a part of the loss [1]."""
        output = self.model(
            **{"input_ids" if self.first else "inputs_embeds": x}, use_cache=False, **kwargs
        )
        return output.loss[None] if self.last else output.last_hidden_state

    def sum_tied(self) -> None:
        """Before an optimizer step: where embedding and head are one tensor, two stages have a copy each."""
        if self.ends is not None and (self.first or self.last):
            weights = (
                self.model.get_input_embeddings()
                if self.first
                else self.model.get_output_embeddings()
            )
            dist.all_reduce(weights.weight.grad, group=self.ends)


def pipeline(
    stage: Stage, device: torch.device, microbatches: int, name: str = "1f1b"
) -> Schedule1F1B | ScheduleGPipe:
    """The schedule that runs this rank's stage. The loss is the sum of micro-batches' parts, so nothing is rescaled."""
    pipeline_stage = PipelineStage(stage, dist.get_rank(), dist.get_world_size(), device)
    return SCHEDULES[name](
        pipeline_stage, microbatches, loss_fn=lambda part, target: part.sum(), scale_grads=False
    )


def step(
    schedule: Schedule1F1B | ScheduleGPipe, stage: Stage, batch: dict[str, Tensor]
) -> Tensor | None:
    """Forward and backward of a batch [B, T], the same on every rank; the loss, on the last rank.

    A mask or position ids go to every stage: each makes its attention masks from them.
    """
    kwargs: dict[str, Any] = {
        name: tensor for name, tensor in batch.items() if name not in ("input_ids", "labels")
    }
    losses: list[Tensor] = []
    if stage.last:
        # The mean over the labels of all micro-batches, however many each has.
        kwargs |= {
            "labels": batch["labels"],
            "num_items_in_batch": int((batch["labels"][:, 1:] != -100).sum()),
        }
        schedule.step(
            *([batch["input_ids"]] if stage.first else []),
            target=batch["labels"],
            losses=losses,
            **kwargs,
        )
        return torch.stack([part.detach().sum() for part in losses]).sum()
    schedule.step(*([batch["input_ids"]] if stage.first else []), **kwargs)
    return None


def make_batch(rows: int, length: int, seed: int) -> Tensor:
    """Tokens [rows, length] by a rule: nine times in ten a token is followed by its fixed successor, else by any. A model
    that has learnt it has a loss of 0.77."""
    successor = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
    follows = torch.rand(rows, length, generator=generator) < 0.9
    for t in range(1, length):
        tokens[:, t] = torch.where(follows[:, t], successor[tokens[:, t - 1]], tokens[:, t])
    return tokens


def main() -> None:
    args = parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    model = build_model(args.model)
    stage = Stage(model, dist.get_rank(), dist.get_world_size()).to(device).train()
    streambp.patch(stage, streambp.StreamConfig(chunk_size=args.chunk_size, saves=("attn_out",)))
    schedule = pipeline(stage, device, args.microbatches, args.schedule)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-5 if args.model else 3e-3)
    for number in range(args.steps):
        ids = make_batch(args.microbatches, args.seq_len, seed=number).to(device)
        loss = step(schedule, stage, {"input_ids": ids, "labels": ids})
        stage.sum_tied()
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None:
            print(f"step {number + 1}: loss {loss.item():.3f}", flush=True)
    print(f"rank {dist.get_rank()}:\n{streambp.describe(stage)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
