"""Provide streams, events and copies through one interface for the manager.

[Note: offload order] Three queues exist: compute, out (device to host) and back (host to device).
Six waits order them:

    1  out waits for compute      before it reads a tensor: its producer must be done
    2  back waits for compute     before it writes a new tensor: earlier uses of that memory must be done
    3  back waits for out         before it reads host memory: the copy to the host must be done
    4  compute waits for back     before it reads a tensor that was copied back
    5  out waits for back         before it overwrites host memory: all reads must be done
    6  compute waits for out      before a source is freed: its memory may be written next

Removing 1, 2, 4 or 6 gives wrong gradients on a device with slow copies or kernels
(tests/emulated/test_waits.py removes each wait in turn). Waits 3, 5 and, for borrowed tensors, 6
follow from other waits. No step that ends can lose data for lack of the implied waits:

    3  a tensor is copied back after its source was freed, for which compute has waited for the copy
       out (6); back waits for compute (2)
    5  a tensor to send was computed after waiting for the copy back (4), and out waits for compute
       (1)
    6  a borrowed tensor is sent again in the same queue, over the first copy's torn data

The redundant waits remain for micro-batches that end early and for host memory shared by devices;
only `TraceEngine` detects their removal.

The manager uses this interface alone, so the tests' `TraceEngine` can check the waits without a
GPU.

A model with layers on several devices has one engine for each device. Each engine has three queues
of its own, and all engines share the host memory. A queue of one device can wait for an event of
another device. The wait is necessary, because one device may overwrite host memory that another
device has read or written.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from streambp.device import (
    allocator_bytes,
    forget_error,
    is_accelerator,
    memory_limit,
    reports_memory,
)
from streambp.progress import progress_line

COMPUTE_QUEUE = "compute"
TO_HOST_QUEUE = "out"
FROM_HOST_QUEUE = "back"
MIN_RATED_BYTES = 2**28  # fewer copied bytes do not show a link's speed
HOST_QUEUE = "host"  # the calling thread, which can wait like a queue
STALL_PREFIX = "stall_"  # prefix of a queue's name: time for which compute waited
TIMED_QUEUES = (
    TO_HOST_QUEUE,
    FROM_HOST_QUEUE,
    STALL_PREFIX + TO_HOST_QUEUE,
    STALL_PREFIX + FROM_HOST_QUEUE,
)
PINNING_SECONDS_PER_GIB = 0.3  # seconds to pin a GiB of host memory; measured on one machine
MIN_SHOWN_PINNING_BYTES = 2**30  # bytes whose pinning takes long enough to be shown on a terminal


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device in bytes, as torch's allocator reports it.

    Attributes:
        allocated: bytes allocated now.
        peak: largest number of allocated bytes since the last reset of torch's statistics.
        limit: bytes available to this process in total.
    """

    allocated: int
    peak: int
    limit: int


