from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import streambp
from streambp.attention import prefix
from streambp.config import StreamConfig
from streambp.layer import adapted_linear
from streambp.model import unpatched
from streambp.planner import stored_counts
from tests import device as tested
from tests import device_thread, seeds, tiers
from tests.oracle import lift_float32_casts

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0]))
ROWS = os.environ.get("STREAMBP_TEST_ROWS", "auto")
SHARES_PREFIXES = ROWS != "auto"
if SHARES_PREFIXES:  # in this process, wherever a test does not say otherwise
    names = [field.name for field in dataclasses.fields(StreamConfig)]
    pairs = zip(names, StreamConfig.__init__.__defaults__ or (), strict=True)
    StreamConfig.__init__.__defaults__ = tuple(
        ROWS if name == "rows" else value for name, value in pairs
    )


def pytest_report_header() -> str:
    """What a failure depends on beside the code."""
    return (
        f"STREAMBP_TEST_SEED={seeds.BASE}, STREAMBP_TEST_ROWS={ROWS}, "
        f"STREAMBP_TEST_DEVICE_THREAD={int(USES_DEVICE_THREAD)}, "
        f"STREAMBP_TEST_DEVICE={tested.DEVICE}, "
        f"ATEN_CPU_CAPABILITY={torch.backends.cpu.get_cpu_capability().lower()}, "
        f"OMP_NUM_THREADS={torch.get_num_threads()}"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under -n each worker starts with its part of the files, and takes over from others at the
    end.

    xdist's own way deals tests out by turns: then what a file shares (oracles, trained models,
    imports) is made in each.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks `full` what `@pytest.mark.fast(...)` leaves out, and skips what needs a device that is
    not there."""
    tiers.leave_out(items)
    if not tested.EMULATED:
        for item in items:
            marker = item.get_closest_marker("emulated")
            if marker and not (marker.kwargs.get("any") and tested.DEVICE.type != "cpu"):
                item.add_marker(
                    pytest.mark.skip(reason=tested.WHY_NOT or "needs STREAMBP_TEST_DEVICE=emulated")
                )
    if not torch.cuda.is_available():
        for item in items:
            marker = item.get_closest_marker("gpu")
            if marker and not (marker.kwargs.get("any") and tested.ACCELERATOR.type != "cpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What imports left, half a million objects, is not looked at again by full collections: each
    took 0.3 s and more."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Extensions complain at exit of objects of theirs that are still there."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    seeds.seed_torch()


@pytest.fixture(autouse=SHARES_PREFIXES)
def _sees_padding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests with this mark have rows where others have packed ones: they ask for what packed rows
    do not hand out."""
    real = streambp.patch

    def patch(model: Any, config: StreamConfig | None = None, **kwargs: Any) -> Any:
        return real(model, dataclasses.replace(config or StreamConfig(), rows="as_given"), **kwargs)

    if request.node.get_closest_marker("sees_padding"):
        monkeypatch.setattr(streambp, "patch", patch)


@pytest.fixture(autouse=True)
def _streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps after the first stream as well, where they would run as unpatched. [Note: micro-batches
    as unpatched]"""
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", 0.0)


@pytest.fixture(autouse=True)
def _counted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's first step counts itself, whatever earlier tests and programs have stored."""
    monkeypatch.setattr(stored_counts, "folder", lambda: Path(os.devnull) / "plans")


USES_DEVICE_THREAD = os.environ.get("STREAMBP_TEST_DEVICE_THREAD", "0") == "1"


@pytest.fixture(autouse=USES_DEVICE_THREAD)
def backward_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Backward runs in another thread than forward, as on a GPU; the number of the thread, once for
    each call."""
    return device_thread.use(monkeypatch)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where this run of the tests puts its models: STREAMBP_TEST_DEVICE."""
    return tested.DEVICE


@pytest.fixture
def float64_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 with transformers' inner float32 casts lifted."""
    lift_float32_casts(monkeypatch)


@pytest.fixture
def float64_everywhere(float64_oracle: None) -> Iterator[None]:
    """The oracle, with models and inputs made in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def attended_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the query chunks that streamed attention saw."""
    lengths: list[int] = []
    real = prefix.PrefixChunkAttention.attend
    monkeypatch.setattr(
        prefix.PrefixChunkAttention,
        "attend",
        lambda self, call: lengths.append(call.q.shape[2]) or real(self, call),
    )
    return lengths


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of x that the operation of adapted Linears was called with."""
    shapes: list[torch.Size] = []
    real = adapted_linear._forward

    def forward(*args: Any) -> Any:
        shapes.append(args[2].shape)
        return real(*args)

    monkeypatch.setattr(adapted_linear, "_forward", forward)
    return shapes
