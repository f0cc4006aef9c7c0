"""Many steps, then nothing: threads, files and tensors are as before, and memory does not grow from
step to step.

covers: offload/arena.py, offload/manager.py, model/patching.py
"""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest
import torch

import streambp
from tests.families import build, make_batch
from tests.offload.runs import step
from tests.reliability.test_interrupted_steps import SETTINGS

WARM_UP_STEPS = 10  # steps after which nothing more is learned


def tensors():
    gc.collect()
    return sum(isinstance(candidate, torch.Tensor) for candidate in gc.get_objects())


def handles():
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


@pytest.mark.full
@pytest.mark.parametrize("steps", [200])
@pytest.mark.parametrize("setting", ["plain", "auto", "offload", "tiles"])
def test_many_steps_leave_nothing_behind(setting, steps, record_property):
    # what a process loads once
    step(streambp.unpatch(streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=5))))
    counts_before = tensors(), threading.active_count(), handles()
    config = streambp.StreamConfig(**{"chunk_size": 5, **SETTINGS[setting]})
    model = streambp.patch(build("qwen3"), config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    alive = []
    for number in range(steps):
        optimizer.zero_grad(set_to_none=True)
        model(**make_batch("plain", seed=number), use_cache=False).loss.backward()
        optimizer.step()
        if number in (WARM_UP_STEPS, steps - 1):
            alive.append(tensors())
    assert alive[0] == alive[1]
    streambp.unpatch(model)
    del model, optimizer, config
    assert (tensors(), threading.active_count(), handles()) == counts_before
    record_property("cases", 1)
