"""Offloading when things go wrong: defined behaviour, nothing lost, the next step exact.

covers: offload/arena.py, offload/engines.py, offload/free_memory.py, offload/manager.py
"""

from __future__ import annotations

import gc
import itertools
import re

import pytest
import torch

import streambp
from streambp.offload import arena, engines, manager, manager_of
from streambp.offload.free_memory import host_limit
from tests.offload.runs import (
    assert_same,
    broken_activation,
    expected_host_bytes,
    forward,
    model_with,
    offloaded,
    run,
    step,
)
from tests.offload.trace_engine import TraceEngine
from tests.tiers import thinned


@pytest.mark.fast("forward")
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_exception_in_a_step(when):
    model = offloaded()
    expected = step(model)
    bytes_before = manager_of(model).host_bytes
    # Two layers of five chunks: the second layer's third, in forward or in backward.
    with (
        broken_activation(8 if when == "forward" else 13),
        pytest.raises(ValueError, match="injected"),
    ):
        step(model)
    gc.collect()
    assert_same(step(model), expected)
    assert manager_of(model).host_bytes <= 2 * bytes_before


@pytest.mark.full
def test_backward_twice_is_an_error():
    model = offloaded()
    loss = forward(model, 1)
    loss.backward(retain_graph=True)
    with pytest.raises(streambp.StreamBPError, match="second time"):
        loss.backward()
    assert_same(step(model), step(model_with(("attn_out", "kv"))))


def test_second_load_is_an_error():
    offloader = manager.OffloadManager(None, "keep", 1)
    store = offloader.open(0, torch.device("cpu"))
    store.save("x", 0, torch.randn(3))
    store.seal([[("x", 0)]])
    store.take("x", 0)
    with pytest.raises(streambp.StreamBPError, match="second time"):
        store.take("x", 0)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("share", "on_host_full"),
    thinned(
        itertools.product([0.0, 0.3, 0.8], ["keep", "recompute"]),
        lambda share, on_host_full: (
            on_host_full == ("recompute" if share == 0.3 else "keep") or share == 0.8
        ),
    ),
)
def test_host_budget_too_small(share, on_host_full):
    expected = step(model_with(("attn_out", "kv")))
    model = offloaded()
    budget = int(share * expected_host_bytes(model)) + 1
    model = offloaded(host_memory=budget, on_host_full=on_host_full)
    for _ in range(2):
        assert_same(step(model), expected)
    assert manager_of(model).host_bytes <= budget
    assert "did not fit" in str(streambp.describe(model))


@pytest.mark.full
def test_host_budget_too_small_raises_and_the_model_stays_usable():
    model = offloaded(host_memory=3000, on_host_full="raise")
    with pytest.raises(streambp.StreamBPError, match="Raise host_memory"):
        step(model)
    assert_same(step(offloaded(model=model)), step(model_with(("attn_out", "kv"))))


