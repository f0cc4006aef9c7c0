"""Steps of the default that run out of memory: each allocation in turn fails, and the device's
limit is lowered.

covers: head/recipe.py, layer/oom.py, admission/entry.py, model/steps.py
"""

from __future__ import annotations

import collections
import functools
import gc
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch

import streambp
from streambp.admission import long_trial, probe, trials
from streambp.device import allocator_bytes
from streambp.errors import DeviceMemoryError
from streambp.model import unpatched
from tests.emulated import backend
from tests.families import build, make_batch
from tests.tiers import thinned

pytestmark = pytest.mark.emulated
# tokens: few for one allocation after the other, many where activations are to outweigh weights
FEW, MANY = (9, 96)
STEP_KINDS = {
    "chunks": {},
    "graph": {"chunk_size": 4096, "unpatched_runs": False},
    "unpatched": {"chunk_size": 4096},
}
STEP_CONFIGS = {
    "chunks": ("streamed", 2),
    "graph": ("kept its graph", 1),
    "unpatched": ("ran unpatched", 1),
}
# of steps in which one allocation fails
MIN_COMPLETED_SHARES = {"chunks": 0.5, "graph": 0.5, "unpatched": 0.3}
PACKAGE = Path(streambp.__file__).parent


def emulated_device():
    return torch.device(backend.NAME, 0)


