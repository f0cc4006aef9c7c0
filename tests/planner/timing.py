"""How long an estimate and a plan of an 8B model take: `python -m tests.planner.timing`."""

from __future__ import annotations

import time

from streambp.planner import Setting, estimate, plan
from tests.planner.test_estimates import QWEN3_8B


def timed(name, run):
    wall, cpu_start = time.perf_counter(), time.process_time()
    run()
    print(
        f"{name}: {time.process_time() - cpu_start:.1f} s of one core, "
        f"{time.perf_counter() - wall:.1f} s of wall time"
    )


if __name__ == "__main__":
    timed("estimate", lambda: estimate(QWEN3_8B, 65536))
    setting = Setting(optimizer_on_host=True)
    timed(
        "plan",
        lambda: plan(QWEN3_8B, 2**18, gpu_memory="80GiB", host_memory="320GiB", setting=setting),
    )
