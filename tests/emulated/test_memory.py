"""Steps of the default that run out of memory: each allocation in turn fails, and the device's limit is lowered.

covers: head/recipe.py, layer/oom.py, admission/entry.py
"""

from __future__ import annotations

import gc
import time
import traceback
from pathlib import Path

import pytest
import torch

import streambp
from streambp.admission import long_trial, probe, trials
from streambp.device import counted_bytes
from streambp.errors import DeviceMemoryError
from streambp.model import unpatched
from streambp.offload.fitting import AsUnpatched, Chosen
from tests.emulated import backend
from tests.families import build, make_batch
from tests.tiers import thinned

pytestmark = pytest.mark.emulated
WAYS = {
    "chunks": {"chunk_size": 8},
    "graph": {"chunk_size": 4096, "unpatched_runs": False},
    "unpatched": {"chunk_size": 4096},
}
LIMIT = 64 * 2**30
PACKAGE = Path(streambp.__file__).parent


def here():
    return torch.device(backend.NAME, 0)


class Steps:
    """A patched model that has chosen what to save, and its steps."""

    def __init__(self, way, device):
        self.batch = make_batch("plain")
        self.model = streambp.patch(build("qwen3", device="cpu"), streambp.StreamConfig(**WAYS[way])).to(device)
        self.before_backward = None
        for _ in range(4):
            first = self()
        latest = self.chooser.latest
        assert isinstance(latest, AsUnpatched if way == "unpatched" else Chosen), latest
        self.expected = [first]
        if way == "unpatched":  # where memory is short it is streamed, and rounded otherwise
            self.model._streambp.state.unpatched.most = 0
            self.expected.append(self())
            self.forget()
            self()
        torch.accelerator.reset_peak_memory_stats(here())
        before = self.count()
        self()
        self.allocations = self.count() - before
        self.peak = counted_bytes(here(), "peak")

    def __call__(self):
        self.model.zero_grad(set_to_none=True)
        loss = self.model(**self.batch, use_cache=False).loss
        if self.before_backward is not None:
            self.before_backward()
        loss.backward()
        torch.accelerator.synchronize()
        return {"loss": loss.detach().cpu(), **{name: p.grad.cpu() for name, p in self.model.named_parameters()}}

    @property
    def chooser(self):
        return next(w.site.chooser for w in self.model._streambp.state.wrappers if hasattr(w, "site"))

    @staticmethod
    def count():
        return torch.accelerator.memory_stats(here())["allocation.all.allocated"]

    def allocated(self):
        """Bytes, without gradients, and without a collection."""
        self.model.zero_grad(set_to_none=True)
        torch.accelerator.synchronize()
        return counted_bytes(here(), "allocated")

    def forget(self):
        """What running out of memory has taught."""
        self.chooser.margins.clear()
        if self.model._streambp.state.unpatched is not None:
            self.model._streambp.state.unpatched.most = float("inf")


def same(found, expected):
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module", params=WAYS)
def way(request, device):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "unpatched":
            patch.setattr(unpatched, "SHARE", 0.25)
        yield request.param, Steps(request.param, device)


@pytest.fixture(autouse=True)
def _as_unpatched(way, monkeypatch):
    """The tests' conftest.py has every step streamed."""
    if way[0] == "unpatched":
        monkeypatch.setattr(unpatched, "SHARE", 0.25)


@pytest.fixture(autouse=True)
def tried(monkeypatch):
    """Counts what layers are tried on."""
    seen = []
    for module, name in ((probe, "_why_not"), (trials, "_writes"), (long_trial, "why_not_at_length")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, name=name: seen.append(name) or real(*args))
    return seen


def checked(steps, error):
    """Asserts of an error that it carries advice, or comes from torch's own backward around streamed layers: nobody else
    is called there."""
    frames = {Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
    assert isinstance(error, DeviceMemoryError) or not any(PACKAGE in file.parents for file in frames), repr(error)
    if isinstance(error, DeviceMemoryError):
        assert "StreamConfig" in str(error)


def started(way):
    """The steps, at the beginning of a test."""
    gc.collect()
    way[1].start = way[1].allocated()
    return way[1]


def run(steps):
    """A step: whether it ended; then it is bit for bit one that has memory."""
    try:
        found = steps()
    except torch.OutOfMemoryError as error:
        checked(steps, error)
        return False
    assert any(same(found, expected) for expected in steps.expected)
    return True


def finish(steps, tried):
    """After what went wrong: memory is as before, without a collection, and the next step is right and tries nothing."""
    deadline = time.monotonic() + 5
    while (left := steps.allocated() - steps.start) and time.monotonic() < deadline:
        time.sleep(0.001)  # autograd's thread lets go of what failed once it gets Python's lock
    assert left == 0
    tried.clear()
    assert run(steps)
    assert tried == []
    steps.forget()


@pytest.mark.parametrize("stride", thinned((71, 1), lambda stride: stride > 1))
def test_each_allocation_in_turn_fails(way, stride, tried):
    steps = started(way)
    ended = failed = 0
    gc.disable()
    try:
        for number in range(stride // 2, steps.allocations, stride):
            backend.extension().fail_after(0, number)
            if run(steps):
                ended += 1
            else:
                failed += 1
            backend.extension().fail_after(0, -1)
            finish(steps, tried)
    finally:
        backend.extension().fail_after(0, -1)
        gc.enable()
    print(f"{way[0]}: {ended} steps ended, {failed} raised")
    assert ended > failed / 2


@pytest.mark.parametrize("when", ["between steps", "before backward", "in a chunk"])
@pytest.mark.parametrize("share", thinned((0.97, 0.9, 0.8, 0.6), lambda share: share in (0.9, 0.6)))
def test_a_limit_is_lowered(way, share, when, tried):
    steps = started(way)
    hooks = []

    def lower(*_):
        backend.extension().set_limit(0, int(share * steps.peak))

    torch.accelerator.empty_cache()
    if when == "in a chunk":
        hooks.append(steps.model.model.layers[1].mlp.register_forward_hook(lower))
    try:
        if when == "between steps":
            lower()
        steps.before_backward = lower if when == "before backward" else None
        for _ in range(2):
            run(steps)
    finally:
        steps.before_backward = None
        for hook in hooks:
            hook.remove()
        backend.extension().set_limit(0, LIMIT)
    finish(steps, tried)