class Steps:
    """A patched model that has chosen what to save, and its steps."""

    def __init__(self, way, length, device):
        self.way, self.batch = way, make_batch("plain", length=length, rows=1)
        config = streambp.StreamConfig(**{"chunk_size": length // 2 + 1, **STEP_KINDS[way]})
        self.model = streambp.patch(build("qwen3", device="cpu"), config).to(device)
        self.before_backward = None
        for _ in range(4):
            first = self()
        record = streambp.last_step(self.model)
        assert (record.way, record.chunks) == STEP_CONFIGS[way], record
        self.expected = [first]
        if way == "unpatched":  # where memory is short it is streamed, and rounded otherwise
            self.model._streambp.unpatched.max_tokens = 0
            self.expected.append(self())
            self.forget()
            self()
        count_before = self.count()
        self()
        self.allocations = self.count() - count_before

    def started(self):
        """Itself, at the beginning of a test."""
        gc.collect()
        torch.accelerator.reset_peak_memory_stats(emulated_device())
        self()
        self.peak, self.start = allocator_bytes(emulated_device(), "peak"), self.allocated()
        self.other_bytes = self.start - sum(p.nbytes for p in self.model.parameters())
        return self

    def __call__(self):
        self.model.zero_grad(set_to_none=True)
        loss = self.model(**self.batch, use_cache=False).loss
        if self.before_backward is not None:
            self.before_backward()
        loss.backward()
        torch.accelerator.synchronize()
        return {
            "loss": loss.detach().cpu(),
            **{name: p.grad.cpu() for name, p in self.model.named_parameters()},
        }

    @property
    def chooser(self):
        return next(
            w.layer_state.saves_policy
            for w in self.model._streambp.wrappers
            if hasattr(w, "layer_state")
        )

    @staticmethod
    def count():
        return torch.accelerator.memory_stats(emulated_device())["allocation.all.allocated"]

    def allocated(self):
        """Bytes, without gradients, and without a collection."""
        self.model.zero_grad(set_to_none=True)
        torch.accelerator.synchronize()
        return allocator_bytes(emulated_device(), "allocated")

    def forget(self):
        """What running out of memory has taught."""
        self.chooser.margins.clear()
        if self.model._streambp.unpatched is not None:
            self.model._streambp.unpatched.max_tokens = float("inf")


def are_equal(actual, expected):
    return all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def steps_of(device):
    """Steps, by way and length."""
    return functools.cache(functools.partial(Steps, device=device))


@pytest.fixture(params=STEP_KINDS)
def way(request, monkeypatch):
    if request.param == "unpatched":  # the tests' conftest.py has every step streamed
        monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", 0.25)
    return request.param


@pytest.fixture(autouse=True)
def trial_names(monkeypatch):
    """Counts what layers are tried on."""
    names = []
    for module, name in (
        (probe, "_why_not"),
        (trials, "_find_writes"),
        (long_trial, "why_not_at_length"),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, real=real, name=name: names.append(name) or real(*args)
        )
    return names


ENDED, ADVISED, WRONG = "ended bit for bit", "raised with advice", "wrong"
WARNED = "torch's own backward raised, beside a warning with advice"
EARLY_ERROR_TEXT = "torch raised before backward came to us: a gradient of the loss, one number"


def outcome(steps):
    """Return how a step ended. An error of torch outside of streambp's code comes with a warning
    (`model/steps.py`)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # a hook of a test has a warning of its own
        warnings.filterwarnings("always", ".* ran out of memory")
        try:
            result = steps()
        except torch.OutOfMemoryError as error:
            # The error itself would hold this frame, through those of its cause.
            ours, text, error_text = isinstance(error, DeviceMemoryError), str(error), repr(error)
            frames = traceback.extract_tb(error.__traceback__)
            through = [at for at in frames if PACKAGE in Path(at.filename).parents]
        else:
            right = any(are_equal(result, expected) for expected in steps.expected)
            return (
                f"{WRONG}: {[str(warning.message) for warning in caught]}"
                if caught or not right
                else ENDED
            )
        one_number = "Tried to allocate 4 bytes" in text and not through
        deadline = time.monotonic() + (1 if one_number else 60)
        while not (ours or caught) and time.monotonic() < deadline:
            # autograd's thread lets go of the callback once it gets Python's lock
            time.sleep(0.001)
    if one_number and not caught:
        return EARLY_ERROR_TEXT
    advice = [str(warning.message) for warning in caught] + [text] * ours
    if len(advice) != 1 or "StreamConfig" not in advice[0]:
        return f"{WRONG}: advice {advice} beside {error_text} through {through[-1:]}"
    return (
        ADVISED
        if ours
        else f"{WRONG}: {error_text} passed through {through[-1:]}"
        if through
        else WARNED
    )


def state_after(steps, trial_names):
    """What a step that went wrong has left: bytes, without a collection; the next step's outcome,
    and what it tries."""
    deadline = time.monotonic() + 60
    while (bytes_left := steps.allocated() - steps.start) and time.monotonic() < deadline:
        time.sleep(0.001)  # autograd's thread lets go of what failed once it gets Python's lock
    trial_names.clear()
    state = bytes_left, outcome(steps), list(trial_names)
    steps.forget()
    return state


CLEAN_STATE = (0, ENDED, [])


def ends_of_failing_allocations(steps, first, stride, check):
    """How often steps end in each way, of which one allocation fails: number `first`,
    `first + stride`, and so on. `check(number)` is called after each of them."""
    outcomes = collections.Counter()
    gc.disable()
    try:
        for number in range(first, steps.allocations, stride):
            backend.extension().fail_after(0, number)
            outcomes[outcome(steps)] += 1
            backend.extension().fail_after(0, -1)
            check(number)
    finally:
        backend.extension().fail_after(0, -1)
        gc.enable()
    print(f"allocations {first}, {first + stride}, ... of {steps.allocations}: {dict(outcomes)}")
    assert outcomes.keys() <= {ENDED, ADVISED, WARNED, EARLY_ERROR_TEXT}
    return outcomes


@pytest.mark.parametrize(
    ("first", "stride"), thinned([(35, 71), (0, 1)], lambda first, stride: stride > 1)
)
def test_each_allocation_in_turn_fails(way, first, stride, steps_of, trial_names):
    steps = steps_of(way, FEW).started()

    def check(number):
        assert state_after(steps, trial_names) == CLEAN_STATE, number

    outcomes = ends_of_failing_allocations(steps, first, stride, check)
    assert outcomes[EARLY_ERROR_TEXT] <= 2  # that of the loss, and of the sum that it is a part of
    assert outcomes[ENDED] >= MIN_COMPLETED_SHARES[way] * outcomes.total()


@pytest.mark.parametrize("when", ["between steps", "before backward", "in a chunk"])
@pytest.mark.parametrize("share", thinned((0.97, 0.9, 0.8, 0.6), lambda share: share in (0.9, 0.6)))
def test_a_limit_is_lowered(way, share, when, steps_of, trial_names):
    steps = steps_of(way, MANY).started()
    hooks = []

    limit, set_limit = (
        steps.other_bytes + int(share * (steps.peak - steps.other_bytes)),
        backend.extension().set_limit,
    )

    def lower(*_):  # closes over numbers alone: what it reached would be watched
        set_limit(0, limit)

    torch.accelerator.empty_cache()
    if when == "in a chunk":
        hooks.append(steps.model.model.layers[1].mlp.register_forward_hook(lower))
    try:
        if when == "between steps":
            lower()
        steps.before_backward = lower if when == "before backward" else None
        outcomes = [outcome(steps) for _ in range(2)]
    finally:
        steps.before_backward = None
        for hook in hooks:
            hook.remove()
        backend.extension().set_limit(0, backend.LIMIT)
    print(f"{way}, {share} {when}: {outcomes}")
    assert set(outcomes) <= {ENDED, ADVISED, WARNED}
    assert state_after(steps, trial_names) == CLEAN_STATE
