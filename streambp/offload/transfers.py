"""Copy tensors to one stack of host memory; `manager.HostTensors` returns tensors to the device.

MicroBatchMemory   a stack, and the tensors on their way back from it
TensorEntry        one tensor: on the host, on its way, or on the device
Transfers          a model's copies to the host, and the sources that must live until the copies are
                   done
"""

from __future__ import annotations

import collections
import dataclasses
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from streambp.offload.arena import Arena, BufferStack
from streambp.offload.engines import (
    COMPUTE_QUEUE,
    FROM_HOST_QUEUE,
    TIMED_QUEUES,
    TO_HOST_QUEUE,
    Engine,
)

MICRO_BATCH = "micro-batch"  # kind of a stack
GROUPS_IN_FLIGHT = 2  # chunks or tiles whose copies may run before compute waits


@dataclasses.dataclass(eq=False)
class TensorEntry:
    """State of one saved tensor that is on the device, on the host, or on its way.

    Attributes:
        engine: engine of the tensor's device.
        source: the tensor on the device; None once its memory was released.
        host: the copy on the host, complete after `copied_out`; None: the tensor stays on the
            device.
        copied_out: event after the copy to the host.
        read: event after the last copy back to the device; None: no copy back was started.
        version: version counter at the time of saving, for a layer input that stays on the device
            and that other code may change in place; None for other tensors.
        budgeted: True if the tensor stays on the device and counts against `gpu_memory`.
    """

    engine: Engine
    source: Tensor | None = None
    host: Tensor | None = None
    copied_out: Any = None
    read: Any = None
    version: int | None = None
    budgeted: bool = False


@dataclasses.dataclass(eq=False)
class Departure:
    """A copy to the host that may still be running.

    Attributes:
        entry: state of the tensor.
        tensor: the source on the device, which must not be freed before `event`.
        event: event after the copy.
        group: number of the group of copies; a group is the copies of one chunk.
    """

    entry: TensorEntry
    tensor: Tensor
    event: Any
    group: int


class MicroBatchMemory:
    """Host memory of one micro-batch's saved tensors: a stack that was taken from the pool. The
    stack goes back when the last reference to this object is gone, or by `retire`.

    Args:
        arena: the pool of host memory.
        kind: purpose of the stack (`BufferStack.kind`), such as "micro-batch".

    Attributes:
        stack: the stack of host memory.
        last_index: index of the layer whose store was opened last; -1: none.
        stores: weak references to the stores of tensors in the stack (`manager.HostTensors`), one
            for each layer of a forward.
        free_after: events of earlier copies from and to the stack's memory; this micro-batch may
            overwrite the memory after these events.
        arriving: tensors that are being copied to the device, each with the event after its copy.
        retire: `weakref.finalize` that returns the stack to the pool, at most once; its attribute
            `alive` is False afterwards.
    """

    def __init__(self, arena: Arena, kind: str) -> None:
        self.last_index = -1
        self.stores: list[weakref.ref[Any]] = []
        self.arena, self.stack = arena, arena.take(kind)
        self.free_after = tuple(self.stack.last_uses.values())
        self.arriving: dict[
            TensorEntry, tuple[Tensor, Any]
        ] = {}  # tensor, and event after its copy
        self.retire = weakref.finalize(self, _retire, arena, self.stack, self.arriving)
        self.retire.atexit = False

    def alive(self) -> list[Any]:
        """Return the stores (`manager.HostTensors`) that other code still references. A store has
        the tensors that one layer has saved in a forward."""
        return [store for store in (store_ref() for store_ref in self.stores) if store is not None]

    @property
    def layer_bytes(self) -> int:
        """Return the largest number of bytes of saved tensors, on host and device, that one layer
        of this micro-batch has stored so far; 0 before the first layer. The manager estimates by
        this number how much the remaining layers will store."""
        return max((store.bytes for store in self.alive()), default=0)


def _retire(
    arena: Arena, stack: BufferStack, arriving: dict[TensorEntry, tuple[Tensor, Any]]
) -> None:
    """Return a stack of host memory to the pool, after making the compute stream wait for copies
    that still read it.

    Args:
        arena: the pool.
        stack: the stack.
        arriving: tensors that are being copied to the device, each with the event after its copy.
    """
    for entry, (_, event) in arriving.items():
        # [Note: offload order], 4: the tensors' memory goes back to compute
        entry.engine.wait(COMPUTE_QUEUE, event)
    arriving.clear()
    arena.give_back(stack)


