"""The six waits of the offload engine, left out one by one while copies or kernels are slow.

covers: offload/engines.py, offload/manager.py, offload/transfers.py

A wait is implied if other waits and the order of a stream keep what it keeps ([Note: offload order]
says which and why). Memory that is freed is overwritten by the stream it belongs to (device.cpp),
so a tensor that is read too late shows.
"""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import torch

import streambp
from streambp.offload import engines, manager, manager_of, transfers
from tests.emulated import backend
from tests.families import build, make_batch
from tests.tiers import thinned

pytestmark = pytest.mark.emulated
SETTINGS = {
    "attn_out + kv": {"saves": ("attn_out", "kv"), "offload": "cpu"},
    "gpu_memory=1": {"saves": (), "offload": "cpu", "gpu_memory": 1},
    "auto": {"offload": "auto", "gpu_memory": 1},
}
# Seconds a copy, or a kernel.
SLOW_QUEUES = {"out": (0.08, 0.0, 0.0), "back": (0.0, 0.08, 0.0), "compute": (0.0, 0.0, 0.003)}
# a wait that is left out may show itself only in the second or third: the host can be late as well
DELAY_FACTORS = (1, 5, 25)
NEEDED_WAITS = {
    "1 in send": "compute",
    "2 in load": "compute",
    "4 in peek": "back",
    "6 in release": "out",
}
IMPLIED_WAITS = ("3 in load", "5 in send", "6 in borrow")  # [Note: offload order]
ABORTED_STEP_WAIT = "4 in _retire"  # reached where a step ends before its backward does
NUMBERED_COMMENT = re.compile(r"# (?:\[Note: offload order\], )?(\d)")
WAIT_LINES = {}  # file and line of each wait, by its number in the note and its function
for module in (transfers, manager):
    lines = inspect.getsource(module).splitlines()
    for number, line in enumerate(lines, 1):
        if ".wait(" in line and "def " not in line:
            function = next(
                m[1]
                for earlier_line in reversed(lines[:number])
                if (m := re.match(r"\s*def (\w+)", earlier_line))
            )
            # The number stands behind the wait, or above it.
            marked = NUMBERED_COMMENT.search(line) or NUMBERED_COMMENT.search(lines[number - 2])
            WAIT_LINES[f"{marked[1]} in {function}"] = module.__file__, number


class Leaky(engines.AcceleratorEngine):
    """Leaves out the waits of one line."""

    line: tuple[str, int] | None = None
    left_out = 0

    def wait(self, queue, event):
        caller = sys._getframe(1)
        if (caller.f_code.co_filename, caller.f_lineno) == Leaky.line:
            Leaky.left_out += event is not None
        else:
            super().wait(queue, event)

    def queue_seconds(self):
        """Of a link that has room for all: what offload="auto" saves does not depend on the host's
        other work."""
        return {name: 1e-9 * seconds for name, seconds in super().queue_seconds().items()}


def step(model, batch):
    model.zero_grad(set_to_none=True)
    model(**batch, use_cache=False).loss.backward()
    torch.accelerator.synchronize()
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


def slow_down(engine, out_delay, back_delay, compute_delay, times=1):
    out_delay, back_delay, compute_delay = (
        times * out_delay,
        times * back_delay,
        times * compute_delay,
    )
    c = backend.extension()
    c.set_delays(0, 0, 0.0, compute_delay)
    c.set_delays(0, engine._streams[engines.TO_HOST_QUEUE].stream_id, out_delay, 0.0)
    c.set_delays(0, engine._streams[engines.FROM_HOST_QUEUE].stream_id, back_delay, 0.0)