def test_host_limit_reads_what_the_machine_has(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 200 kB\nMemAvailable:      100 kB\n")
    assert host_limit(None, meminfo, tmp_path / "no groups") == int(0.9 * 102400)
    (tmp_path / "memory.max").write_text("50000\n")
    (tmp_path / "memory.current").write_text("10000\n")
    assert host_limit(30000, meminfo, tmp_path) == 30000
    with pytest.raises(streambp.StreamBPError, match="only"):
        host_limit(60000, meminfo, tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_limit(60000, meminfo, tmp_path) == 60000


def test_host_limit_of_a_job_in_its_own_control_group(tmp_path):
    """The tightest of the process's group and all above it; cache that the kernel can drop at once
    is free."""
    meminfo, membership = tmp_path / "meminfo", tmp_path / "membership"
    meminfo.write_text("MemAvailable: 1000 kB\n")
    membership.write_text("0::/slurm/job_1/step_0\n")
    step = tmp_path / "slurm" / "job_1" / "step_0"
    step.mkdir(parents=True)
    for group, limit in ((step, "max"), (step.parent, "50000"), (step.parent.parent, "90000")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("30000\n")
    assert host_limit(None, meminfo, tmp_path, membership=membership) == int(0.9 * 20000)
    (step.parent / "memory.stat").write_text("anon 15000\ninactive_file 15000\nactive_file 0\n")
    assert host_limit(None, meminfo, tmp_path, membership=membership) == int(0.9 * 35000)


@pytest.mark.parametrize("path", ["/slurm/job_1", "/elsewhere/of/the/host"])
def test_host_limit_of_control_groups_of_version_1(tmp_path, path):
    """In a container the root of the mount is the container's group, whatever path the host has for
    it."""
    meminfo, membership = tmp_path / "meminfo", tmp_path / "membership"
    meminfo.write_text("MemAvailable: 1000 kB\n")
    membership.write_text(
        f"12:cpu,cpuacct:/other\n4:memory:{path}\n1:name=systemd:/init.scope\n0::/system.slice\n"
    )
    job = tmp_path / "memory" / "slurm" / "job_1"
    job.mkdir(parents=True)
    for group, limit in (
        (job, 50000),
        (job.parent, 9223372036854771712),
        (job.parent.parent, 90000),
    ):
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (group / "memory.usage_in_bytes").write_text("30000\n")
        (group / "memory.stat").write_text("cache 9\ninactive_file 1\ntotal_inactive_file 5000\n")
    free = 25000 if path == "/slurm/job_1" else 65000
    assert host_limit(None, meminfo, tmp_path, membership=membership) == int(0.9 * free)


REFUSALS = (
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to..."
    ),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
)


@pytest.mark.fast(3)
@pytest.mark.parametrize("refusal", REFUSALS, ids=["allocator", "python", "pinning"])
@pytest.mark.parametrize("on_host_full", ["keep", "recompute", "raise"])
@pytest.mark.parametrize("granted", [0, 1, 3])
def test_host_memory_that_the_system_does_not_give(refusal, on_host_full, granted, monkeypatch):
    """It is as if the budget were used up: `on_host_full` rules, and where that raises it says what
    to do."""
    expected = step(model_with())
    model = offloaded(on_host_full=on_host_full)
    real, buffers_left = engines.Engine.host_buffer, [granted]

    def host_buffer(self, size):
        if not buffers_left[0]:
            raise refusal
        buffers_left[0] -= 1
        return real(self, size)

    monkeypatch.setattr(engines.Engine, "host_buffer", host_buffer)
    if on_host_full == "raise":
        with pytest.raises(
            streambp.StreamBPError, match=r"(?s)no memory left within.*Free memory, save less"
        ):
            step(model)
        gc.collect()
    else:
        assert_same(step(model), expected)
        assert manager_of(model).stats()["left"] > 0
    buffers_left[0] = -1  # as much as there is
    assert_same(step(model), expected)


def test_without_its_words_a_lack_of_memory_is_an_error(monkeypatch):
    """The mutant of the arena: what the allocator says is passed on."""
    monkeypatch.setattr(arena, "HOST_MEMORY_ERROR", re.compile("nothing"))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        test_host_memory_that_the_system_does_not_give(REFUSALS[0], "keep", 0, monkeypatch)


def test_other_errors_of_an_allocation_are_not_taken_for_a_lack_of_memory(monkeypatch):
    def host_buffer(self, size):
        raise RuntimeError("a device-side assert")

    monkeypatch.setattr(engines.Engine, "host_buffer", host_buffer)
    with pytest.raises(RuntimeError, match="device-side"):
        step(offloaded())


def failed_step(model):
    """A step whose backward raised, and what keeps its tensors alive: its loss and its
    exception."""
    loss = forward(model, 5)
    with broken_activation(1, TypeError), pytest.raises(TypeError) as error:
        loss.backward()
    return loss, error


@pytest.mark.fast("None")
@pytest.mark.parametrize("gpu_memory", [None, 1])
def test_abort_frees_what_a_failed_step_holds(gpu_memory):
    model = offloaded(gpu_memory=gpu_memory)
    expected = step(model)
    allocated = manager_of(model).host_bytes
    failure = failed_step(model)
    manager_of(model).abort()
    assert_same(step(model), expected)
    assert manager_of(model).host_bytes == allocated
    second_loss = forward(model, 1)
    manager_of(model).abort()
    with pytest.raises(streambp.StreamBPError, match="were freed"):
        second_loss.backward()
    assert_same(step(model), expected)
    assert manager_of(model).host_bytes == allocated
    del failure


@pytest.mark.full
def test_without_abort_a_failed_step_holds_its_host_memory_while_its_exception_lives():
    model = offloaded()
    expected = step(model)
    allocated = manager_of(model).host_bytes
    failure = failed_step(model)
    assert_same(step(model), expected)
    assert manager_of(model).host_bytes > allocated
    del failure
    gc.collect()
    assert_same(step(model), expected)


@pytest.mark.full
def test_abort_leaves_no_race_behind():
    model = offloaded(gpu_memory=1)
    manager_of(model)._given_engine = engine = TraceEngine()
    for _ in range(2):
        failure = failed_step(model)
        manager_of(model).abort()
        run(model, "F0 F1 B0 B1")
        del failure
    assert engine.checked > 1000