class Transfers:
    """Starts copies of saved tensors to the host, and makes the compute stream wait for them before
    their device memory is freed.

    The copies of one chunk form a group.

    Attributes:
        engines: engines by device. All engines use the same host memory.
        bytes: bytes moved in each direction: "out" to the host, "back" to the device.
        overflow_count: number of tensors that did not fit on the host.
    """

    def __init__(self, overflow_count: int = 0) -> None:
        self.overflow_count = overflow_count
        self.engines: dict[torch.device, Engine] = {}
        self.bytes = {TO_HOST_QUEUE: 0.0, FROM_HOST_QUEUE: 0.0}
        self._in_flight: collections.deque[Departure] = collections.deque()
        self._group = 0
        self._key: tuple[Any, int] | None = None

    def settle(self) -> None:
        """Wait, on the calling thread, until all copies are done."""
        for engine in self.engines.values():
            engine.settle()

    def queue_seconds(self) -> dict[str, float]:
        """Return the seconds of copies ("out" to the host, "back" to the device) and of compute's
        waits for the copies ("stall_out", "stall_back"), summed over all devices."""
        spent = [engine.queue_seconds() for engine in self.engines.values()]
        return {name: sum(seconds[name] for seconds in spent) for name in TIMED_QUEUES}

    def begin(self, owner: object, chunk: int) -> None:
        """Begin the group of copies of one chunk. The device memory of older groups, except the
        previous group, is released after the compute stream has waited for the copies.

        Args:
            owner: the storage of the tensors (`HostTensors`).
            chunk: index of the chunk. A repeated call with the same owner and chunk does nothing.
        """
        key = (weakref.ref(owner), chunk)
        if key == self._key:
            return
        self._key, self._group = key, self._group + 1
        self.release(last_group=self._group - GROUPS_IN_FLIGHT)

    def send(
        self,
        holding: MicroBatchMemory,
        entry: TensorEntry,
        tensor: Tensor,
        host_is_free: Iterable[Any],
        needs_clone: bool = False,
    ) -> None:
        """Start the copy of a tensor [...] to the host, after the events in `host_is_free`.

        Args:
            holding: host memory of the micro-batch.
            entry: state of the tensor; `entry.host` is the target.
            tensor: the tensor on the device.
            host_is_free: events after which the target may be overwritten.
            needs_clone: True if other code may change the tensor in place before the copy has
                ended. A clone is then copied in its place. False: no code changes the tensor.
        """
        assert entry.host is not None
        # a view would keep its storage alive
        part = tensor.untyped_storage().nbytes() > tensor.nbytes
        if part or needs_clone:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        else:
            tensor = tensor.contiguous()
        engine = entry.engine
        engine.access(COMPUTE_QUEUE, tensor, write=True)
        engine.wait(TO_HOST_QUEUE, engine.record(COMPUTE_QUEUE))  # [Note: offload order], 1
        for event in host_is_free:
            engine.wait(TO_HOST_QUEUE, event)  # 5
        engine.copy(TO_HOST_QUEUE, entry.host, tensor)
        entry.source, entry.copied_out = tensor, engine.record(TO_HOST_QUEUE)
        holding.stack.last_uses[engine, TO_HOST_QUEUE] = entry.copied_out
        self.bytes[TO_HOST_QUEUE] += tensor.nbytes
        self._in_flight.append(Departure(entry, tensor, entry.copied_out, self._group))

    def release(self, entry: TensorEntry | None = None, last_group: float = math.inf) -> int:
        """Release tensors on the device whose copies to the host were started, and return their
        number. The compute stream first waits for these copies, so that the memory is not
        overwritten too early.

        Args:
            entry: the entry whose tensor is released; None: the tensors of all entries.
            last_group: number of the last group to release. A group is the copies of one chunk;
                groups are numbered in order.
        """
        released = [
            d for d in self._in_flight if d.group <= last_group and entry in (None, d.entry)
        ]
        for departure in released:
            self._in_flight.remove(departure)
            departure.entry.engine.wait(COMPUTE_QUEUE, departure.event)  # 6
            if departure.entry.source is departure.tensor:
                departure.entry.source = None
        return len(released)
