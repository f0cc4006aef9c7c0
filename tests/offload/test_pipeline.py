"""Offloading inside torch.distributed.pipelining: two stages, gloo, CPU.

covers: offload/manager.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.seeds import seeded

SCHEDULES = ("Schedule1F1B", "ScheduleInterleaved1F1B")


def worker(rank, schedule_name, port):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining

    import streambp
    from tests.families import build

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
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
            streambp.patch(part, streambp.StreamConfig(chunk_size=5, saves=("attn_out", "kv"), **settings))
            part.backbone.embed_tokens.requires_grad_(False)
        made = [pipelining.PipelineStage(part, rank + 2 * k, stages, torch.device("cpu")) for k, part in enumerate(mine)]
        schedule_class = getattr(pipelining, schedule_name)
        schedule = schedule_class(made if per_rank > 1 else made[0], micro_batches, loss_fn=loss_function)
        generator = seeded(0)
        x, target = (torch.randn(8, length, width, generator=generator, dtype=torch.float64) for _ in range(2))
        arguments = ((x,) if rank == 0 else (), {"target": target} if rank == 1 else {})
        schedule.step(*arguments[0], **arguments[1])
        return [p.grad for part in mine for p in part.parameters() if p.requires_grad]

    plain = gradients(False)
    assert plain
    for moved in (gradients(True), gradients(True, gpu_memory=1)):
        assert all(a is not None and torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    print(f"rank {rank}: {len(plain)} gradients equal", flush=True)
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", [SCHEDULES[1], pytest.param(SCHEDULES[0], marks=pytest.mark.full)])
def test_gradients_are_bitwise_the_same(schedule):
    port = 29500 + (os.getpid() + SCHEDULES.index(schedule)) % 2000
    code = "import sys; from tests.offload.test_pipeline import worker; _, r, s, p = sys.argv; worker(int(r), s, int(p))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), schedule, str(port)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in ranks]
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert process.returncode == 0, output[-3000:]
        assert f"rank {rank}:" in output
