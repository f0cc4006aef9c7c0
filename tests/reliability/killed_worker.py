"""Training on some ranks that may kill itself, and goes on from its last checkpoint.

python -m tests.reliability.killed_worker RANK PORT '{"folder": ..., "ranks": 2, "until": 4, "kill": [1, 2, "backward"]}'

Rank r of n trains on rows r, r + n, .. of each step's four, in float64 under DDP, so that one rank
and two see the same gradient. kill: rank, step and phase at which that rank ends by signal 9.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import streambp
from tests.families import LENGTH, build
from tests.seeds import seeded

ROWS = 4
COLLECTIVE_TIMEOUT_SECONDS = (
    60  # after which a rank gives up a collective that another one does not come to
)


def checkpoint(folder):
    return Path(folder) / "checkpoint.pt"


def main():
    rank, port, case = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    ranks, limit = case["ranks"], datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=limit)
    inner = build("qwen3", torch.float64)
    model = DistributedDataParallel(inner)
    streambp.patch(model, streambp.StreamConfig(chunk_size=5, saves=("kv",)))
    optimizer = torch.optim.Adam(inner.parameters(), lr=1e-3)
    start = 0
    if checkpoint(case["folder"]).exists():
        saved = torch.load(checkpoint(case["folder"]), weights_only=True)
        inner.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    kill = case.get("kill") or [None, None, None]
    position = [start, ""]

    def dies(phase):
        if [rank, position[0], phase] == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    inner.model.layers[1].register_forward_pre_hook(lambda *_: dies("forward"))
    inner.model.layers[0].mlp.up_proj.weight.register_hook(lambda _: dies("backward"))
    optimizer.register_step_pre_hook(lambda *_: dies("optimizer"))
    for step in range(start, case["until"]):
        position[0] = step
        ids = torch.randint(1, 50, (ROWS, LENGTH), generator=seeded(step))[rank::ranks]  # [B, T]
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        if rank == 0:
            parts = {
                "model": inner.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            torch.save(parts, checkpoint(case["folder"]).with_suffix(".new"))
            checkpoint(case["folder"]).with_suffix(".new").replace(checkpoint(case["folder"]))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
