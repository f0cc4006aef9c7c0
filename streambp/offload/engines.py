"""Streams, events and copies, as the manager sees them.

[Note: offload order] Three queues: compute, out (device to host) and back (host to device). Six waits order them:

    1  out waits for compute      before it reads a tensor: its producer must be done
    2  back waits for compute     before it writes a fresh tensor: whoever had that memory before must be done
    3  back waits for out         before it reads host memory: the copy there must be done
    4  compute waits for back     before it reads a tensor that came back
    5  out waits for back         before it overwrites host memory: it must have been read
    6  compute waits for out      before a source is let go: its memory may be written next

Left out one by one on a device whose copies or kernels are slow (tests/emulated/test_waits.py), 1, 2, 4 and 6 give wrong
gradients. 3, 5 and, where a tensor is borrowed, 6 are implied, and no data can miss them in a step that ends:

    3  a tensor is copied back once its source was let go, for which compute has waited for the copy out (6); back waits for
       compute (2)
    5  what is sent was computed after the copy back was waited for (4), and out waits for compute (1)
    6  what is borrowed is sent again, in the same queue, over what the first copy out has torn

They stay for micro-batches that break off and for host memory that devices share; `TraceEngine` alone notices their loss.

The manager speaks only this interface, so that the tests' `TraceEngine` can check the waits without a GPU.

[Note: several devices] A model whose layers are on several devices has an engine for each: three queues of its own, and
host memory that all of them share. An event of one may be waited for by a queue of another, and has to be: host memory that
one device has read or written may be written by another next.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from streambp.device import counted_bytes, forget_error, is_accelerator, memory_limit, tells_memory

COMPUTE, OUT, BACK = "compute", "out", "back"
HOST = "host"  # no queue: the calling thread, which may wait as queues do


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes allocated now, the most there were, and all that this process could have."""

    allocated: int
    peak: int
    limit: int


class Engine(Protocol):
    """What moves bytes between a device and the host."""

    def beside(self, device: torch.device) -> Engine:
        """An engine for another device that uses the same host memory. [Note: several devices]"""
        ...

    def host_buffer(self, size: int) -> Tensor:
        """`size` bytes of host memory [size], uint8, pinned where that matters."""
        ...

    def like(self, host: Tensor) -> Tensor:
        """A device tensor of the shape [...] and dtype of `host`, allocated for the compute queue."""
        ...

    def record(self, queue: str) -> Any:
        """An event: everything that was put into the queue so far."""
        ...

    def wait(self, queue: str, event: Any) -> None:
        """What is put into the queue from now on comes after the event; HOST: this returns after it."""
        ...

    def settle(self) -> None:
        """Wait, on the calling thread, until all copies are done."""
        ...

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """Put a copy from `source` to `target` [...], of one shape and dtype, into the queue OUT or BACK."""
        ...

    def compute_access(self, tensor: Tensor, write: bool) -> None:
        """The compute queue has just written `tensor` [...], or reads or writes it next; for checkers."""
        ...

    def host_access(self, tensor: Tensor, write: bool) -> None:
        """The calling thread reads or writes `tensor` [...] of host memory next; for checkers."""
        ...

    def stalls(self) -> dict[str, float]:
        """Seconds that compute has waited for copies out and copies back."""
        ...

    def copying(self) -> dict[str, float]:
        """Seconds that copies out and copies back took."""
        ...

    def clock(self) -> Any:
        """Now, in the compute queue."""
        ...

    def seconds(self, start: Any, stop: Any) -> float:
        """Between two readings of the clock."""
        ...

    def memory(self) -> DeviceMemory | None:
        """Of the device; None where it is the host's, or not told."""
        ...


class SynchronousEngine:
    """Copies at once, on the calling thread: for CPU models, where offloading frees nothing but can be tested.

    `wait` and `settle` do nothing, since no copy is under way when they are called; `compute_access` checks nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = {OUT: 0.0, BACK: 0.0}

    def beside(self, device: torch.device) -> Engine:
        """Another of its kind; host memory needs nothing of its own."""
        return SynchronousEngine(device)

    def host_buffer(self, size: int) -> Tensor:
        """`size` bytes of plain memory [size], uint8, not pinned."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def like(self, host: Tensor) -> Tensor:
        """An empty tensor like `host` [...], on this engine's device."""
        return torch.empty_like(host, device=self.device)

    def record(self, queue: str) -> Any:
        """None: whatever came before is done."""
        return None

    def wait(self, queue: str, event: Any) -> None:
        """Nothing: no copy is under way."""

    def settle(self) -> None:
        """Nothing: no copy is under way."""

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """The copy to `target` [...] is done when this returns; its seconds are added up."""
        start = time.perf_counter()
        target.copy_(source)
        self._seconds[queue] += time.perf_counter() - start

    def compute_access(self, tensor: Tensor, write: bool) -> None:
        """Nothing is checked of `tensor` [...]."""

    def host_access(self, tensor: Tensor, write: bool) -> None:
        """Nothing is checked of `tensor` [...]."""

    def stalls(self) -> dict[str, float]:
        """As `copying`: compute waits while a copy runs."""
        return dict(self._seconds)

    def copying(self) -> dict[str, float]:
        """Seconds by the calling thread's clock."""
        return dict(self._seconds)

    def clock(self) -> Any:
        """Seconds, as `time.perf_counter` counts them."""
        return time.perf_counter()

    def seconds(self, start: Any, stop: Any) -> float:
        """The difference of the two readings."""
        return float(stop - start)

    def memory(self) -> DeviceMemory | None:
        """None: the device's memory is the host's."""
        return None


PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices, not for the current one alone