@pytest.fixture(scope="module", params=thinned(SETTINGS, lambda name: name == "attn_out + kv"))
def run(request, device):
    """The setting's name, its model, a batch, the gradients without offloading, and the engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "make_engine", Leaky)
        batch = make_batch("plain", rows=1)

        def patched(**settings):
            # Values that a wait came too late for are compared here, bit by bit, not by backward
            # itself.
            config = streambp.StreamConfig(chunk_size=8, compare_backward=False, **settings)
            return streambp.patch(build("qwen3", num_hidden_layers=3), config)

        plain = patched(saves=())
        step(plain, batch)
        expected = step(plain, batch)
        model = patched(**SETTINGS[request.param])
        for _ in range(3):
            step(model, batch)
        if request.param == "auto":
            assert {"attn_out", "kv"} <= set(streambp.describe(model).saves)
        (engine,) = manager_of(model).transfers.engines.values()
        yield request.param, model, batch, expected, engine


class BrokenOffError(Exception):
    """What ends a backward in its middle."""


def break_off(model, batch):
    """A step whose backward raises when the last layer but one has its gradients: tensors of the
    next are on their way."""

    def refuse(_):
        raise BrokenOffError

    hook = model.model.layers[1].mlp.down_proj.weight.register_hook(refuse)
    try:
        step(model, batch)
    except BrokenOffError:
        return
    finally:
        hook.remove()
    raise AssertionError("nothing broke off")


def step_without_wait(run, wait, slow, broken_off=False, times=1):
    """Whether a step has the gradients of one without offloading, and how many waits it left out.

    broken_off: after one whose backward raised. times: how much longer than in SLOW a copy or a
    kernel takes.
    """
    _, model, batch, expected, engine = run
    assert type(engine) is Leaky
    slow_down(engine, *SLOW_QUEUES[slow], times)
    Leaky.line, Leaky.left_out = WAIT_LINES.get(wait), 0
    try:
        if broken_off:
            break_off(model, batch)
        gradients = step(model, batch)
    finally:
        Leaky.line = None
        slow_down(engine, 0.0, 0.0, 0.0)
    return all(torch.equal(gradients[key], expected[key]) for key in expected), Leaky.left_out


def test_every_wait_is_tried():
    assert {*NEEDED_WAITS, *IMPLIED_WAITS, ABORTED_STEP_WAIT} == set(WAIT_LINES)


@pytest.mark.parametrize("broken_off", thinned([False, True], lambda broken_off: not broken_off))
@pytest.mark.parametrize("slow", SLOW_QUEUES)
def test_with_all_waits_a_step_is_right(run, slow, broken_off):
    assert step_without_wait(run, None, slow, broken_off) == (True, 0)


@pytest.mark.parametrize("wait", NEEDED_WAITS)
def test_a_wait_that_is_needed(run, wait):
    for times in DELAY_FACTORS:
        try:
            is_equal, left_out = step_without_wait(run, wait, NEEDED_WAITS[wait], times=times)
        except torch.AcceleratorError:  # garbage in the place of an index
            return
        assert left_out > 0
        if not is_equal:
            return
    raise AssertionError(f"nothing shows that the wait {wait} was left out")


@pytest.mark.parametrize("slow", thinned(SLOW_QUEUES, lambda slow: slow == "out"))
@pytest.mark.parametrize("wait", IMPLIED_WAITS)
def test_a_wait_that_others_imply(run, wait, slow):
    is_equal, left_out = step_without_wait(run, wait, slow)
    # nothing is borrowed there
    assert left_out > 0 or (wait == "6 in borrow" and run[0] == "attn_out + kv")
    assert is_equal


def after_breaking_off(run, wait, times):
    """Whether tensors made after a step that broke off keep their values, and how many waits it
    left out."""
    _, model, batch, _, engine = run
    slow_down(engine, *SLOW_QUEUES["back"], times)
    Leaky.line, Leaky.left_out = WAIT_LINES.get(wait), 0
    try:
        break_off(model, batch)
        # More of each size than are free, since the step's other tensors are freed, too, and the
        # allocator returns those first that were freed last.
        tensors = [
            torch.full((size,), 7.0, device=batch["labels"].device)
            for size in 256 * (64, 128, 256, 512, 1024)
        ]
        torch.accelerator.synchronize()
    finally:
        Leaky.line = None
        slow_down(engine, 0.0, 0.0, 0.0)
    return all(bool((x.cpu() == 7).all()) for x in tensors), Leaky.left_out


def test_the_wait_of_a_step_that_breaks_off(run):
    """What is on its way back when a backward raises has memory that compute gets next: the copy
    must not come after."""
    assert after_breaking_off(run, None, times=1) == (True, 0)


def test_the_wait_of_a_step_that_breaks_off_is_needed(run):
    for times in DELAY_FACTORS:
        is_unchanged, left_out = after_breaking_off(run, ABORTED_STEP_WAIT, times)
        # one layer input at most is on its way, and it may be let go of before this or after
        if run[0] == "gpu_memory=1":
            assert is_unchanged or left_out
            return
        assert left_out > 0
        if not is_unchanged:
            return
    raise AssertionError("nothing shows that the wait was left out")
