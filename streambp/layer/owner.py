"""Who is computing with a patched model.

[Note: owner of a step] While a streamed forward or a layer's backward runs, others stand in for the layer's weights, the
model's settings and its output projection. A second thread that calls the model meanwhile would compute with them, and its
own would get into the first one's gradients. So the model has an owner from the beginning of each forward and of each
layer's backward to its end, and who comes between raises. The owner is

    its thread                   calls within calls, trials, checkpoints that compute again
    its backward                 autograd's own threads, one for each device, work at one backward together
    the forward that it began in a backward that a forward runs within itself, in a thread of autograd's

Threads that take turns never meet: each forward may be another thread's, and so may its backward.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any

import torch

from streambp.errors import StreamBPError


@dataclasses.dataclass(eq=False)
class Use:
    """One forward, or one layer's backward, as a context that ends it; within others of its owner it is theirs."""

    owner: StepOwner
    thread: int
    task: int
    depth: int = 1

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_: object) -> None:
        with self.owner.lock:
            self.depth -= 1


@dataclasses.dataclass(eq=False)
class StepOwner:
    """Of one patched model. [Note: owner of a step]

    current: the use that is under way, if it is: an exception that comes between two instructions leaves it behind, and it
        goes with the frames that it was in.
    """

    lock: Any = dataclasses.field(default_factory=threading.RLock)  # a signal's handler may come here too
    current: weakref.ref[Use] | None = None

    def __reduce__(self) -> Any:
        """A copied or pickled model is used by nobody."""
        return StepOwner, ()

    def enter(self, began: weakref.ref[Use] | None = None) -> Use:
        """Own the model until the context ends.

        Args:
            began: the use in which the forward ran whose backward this is.

        Raises:
            StreamBPError: another thread is computing with the model.
        """
        thread, task = threading.get_ident(), torch._C._current_graph_task_id()
        with self.lock:
            use = None if self.current is None else self.current()
            if use is None or not use.depth:
                use = Use(self, thread, task)
                self.current = weakref.ref(use)
                return use
            if use.thread == thread or (task != -1 and use.task == task) or (began is not None and began() is use):
                use.depth += 1
                return use
        raise StreamBPError(
            "Another thread is computing with this model; two at a time would put wrong numbers into each other's "
            "gradients. Let threads take turns (a lock around each forward and each backward), or give each a copy of "
            "its own (copy.deepcopy(model))."
        )
