"""Backward in another thread than forward, as autograd runs it for tensors on a GPU, with tensors
on the CPU.

autograd has a thread for each GPU, which lives as long as the process. A backward call hands it the
graph and a part of its own state: grad mode, what autocast is switched on for, modes, hooks for
saved tensors. The thread has its own of all else: context variables, `threading.local`, autocast's
dtype, its cache's switch and its nesting. Calls of autograd within a backward stay in the thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._C._autograd import _top_saved_tensors_default_hooks

UNLIKE = torch.float16  # autocast's dtype in a GPU's thread, whatever the program has chosen
NAME = "device"
THREAD = ThreadPoolExecutor(1, NAME, initializer=lambda: torch.set_autocast_dtype("cpu", UNLIKE))


def use(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on each backward call runs in the thread; returns a list that gets the thread's
    number for each."""
    real, ran = torch.autograd._engine_run_backward, list[int]()  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        there_already = (
            torch._C._current_graph_task_id() != -1
            or threading.current_thread().name.startswith(NAME)
        )
        # What torch.func's transforms keep in their thread cannot be handed on.
        if there_already or torch._C._functorch.peek_interpreter_stack() is not None:
            return real(*args, **kwargs)
        state = _handed_on()

        def task() -> Any:
            ran.append(threading.get_ident())
            with _taken_over(*state):
                return real(*args, **kwargs)

        future = THREAD.submit(task)
        try:
            return future.result()
        finally:
            del future  # its error holds the frames of this call

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)
    return ran


def _handed_on() -> tuple[Any, ...]:
    """What autograd hands to its threads."""
    functions = [
        torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())
    ]
    dispatches = [
        torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())
    ]
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    )
    return *modes, functions, dispatches, _top_saved_tensors_default_hooks(True)


@contextlib.contextmanager
def _taken_over(
    grad: bool,
    inference: bool,
    autocast: bool,
    functions: list[Any],
    dispatches: list[Any],
    hooks: Any,
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.callback(torch.set_autocast_enabled, "cpu", torch.is_autocast_enabled("cpu"))
        torch.set_autocast_enabled("cpu", autocast)
        if hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
        for mode in functions:
            torch._C._push_on_torch_function_stack(mode)
            stack.callback(torch._C._pop_torch_function_stack)
        for mode in dispatches:
            torch._C._push_on_torch_dispatch_stack(mode)
            stack.callback(torch._C._pop_torch_dispatch_stack, None)
        yield
