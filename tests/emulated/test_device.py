"""The emulated device itself: it does to a program what a GPU does.

covers: device.py, offload/engines.py, model/empty_batches.py
"""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch

import streambp
from streambp.cli.environment import environment
from streambp.device import (
    allocator_bytes,
    is_accelerator,
    memory_limit,
    names_other_device,
    reports_memory,
)
from streambp.errors import AttentionChoiceError
from streambp.model.empty_batches import EmptyBatchWarning
from streambp.offload import engines
from streambp.planner.measure_device import CPU_SIZES, measure_device
from tests.emulated import backend
from tests.families import build, make_batch
from tests.hangs import HANG
from tests.seeds import seed_torch

pytestmark = pytest.mark.emulated
LIMIT = 64 * 2**30


@pytest.fixture
def limited(device):
    """Sets the bytes that the device has."""
    torch.accelerator.empty_cache()
    yield lambda size: backend.extension().set_limit(0, size)
    backend.extension().set_limit(0, LIMIT)


def test_it_is_an_accelerator_that_tells_its_memory(device):
    assert torch.accelerator.current_accelerator() == device
    for index in range(backend.DEVICES):
        accelerator = torch.device(backend.NAME, index)
        assert is_accelerator(accelerator)
        assert reports_memory(accelerator)
        assert memory_limit(accelerator) == LIMIT
    assert isinstance(engines.make_engine(device), engines.AcceleratorEngine)


def test_devices_do_not_mix(device):
    x = torch.randn(3, device=device)
    for other_device in ("cpu", f"{backend.NAME}:1"):
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.randn(3, device=other_device)
    assert torch.equal((x + 1).cpu(), x.cpu() + 1)
    assert torch.equal(x.to(f"{backend.NAME}:1").cpu(), x.cpu())


def test_the_host_runs_ahead_of_kernels_and_a_side_stream_of_both(device):
    side = torch.Stream(device)
    x = torch.zeros(8, device=device)
    backend.extension().set_delays(0, 0, 0.0, 0.1)
    try:
        x.add_(1)
        event = torch.Event(device)
        event.record()
        assert not event.query()
        with side:
            early_copy = torch.zeros(8, device=device).copy_(x)
        side.synchronize()
        assert float(early_copy.cpu().sum()) == 0  # nothing waited for the kernel
        side.wait_event(event)
        with side:
            late_copy = torch.zeros(8, device=device).copy_(x)
        side.synchronize()
        assert float(late_copy.cpu().sum()) == 8
    finally:
        backend.extension().set_delays(0, 0, 0.0, 0.0)


def test_a_thread_may_wait_while_another_goes_on(device):
    """What another thread puts just after the last task of those that are waited for needs nobody
    else to ask for it."""
    rounds, x = threading.Barrier(2, timeout=HANG), torch.zeros(8, device=device)

    def ask():
        for _ in range(200):
            rounds.wait()
            x.sum().item()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    for _ in range(200):
        rounds.wait()
        for _ in range(3):
            x.add_(1)
    asking.join(HANG)
    assert not asking.is_alive()
    assert float(x[0]) == 600


def test_a_tensor_is_elsewhere_where_torch_would_move_it(device):
    for index in range(backend.DEVICES):
        for current in range(backend.DEVICES):
            x = torch.zeros(2, device=f"{backend.NAME}:{index}")
            with backend.Device(current):
                for target in (
                    "cpu",
                    backend.NAME,
                    f"{backend.NAME}:0",
                    torch.device(backend.NAME, 1),
                    0,
                    1,
                    x,
                    x.cpu(),
                ):
                    assert names_other_device(x, [target, torch.float32, False]) == (
                        x.to(target).device != x.device
                    ), target


def test_pinned_memory_makes_copies_asynchronous(device):
    x = torch.randn(8, device=device)
    pinned = torch.zeros(8, pin_memory=True)
    assert pinned.is_pinned()
    backend.extension().set_delays(0, 0, 0.1, 0.0)
    try:
        pinned.copy_(x, non_blocking=True)
        assert float(pinned.abs().sum()) == 0
        torch.accelerator.synchronize()
        assert torch.equal(pinned, x.cpu())
    finally:
        backend.extension().set_delays(0, 0, 0.0, 0.0)


def test_memory_runs_out(device, limited):
    accelerator = torch.device(backend.NAME, 0)
    bytes_before = allocator_bytes(accelerator, "allocated")
    limited(allocator_bytes(accelerator, "reserved") + 2**20)
    x = torch.empty(2**20, dtype=torch.uint8, device=accelerator)
    assert allocator_bytes(accelerator, "allocated") - bytes_before == 2**20
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**20, dtype=torch.uint8, device=accelerator)
    del x
    assert allocator_bytes(accelerator, "allocated") == bytes_before
    torch.empty(2**20, dtype=torch.uint8, device=accelerator)