class Engine:
    """Copies tensors between a device and host memory, in queues. A queue is a sequence of work,
    like a CUDA stream: computation (`COMPUTE_QUEUE`), copies to the host (`TO_HOST_QUEUE`) and
    copies to the device (`FROM_HOST_QUEUE`). This base class copies at once, on the calling thread.

    The base class serves models on the CPU. Offloading frees no memory there, but can be tested.

    Attributes:
        name: description for users.
        pinned: False after an attempt to pin host memory has failed; True before.
    """

    name = "copies at once"
    pinned = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spent = dict.fromkeys(TIMED_QUEUES, 0.0)
        self._copied = dict.fromkeys(TIMED_QUEUES, 0)  # bytes of the copies in `_spent`

    def engine_for(self, device: torch.device) -> Engine:
        """Return an engine for another device, which uses the same host memory.

        Each engine has three queues. A queue of one device can wait for an event of another
        device.
        """
        return Engine(device)

    def host_buffer(self, size: int) -> Tensor:
        """Reserve `size` bytes of host memory as a uint8 tensor [size], pinned if the device
        benefits."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def empty_like(self, host: Tensor) -> Tensor:
        """Return an empty device tensor with the shape [...] and dtype of `host`, allocated on the
        compute stream, as the target of a copy from the host."""
        return torch.empty_like(host, device=self.device)

    def record(self, queue: str) -> Any:
        """Return an event, for `wait`, that completes after all work that is now in a queue
        (`COMPUTE_QUEUE`, `TO_HOST_QUEUE` or `FROM_HOST_QUEUE`); None if no work is pending."""
        return None

    def wait(self, queue: str, event: Any) -> None:
        """Make a queue wait for an event before its later work. `HOST_QUEUE` is the calling thread,
        which is blocked until the event completes. This base class does nothing, because its copies
        are done at once.

        Args:
            queue: `COMPUTE_QUEUE`, `TO_HOST_QUEUE`, `FROM_HOST_QUEUE` or `HOST_QUEUE`.
            event: result of `record`; None: no event to wait for.
        """

    def settle(self) -> None:
        """Wait, on the calling thread, until all copies are done."""

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """Add a copy from `source` to `target` [...], equal in shape and dtype, to a queue.

        Args:
            queue: `TO_HOST_QUEUE` or `FROM_HOST_QUEUE`.
            target: the tensor that is overwritten.
            source: the tensor that is copied.
        """
        start = time.perf_counter()
        target.copy_(source)
        seconds = time.perf_counter() - start
        self._spent[queue] += seconds
        self._copied[queue] += source.nbytes
        self._spent[STALL_PREFIX + queue] += seconds  # the copy blocks compute

    def rate(self, queue: str) -> float | None:
        """Return the bytes/s of the finished copies of a queue (`TO_HOST_QUEUE` or
        `FROM_HOST_QUEUE`); None while too few bytes were copied for a reliable number. The call
        does not wait for the device."""
        copied = self._copied[queue]
        spent = self._spent[queue]
        return copied / spent if copied >= MIN_RATED_BYTES and spent else None

    def access(self, queue: str, tensor: Tensor, write: bool) -> None:
        """Tell the tests' race checker (`TraceEngine`, a subclass) about a memory access; do
        nothing in all other engines.

        Args:
            queue: `COMPUTE_QUEUE`: the compute stream has just written `tensor`, or reads or writes
                it next. `HOST_QUEUE`: the calling thread reads or writes `tensor` next, in host
                memory.
            tensor: the accessed tensor [...].
            write: True if the access may write.
        """

    def queue_seconds(self) -> dict[str, float]:
        """Return the seconds by name, for `OffloadManager.stats`. The names are "out" for copies to
        the host, "back" for copies to the device, and "stall_out" and "stall_back" for waits of the
        compute stream for these copies.

        The call synchronizes with the device, so call it outside of a step.
        """
        return dict(self._spent)

    def clock(self, queue: str = COMPUTE_QUEUE) -> Any:
        """Return a timestamp: the time at which a queue has done all work that is in the queue now.
        Two timestamps are passed to `seconds`, for example to time a layer's chunks."""
        return time.perf_counter()

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds from `start` to `stop`, two timestamps that `clock` has returned. The
        call waits until the device has reached `stop`."""
        return float(stop - start)

    def memory(self) -> DeviceMemory | None:
        """Return the bytes that torch's allocator has allocated on the device, with their peak and
        limit; None if the allocator of the device has no statistics."""
        if not reports_memory(self.device):
            return None
        allocated = allocator_bytes(self.device, "allocated")
        peak = allocator_bytes(self.device, "peak")
        return DeviceMemory(allocated, peak, memory_limit(self.device))


REGISTER_PORTABLE = (
    1  # cudaHostRegisterPortable: page-locked for all devices, not the current device alone
)


class AcceleratorEngine(Engine):
    """Copies tensors between an accelerator and host memory on two streams of its own, one for each
    direction. `COMPUTE_QUEUE` is torch's current stream.

    If host memory cannot be pinned, copies are synchronous, and one warning is issued.

    Args:
        device: the accelerator.
        first_engine: the engine that provides the host memory; None: this engine allocates its own.

    Attributes:
        pinned: True while all host memory is pinned; after a failure no memory is pinned any more.
    """

    name = "copies beside the compute"

    def __init__(self, device: torch.device, first_engine: AcceleratorEngine | None = None) -> None:
        super().__init__(device)
        self.pinned = True
        self._first = first_engine
        self._streams = {TO_HOST_QUEUE: torch.Stream(device), FROM_HOST_QUEUE: torch.Stream(device)}
        self._running: collections.deque[tuple[str, torch.Event, torch.Event, int]] = (
            collections.deque()
        )

    def _stream(self, queue: str) -> torch.Stream:
        if queue in self._streams:
            return self._streams[queue]
        return torch.accelerator.current_stream(self.device)

    def engine_for(self, device: torch.device) -> Engine:
        """Return an engine for another device with streams of its own, which uses the same host
        memory."""
        return AcceleratorEngine(device, self._first or self)

    def host_buffer(self, size: int) -> Tensor:
        """Return `size` bytes of host memory as a uint8 tensor [size], pinned for all devices. Warn
        at the first failure to pin; no memory is pinned afterwards."""
        gib = size / 2**30
        progress: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if size >= MIN_SHOWN_PINNING_BYTES and (self._first or self).pinned:
            progress = progress_line(
                f"pinning {gib:.0f} GiB, about {max(1.0, PINNING_SECONDS_PER_GIB * gib):.0f} s"
            )
        with progress:
            return self._reserve(size)

    def _reserve(self, size: int) -> Tensor:
        """Return host memory [size], uint8, like `host_buffer`, but without the line of progress
        that `host_buffer` shows on the terminal. Warn at the first failure to pin.

        Args:
            size: number of bytes.
        """
        host = self._first or self
        on_cuda = self.device.type == "cuda"
        error = ""
        if host.pinned and not on_cuda:
            try:
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as failure:
                error = str(failure).partition("\n")[0]
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")  # [size]
        if host.pinned and on_cuda:  # torch's pinned memory rounds up to powers of two
            runtime: Any = torch.cuda.cudart()
            code = int(runtime.cudaHostRegister(buffer.data_ptr(), size, REGISTER_PORTABLE))
            error = f"CUDA error {code}" if code else ""
            if not code:  # unpin when the storage is freed
                weakref.finalize(
                    buffer.untyped_storage(), runtime.cudaHostUnregister, buffer.data_ptr()
                )
        if error:
            host.pinned = False
            forget_error(self.device)
            warnings.warn(
                "Raise the limit on locked memory (ulimit -l) or lower host_memory: "
                f"{size / 2**30:.1f} GiB of host memory could not be pinned ({error}), so that "
                "copies are synchronous, and slow, from now on.",
                stacklevel=3,
            )
        return buffer

    def record(self, queue: str) -> Any:
        """Return a pair, the event for `wait`: the queue's name, and a torch event recorded in the
        queue's stream."""
        event = torch.Event(self.device)
        event.record(self._stream(queue))
        return queue, event

    def wait(self, queue: str, event: Any) -> None:
        """Make the queue's stream wait for an event. Only `HOST_QUEUE` blocks the calling thread.
        The time that compute waits is measured.

        Args:
            queue: name of the waiting queue.
            event: result of `record`; None: no event to wait for.
        """
        if event is None:
            return
        origin, recorded = event
        if queue == HOST_QUEUE:
            recorded.synchronize()
            return
        stream = self._stream(queue)
        if queue != COMPUTE_QUEUE or recorded.query():
            stream.wait_event(recorded)
            return
        start = self.clock()
        stream.wait_event(recorded)
        self._running.append((STALL_PREFIX + origin, start, self.clock(), 0))
        self._add_up()

    def settle(self) -> None:
        """Wait until all copies in both directions are done. The compute stream is not waited
        for."""
        for stream in self._streams.values():
            stream.synchronize()

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """Add a copy from `source` to `target` [...], equal in shape and dtype, to the stream of a
        queue, and measure the time of the copy. The copy is asynchronous if host memory is pinned.

        Args:
            queue: `TO_HOST_QUEUE` or `FROM_HOST_QUEUE`.
            target: the tensor that is overwritten.
            source: the tensor that is copied.
        """
        with self._streams[queue]:
            start = self.clock(queue)
            target.copy_(source, non_blocking=(self._first or self).pinned)
            self._running.append((queue, start, self.clock(queue), source.nbytes))
        self._add_up()

    def _add_up(self) -> None:
        """Add the times of finished copies, and of compute's waits for copies, to the totals that
        `queue_seconds` returns. The call does not wait for the device."""
        while self._running and self._running[0][2].query():
            name, start, stop, size = self._running.popleft()
            self._spent[name] += start.elapsed_time(stop) / 1e3
            self._copied[name] += size

    def queue_seconds(self) -> dict[str, float]:
        """Return the seconds by name, after waiting for all work so far. The names are "out" for
        copies to the host, "back" for copies to the device, and "stall_out" and "stall_back" for
        compute's waits for these copies."""
        torch.accelerator.synchronize(self.device)
        self._add_up()
        return super().queue_seconds()

    def clock(self, queue: str = COMPUTE_QUEUE) -> Any:
        """Return a CUDA event with timing, recorded in the queue's stream, as a timestamp for
        `seconds`."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(self._stream(queue))
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds from `start` to `stop`, two CUDA events that `clock` has returned,
        after waiting for `stop`."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def make_engine(device: torch.device) -> Engine:
    """Return an `AcceleratorEngine` for an accelerator, and an `Engine` for any other device."""
    return AcceleratorEngine(device) if is_accelerator(device) else Engine(device)
