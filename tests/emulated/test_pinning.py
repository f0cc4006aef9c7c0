"""Host memory that cannot be locked, as a CUDA device asks for it: copies are synchronous then, and
nothing else changes.

covers: offload/engines.py, device.py
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from streambp.device import forget_error
from streambp.offload import engines, manager_of
from tests.emulated import backend
from tests.offload.runs import BOTH_SAVES, assert_same, model_with, offloaded, step

pytestmark = pytest.mark.emulated


@pytest.fixture
def asynchronous(device, monkeypatch):
    """Whether the copies of the engine might be asynchronous. Its host memory is asked of CUDA's
    runtime."""
    flags, real, buffer = [], Tensor.copy_, engines.AcceleratorEngine.host_buffer

    def copy(self, source, non_blocking=None):
        if non_blocking is None:
            return real(self, source)
        flags.append(non_blocking)
        return real(self, source, non_blocking)

    def host_buffer(self, size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "device", torch.device("cuda"))
            return buffer(self, size)

    monkeypatch.setattr(Tensor, "copy_", copy)
    monkeypatch.setattr(engines.AcceleratorEngine, "host_buffer", host_buffer)
    monkeypatch.setattr(engines, "forget_error", lambda _: forget_error(device))
    return flags


class Runtime:
    """CUDA's runtime, which answers with this error code."""

    def __init__(self, error):
        self.cudaHostRegister = lambda pointer, size, flags: error
        self.cudaHostUnregister = lambda pointer: None


@pytest.mark.parametrize("error", [0, 2])
def test_memory_that_cannot_be_pinned_is_copied_synchronously_with_one_warning(
    error, asynchronous, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(error))
    expected = step(model_with(BOTH_SAVES))
    model = offloaded(gpu_memory=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_same(step(model), expected)
    assert len([w for w in caught if "could not be pinned" in str(w.message)]) == bool(error)
    assert set(asynchronous) == {not error}
    assert manager_of(model).stats()["gb_per_s_out"] > 0


def test_a_copy_that_compute_waits_for_is_counted(device):
    model = offloaded(gpu_memory=1)
    step(model)
    (engine,) = manager_of(model).transfers.engines.values()
    stall_before = manager_of(model).stats()["stall_back"]
    backend.extension().set_delays(0, engine._streams[engines.FROM_HOST_QUEUE].stream_id, 0.02, 0.0)
    try:
        step(model)
    finally:
        backend.extension().set_delays(
            0, engine._streams[engines.FROM_HOST_QUEUE].stream_id, 0.0, 0.0
        )
    assert manager_of(model).stats()["stall_back"] > stall_before


class FakeRuntime:
    """CUDA's runtime where nothing can be pinned: the error of a failed call is kept until a launch
    reports it."""

    def __init__(self):
        self.pending = 0
        self.calls = 0

    def cudaHostRegister(self, pointer, size, flags):
        self.calls += 1
        self.pending = 2
        return self.pending


class Launches(TorchDispatchMode):
    """Every operation that computes is a launch, after which torch asks for the pending error."""

    QUIET = (
        "empty",
        "view",
        "detach",
        "slice",
        "select",
        "as_strided",
        "expand",
        "transpose",
        "t.",
        "alias",
        "reshape",
    )

    def __init__(self, runtime):
        super().__init__()
        self.runtime = runtime

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.runtime.pending and not any(name in str(func) for name in self.QUIET):
            self.runtime.pending = 0
            raise RuntimeError(f"CUDA error: out of memory, reported by {func}")
        return func(*args, **(kwargs or {}))


@pytest.mark.full
def test_an_error_that_pinning_left_behind_does_not_reach_the_step(asynchronous, monkeypatch):
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    expected = step(model_with(BOTH_SAVES))
    model = offloaded(gpu_memory=1)
    with Launches(runtime):
        with pytest.warns(UserWarning, match="could not be pinned"):
            result = step(model)
        assert_same(result, expected)
        assert_same(step(model), expected)
    assert runtime.calls == 1  # what fails once is not tried again: all copies are synchronous
    assert set(asynchronous) == {False}
