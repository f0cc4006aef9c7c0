"""Who is computing with a patched model.

[Note: owner of a step] While a streamed forward or a layer's backward runs, others stand in for the
layer's weights, the model's settings and its output projection. A second thread that calls the
model meanwhile would compute with them, and its own would get into the first one's gradients. So
the model has an owner from the beginning of each forward and of each layer's backward to its end,
and who comes between raises. The owner is

    its thread                   calls within calls, trials, checkpoints that compute again
    its backward                 autograd's own threads, one for each device, work at one backward together
    the forward that it began in a backward that a forward runs within itself, in a thread of
    autograd's

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
    """One forward, or one layer's backward, as a context manager. Nested contexts of one owner
    share an object.
    """

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
    """The owner of one patched model. [Note: owner of a step]

    Attributes:
        lock: re-entrant, because a signal handler may enter it too.
        current: the running use; None: no use. An exception between two instructions may leave it
            behind; the weak reference ends with the frames.
    """

    lock: Any = dataclasses.field(default_factory=threading.RLock)
    current: weakref.ref[Use] | None = None

    def __reduce__(self) -> Any:
        """Return an object without an owner for a copied or pickled model."""
        return StepOwner, ()

    def enter(self, began: weakref.ref[Use] | None = None) -> Use:
        """Own the model until the context ends.

        Args:
            began: the use that ran the forward of this backward.

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
            if (
                use.thread == thread
                or (task != -1 and use.task == task)
                or (began is not None and began() is use)
            ):
                use.depth += 1
                return use
        raise StreamBPError(
            "Another thread is computing with this model; two at a time would put wrong numbers "
            "into each other's gradients. Let threads take turns (a lock around each forward and "
            "each backward), or give each a copy of its own (copy.deepcopy(model))."
        )
