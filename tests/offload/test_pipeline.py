"""Offloading inside torch.distributed.pipelining: two stages, gloo, CPU.

covers: offload/manager.py
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import streambp
from tests.distributed.ranks import launch
from tests.families import build
from tests.hangs import HANG
from tests.seeds import seeded

SCHEDULES = ("Schedule1F1B", "ScheduleInterleaved1F1B")


def main():
    """One rank's: `RANK PORT SCHEDULE`."""
    rank, port, schedule_name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    per_rank = 2 if "Interleaved" in schedule_name else 1
    stages, micro_batches, width, length = 2 * per_rank, 4, 32, 23

    def loss_function(output, target):
        return (output - target).square().mean()

    class Part(nn.Module):
        """A backbone of its own as one stage: hidden states in, hidden states out."""

        def __init__(self, index):
            super().__init__()
            self.backbone = build("qwen3", torch.float64, seed=index).model

        def forward(self, x):
            return self.backbone(inputs_embeds=x, use_cache=False).last_hidden_state

    def gradients(offload, gpu_memory=None):
        mine = [Part(rank + 2 * k).train() for k in range(per_rank)]
        for part in mine:
            settings = {"offload": "cpu", "gpu_memory": gpu_memory} if offload else {}
            streambp.patch(
                part, streambp.StreamConfig(chunk_size=5, saves=("attn_out", "kv"), **settings)
            )
            part.backbone.embed_tokens.requires_grad_(False)
        pipeline_stages = [
            pipelining.PipelineStage(part, rank + 2 * k, stages, torch.device("cpu"))
            for k, part in enumerate(mine)
        ]
        schedule_class = getattr(pipelining, schedule_name)
        schedule = schedule_class(
            pipeline_stages if per_rank > 1 else pipeline_stages[0],
            micro_batches,
            loss_fn=loss_function,
        )
        generator = seeded(0)
        x, target = (
            torch.randn(8, length, width, generator=generator, dtype=torch.float64)
            for _ in range(2)
        )
        arguments = ((x,) if rank == 0 else (), {"target": target} if rank == 1 else {})
        schedule.step(*arguments[0], **arguments[1])
        return [p.grad for part in mine for p in part.parameters() if p.requires_grad]

    plain = gradients(False)
    assert plain
    for streamed in (gradients(True), gradients(True, gpu_memory=1)):
        assert all(
            a is not None and torch.equal(a, b) for a, b in zip(plain, streamed, strict=True)
        )
    print(f"rank {rank}: {len(plain)} gradients equal", flush=True)
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize(
    "schedule", [SCHEDULES[1], pytest.param(SCHEDULES[0], marks=pytest.mark.full)]
)
def test_gradients_are_bitwise_the_same(schedule):
    outputs, codes = launch("tests.offload.test_pipeline", schedule, seconds=HANG)
    for rank, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        assert code == 0, output[-3000:]
        assert f"rank {rank}:" in output