def test_a_number_of_allocations_from_now_one_fails(device):
    backend.extension().fail_after(0, 1)
    torch.empty(8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8, device=device)
    torch.empty(8, device=device)


def results(device):
    """Of operators whose outputs grow, whose shapes are in the data, that add where indices meet;
    and of one operator for other dimensions, layouts and dtypes, which the device must tell apart
    where it remembers shapes."""
    x = torch.linspace(-1, 1, 24, device=device).view(4, 6)  # [4, 6]
    index = torch.tensor([0, 2, 2, 1], device=device)
    out = torch.empty(0, device=device)
    torch.add(x, 1.0, out=out)
    return [
        torch.arange(5, device=device), torch.arange(5.0, device=device), out, x[index], x[x > 0], x.nonzero(), x.cumsum(0),
        torch.zeros(4, 6, device=device).index_add_(0, index, x), x.sort(descending=True)[0], torch.cat([x, x.flip(0)]),
        torch.zeros(4, 6, device=device).index_put_((index,), x, accumulate=True), x.masked_fill(x > 0, 2.0), x @ x.T,
        torch.nn.functional.pad(x, (1, 2)), x.sum(0), x.sum(1), x.T.sum(0), x.sum(0, keepdim=True), x.double().sum(0),
        x.sum(0, dtype=torch.float64), x + x.T.contiguous().T, *(torch.cat([x, x], dim) for dim in (0, 1)),
        x.resize_(5, 6)[:4],
    ]  # fmt: skip


def test_deterministic_algorithms_give_the_same(device):
    """torch fills what is new in a tensor that grows then."""
    expected = results(torch.device("cpu"))
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            actual = results(device)
        finally:
            torch.use_deterministic_algorithms(False)
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)


def test_random_numbers_are_the_devices_own(device):
    seed_torch(1)
    outer = torch.get_rng_state()
    first = torch.rand(4, device=device)
    assert torch.equal(torch.get_rng_state(), outer)
    seed_torch(1)
    assert torch.equal(torch.rand(4, device=device), first)


def test_what_runs_there_is_told(device):
    """By `streambp env` before a step, by `describe` after one: other makers' devices have streams
    and plain products."""
    device_facts = {part["device"]: part for part in environment()["devices"]}
    for index in range(backend.DEVICES):
        facts = device_facts[f"{backend.NAME}:{index}"]
        assert facts["name"] == "an emulated device"
        assert facts["memory"].startswith("64.0 GiB")
        assert facts["offload engine"] == "copies beside the compute"
        assert facts["attention in bfloat16"].startswith("math ")
    model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=8))
    model(**make_batch("plain"), use_cache=False).loss.backward()
    description = streambp.describe(model).attention
    assert (
        f"plain products, because FlashAttention cannot: it does not run on {backend.NAME},"
        in description
    )


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_what_cannot_run_there_is_refused_by_name(name, device):
    model = streambp.patch(
        build("qwen3", torch.bfloat16), streambp.StreamConfig(chunk_size=8, attention=name)
    )
    with pytest.raises(AttentionChoiceError, match=f"does not run on {backend.NAME}"):
        model(**make_batch("plain"), use_cache=False)


def test_accelerate_sees_it(device):
    from accelerate.state import PartialState

    assert PartialState().device == device


def test_its_rates_can_be_measured():
    rates = measure_device(backend.NAME, CPU_SIZES)
    assert rates.name == "an emulated device"
    assert min(rates.products, rates.forward, rates.backward, rates.bandwidth, rates.link) > 0


def test_host_memory_that_it_uses_is_pinned_once_and_refused_with_a_warning(device, monkeypatch):
    engine = engines.AcceleratorEngine(device)
    second_engine = engine.engine_for(device)
    assert second_engine.host_buffer(64).is_pinned()

    def refuse(*args, pin_memory=False, real=torch.empty, **kwargs):
        if pin_memory:
            raise RuntimeError("no more pages\nto lock")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.warns(UserWarning, match=r"could not be pinned \(no more pages\)"):
        assert not second_engine.host_buffer(64).is_pinned()
    assert not engine.pinned  # all engines of a model share the memory


def test_a_process_that_is_at_work_ends_quietly():
    """Its streams have tasks left and hold tensors when the interpreter ends."""
    program = """
from tests.emulated import backend
backend.register()
import torch
x = torch.randn(64, 64, device="emulated", requires_grad=True)
backend.extension().set_delays(0, 0, 0.0, 0.01)
for _ in range(20):
    y = (x @ x).sum()
    y.backward()
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_an_empty_batch_is_told_at_the_next_call(device):
    """The host does not wait for the device's answer in the call that asks."""
    warning = EmptyBatchWarning()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warning.check(torch.tensor(True, device=device))
        warning.check(torch.tensor(False, device=device))
    with pytest.warns(UserWarning, match="no labelled token"):
        warning.check(torch.tensor(True, device=device))
    assert warning.has_warned
    assert warning.unread is None