def pin(buffer: Tensor) -> int:
    """Lock host memory [N], uint8, in place, so that devices can copy from and to it by themselves.

    Returns:
        CUDA's error code; 0: it is locked, until its storage is freed.
    """
    runtime: Any = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), PORTABLE))
    if error == 0:
        weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, buffer.data_ptr())
    return error


class PinnedMemory:
    """Host memory that accelerators copy from and to by themselves. pinned: all of it is; otherwise no more is tried."""

    def __init__(self) -> None:
        self.pinned = True

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """`size` bytes [size], uint8, for `device` and others; one warning the first time that they cannot be pinned."""
        error = ""
        if self.pinned and device.type != "cuda":
            try:
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as refused:
                error = str(refused).partition("\n")[0]
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")  # [size]
        if self.pinned and device.type == "cuda":  # in place: torch's own pinned memory has sizes that are powers of two
            code = pin(buffer)
            error = f"CUDA error {code}" if code else ""
        if error:
            self.pinned = False
            forget_error(device)
            warnings.warn(
                "Raise the limit on locked memory (ulimit -l) or lower host_memory: "
                f"{size / 2**30:.1f} GiB of host memory could not be pinned ({error}), so that copies are "
                "synchronous, and slow, from now on.",
                stacklevel=2,
            )
        return buffer


@dataclasses.dataclass(frozen=True)
class QueueMark:
    """An event and the queue it was recorded in."""

    queue: str
    event: torch.Event


class Stopwatch:
    """Adds up what passes between two points of a stream, for each queue; what is done is added up as time goes by."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = {OUT: 0.0, BACK: 0.0}
        self._running: collections.deque[tuple[str, torch.Event, torch.Event]] = collections.deque()

    @contextlib.contextmanager
    def timing(self, queue: str, stream: torch.Stream) -> Iterator[None]:
        """Within, the time that passes in `stream` is counted for `queue`."""
        before, after = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        before.record(stream)
        yield
        after.record(stream)
        self._running.append((queue, before, after))
        self.seconds()

    def seconds(self) -> dict[str, float]:
        """Seconds for OUT and for BACK of what the device has finished; waits for nothing."""
        while self._running and self._running[0][2].query():
            queue, before, after = self._running.popleft()
            self._seconds[queue] += before.elapsed_time(after) / 1e3
        return dict(self._seconds)


class AcceleratorEngine:
    """Two side streams and events; the compute queue is whatever stream is current.

    Where host memory cannot be pinned, copies are synchronous, and one warning says so. `compute_access` checks nothing.
    """

    def __init__(self, device: torch.device, host: PinnedMemory | None = None) -> None:
        self.device = device
        self.host = host or PinnedMemory()
        self._streams = {OUT: torch.Stream(device), BACK: torch.Stream(device)}
        self._stalls, self._copies = Stopwatch(device), Stopwatch(device)

    def _stream(self, queue: str) -> torch.Stream:
        return self._streams[queue] if queue in self._streams else torch.accelerator.current_stream(self.device)

    def beside(self, device: torch.device) -> Engine:
        """Streams of its own, and the same `PinnedMemory`."""
        return AcceleratorEngine(device, self.host)

    def host_buffer(self, size: int) -> Tensor:
        """`size` bytes [size], uint8, pinned unless that was refused once."""
        return self.host.buffer(size, self.device)

    def like(self, host: Tensor) -> Tensor:
        """An empty tensor like `host` [...], allocated while the compute queue's stream is current."""
        return torch.empty_like(host, device=self.device)

    def record(self, queue: str) -> Any:
        """A `QueueMark` in the queue's stream."""
        event = torch.Event(self.device)
        event.record(self._stream(queue))
        return QueueMark(queue, event)

    def wait(self, queue: str, event: Any) -> None:
        """The stream waits, not the thread, but for HOST; how long compute waits is counted. None: there is nothing to wait
        for."""
        if event is None:
            return
        if queue == HOST:
            event.event.synchronize()
            return
        stream = self._stream(queue)
        if queue != COMPUTE or event.event.query():
            stream.wait_event(event.event)
            return
        with self._stalls.timing(event.queue, stream):
            stream.wait_event(event.event)

    def settle(self) -> None:
        """Waits for the streams of both directions, not for compute."""
        for stream in self._streams.values():
            stream.synchronize()

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """The copy to `target` [...], asynchronous if host memory is pinned; timed in the queue's stream."""
        stream = self._stream(queue)
        with stream, self._copies.timing(queue, stream):
            target.copy_(source, non_blocking=self.host.pinned)

    def compute_access(self, tensor: Tensor, write: bool) -> None:
        """Nothing is checked of `tensor` [...]."""

    def host_access(self, tensor: Tensor, write: bool) -> None:
        """Nothing is checked of `tensor` [...]."""

    def stalls(self) -> dict[str, float]:
        """Waits for the device, so call it outside of a step."""
        torch.accelerator.synchronize(self.device)
        return self._stalls.seconds()

    def copying(self) -> dict[str, float]:
        """Waits for the device, as `stalls` does."""
        torch.accelerator.synchronize(self.device)
        return self._copies.seconds()

    def clock(self) -> Any:
        """An event in the compute queue's stream, with a time."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(self._stream(COMPUTE))
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """Waits until the device has passed `stop`."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def memory(self) -> DeviceMemory | None:
        """As torch's allocator counts it, if it does; the limit is `memory_limit`."""
        if not tells_memory(self.device):
            return None
        allocated, peak = counted_bytes(self.device, "allocated"), counted_bytes(self.device, "peak")
        return DeviceMemory(allocated, peak, memory_limit(self.device))


def make_engine(device: torch.device) -> Engine:
    """An `AcceleratorEngine` for an accelerator, a `SynchronousEngine` for any other device."""
    return AcceleratorEngine(device) if is_accelerator(device) else SynchronousEngine(device)
