"""Steps of the default that run out of memory: each allocation in turn fails, and the device's limit is lowered.

covers: head/recipe.py, layer/oom.py, admission/entry.py
"""

from __future__ import annotations

import collections
import gc
import time
import traceback
from pathlib import Path

import pytest
import torch

import streambp
from streambp.admission import long_trial, probe, trials
from streambp.device import DeviceMemoryError, counted_bytes
from streambp.model import unpatched
from streambp.offload.costs import AsUnpatched, Chosen
from tests.emulated import backend
from tests.families import build, make_batch
from tests.tiers import thinned

pytestmark = pytest.mark.emulated
WAYS = {
    "chunks": {"chunk_size": 8},
    "graph": {"chunk_size": 4096, "unpatched_runs": False},
    "unpatched": {"chunk_size": 4096},
}
LEAST_ENDED = {"chunks": 0.5, "graph": 0.5, "unpatched": 0.3}  # of steps in which one allocation fails
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


ENDED, ADVISED, BARE, WRONG = "ended bit for bit", "raised with advice", "torch's own backward raised", "wrong"


def outcome(steps):
    """Of a step. [Note: bare errors] Backward outside of streamed layers and of the head is torch's: of embeddings, of sums
    of gradients, and of all that a micro-batch as unpatched does. Nobody else is called there, so nobody can add advice to
    what it raises; the next micro-batch of so many tokens streams."""
    try:
        found = steps()
    except torch.OutOfMemoryError as error:
        if isinstance(error, DeviceMemoryError):
            return ADVISED if "StreamConfig" in str(error) else f"{WRONG}: no advice in {error}"
        frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        ours = [file for file in frames if PACKAGE in file.parents]
        return f"{WRONG}: {error!r} passed through {ours}" if ours else BARE
    return ENDED if any(same(found, expected) for expected in steps.expected) else f"{WRONG}: other gradients"


def started(way):
    """The steps, at the beginning of a test."""
    gc.collect()
    way[1].start = way[1].allocated()
    return way[1]


def after(steps, tried):
    """What a step that went wrong has left: bytes, without a collection; the next step's outcome, and what it tries."""
    deadline = time.monotonic() + 60
    while (left := steps.allocated() - steps.start) and time.monotonic() < deadline:
        time.sleep(0.001)  # autograd's thread lets go of what failed once it gets Python's lock
    tried.clear()
    found = left, outcome(steps), list(tried)
    steps.forget()
    return found


CLEAN = (0, ENDED, [])
PARTS = 3  # of a full run: each is a test of its own
STRIDES = [(35, 71), *((part, PARTS) for part in range(PARTS))]


@pytest.mark.parametrize(("first", "stride"), thinned(STRIDES, lambda first, stride: stride > PARTS))
def test_each_allocation_in_turn_fails(way, first, stride, tried):
    steps = started(way)
    found = collections.Counter()
    gc.disable()
    try:
        for number in range(first, steps.allocations, stride):
            backend.extension().fail_after(0, number)
            found[outcome(steps)] += 1
            backend.extension().fail_after(0, -1)
            assert after(steps, tried) == CLEAN, number
    finally:
        backend.extension().fail_after(0, -1)
        gc.enable()
    print(f"{way[0]}, allocations {first}, {first + stride}, ... of {steps.allocations}: {dict(found)}")
    assert found.keys() <= {ENDED, ADVISED, BARE}
    assert found[ENDED] >= LEAST_ENDED[way[0]] * found.total()


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
        found = [outcome(steps) for _ in range(2)]
    finally:
        steps.before_backward = None
        for hook in hooks:
            hook.remove()
        backend.extension().set_limit(0, backend.LIMIT)
    print(f"{way[0]}, {share} {when}: {found}")
    assert set(found) <= {ENDED, ADVISED, BARE}
    assert after(steps, tried) == CLEAN
