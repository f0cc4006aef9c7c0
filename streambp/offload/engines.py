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
import dataclasses
import time
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from streambp.device import counted_bytes, forget_error, is_accelerator, memory_limit, tells_memory

COMPUTE, OUT, BACK = "compute", "out", "back"
HOST = "host"  # no queue: the calling thread, which may wait as queues do
STALL = "stall_"  # before a queue's name: that compute waited for it
SPENT = (OUT, BACK, STALL + OUT, STALL + BACK)


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes allocated now, the most there were, and all that this process could have."""

    allocated: int
    peak: int
    limit: int


class Engine:
    """What moves bytes between a device and the host: here at once, on the calling thread, while nothing is under way.

    So it is for CPU models, where offloading frees nothing but can be tested.

    name: for a person.
    """

    name = "copies at once"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spent = dict.fromkeys(SPENT, 0.0)

    def beside(self, device: torch.device) -> Engine:
        """An engine for another device that uses the same host memory. [Note: several devices]"""
        return Engine(device)

    def host_buffer(self, size: int) -> Tensor:
        """`size` bytes of host memory [size], uint8, pinned where that matters."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def like(self, host: Tensor) -> Tensor:
        """An empty device tensor of the shape [...] and dtype of `host`, allocated for the compute queue."""
        return torch.empty_like(host, device=self.device)

    def record(self, queue: str) -> Any:
        """An event: everything that was put into the queue so far; None: all of it is done."""
        return None

    def wait(self, queue: str, event: Any) -> None:
        """What is put into the queue from now on comes after the event; HOST: this returns after it."""

    def settle(self) -> None:
        """Wait, on the calling thread, until all copies are done."""

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """Put a copy from `source` to `target` [...], of one shape and dtype, into the queue OUT or BACK."""
        start = time.perf_counter()
        target.copy_(source)
        seconds = time.perf_counter() - start
        self._spent[queue] += seconds
        self._spent[STALL + queue] += seconds  # compute waits while a copy runs

    def access(self, queue: str, tensor: Tensor, write: bool) -> None:
        """For checkers. COMPUTE: the queue has just written `tensor` [...], or reads or writes it next; HOST: the calling
        thread reads or writes this `tensor` of host memory next."""

    def spent(self) -> dict[str, float]:
        """Seconds that copies out and copies back took, and that compute has waited for either. Waits for the device, so
        call it outside of a step."""
        return dict(self._spent)

    def clock(self, queue: str = COMPUTE) -> Any:
        """Now, in the queue."""
        return time.perf_counter()

    def seconds(self, start: Any, stop: Any) -> float:
        """Between two readings of the clock; waits until the device has passed `stop`."""
        return float(stop - start)

    def memory(self) -> DeviceMemory | None:
        """Of the device, as torch's allocator counts it; the limit is `memory_limit`. None where it is not told."""
        if not tells_memory(self.device):
            return None
        allocated, peak = counted_bytes(self.device, "allocated"), counted_bytes(self.device, "peak")
        return DeviceMemory(allocated, peak, memory_limit(self.device))


PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices, not for the current one alone


class AcceleratorEngine(Engine):
    """Two side streams and events; the compute queue is whatever stream is current.

    Where host memory cannot be pinned, copies are synchronous, and one warning says so.

    Args:
        beside: the engine whose host memory this one uses; None: its own.

    pinned: all of its host memory is; otherwise no more is tried.
    """

    name = "copies beside the compute"

    def __init__(self, device: torch.device, beside: AcceleratorEngine | None = None) -> None:
        super().__init__(device)
        self.pinned, self._first = True, beside
        self._streams = {OUT: torch.Stream(device), BACK: torch.Stream(device)}
        self._running: collections.deque[tuple[str, torch.Event, torch.Event]] = collections.deque()

    def _stream(self, queue: str) -> torch.Stream:
        return self._streams[queue] if queue in self._streams else torch.accelerator.current_stream(self.device)

    def beside(self, device: torch.device) -> Engine:
        """Streams of its own, and the same host memory."""
        return AcceleratorEngine(device, self._first or self)

    def host_buffer(self, size: int) -> Tensor:
        """`size` bytes [size], uint8, for all devices; one warning the first time that they cannot be pinned."""
        host, on_cuda, error = self._first or self, self.device.type == "cuda", ""
        if host.pinned and not on_cuda:
            try:
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as refused:
                error = str(refused).partition("\n")[0]
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")  # [size]
        if host.pinned and on_cuda:  # in place: torch's own pinned memory has sizes that are powers of two
            runtime: Any = torch.cuda.cudart()
            code = int(runtime.cudaHostRegister(buffer.data_ptr(), size, PORTABLE))
            error = f"CUDA error {code}" if code else ""
            if not code:  # it is locked until its storage is freed
                weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, buffer.data_ptr())
        if error:
            host.pinned = False
            forget_error(self.device)
            warnings.warn(
                "Raise the limit on locked memory (ulimit -l) or lower host_memory: "
                f"{size / 2**30:.1f} GiB of host memory could not be pinned ({error}), so that copies are "
                "synchronous, and slow, from now on.",
                stacklevel=2,
            )
        return buffer

    def record(self, queue: str) -> Any:
        """The queue's name, and an event in its stream."""
        event = torch.Event(self.device)
        event.record(self._stream(queue))
        return queue, event

    def wait(self, queue: str, event: Any) -> None:
        """The stream waits, not the thread, but for HOST; how long compute waits is counted."""
        if event is None:
            return
        origin, recorded = event
        if queue == HOST:
            recorded.synchronize()
            return
        stream = self._stream(queue)
        if queue != COMPUTE or recorded.query():
            stream.wait_event(recorded)
            return
        before = self.clock()
        stream.wait_event(recorded)
        self._running.append((STALL + origin, before, self.clock()))
        self._add_up()

    def settle(self) -> None:
        """Waits for the streams of both directions, not for compute."""
        for stream in self._streams.values():
            stream.synchronize()

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """The copy to `target` [...], asynchronous if host memory is pinned; timed in the queue's stream."""
        with self._streams[queue]:
            before = self.clock(queue)
            target.copy_(source, non_blocking=(self._first or self).pinned)
            self._running.append((queue, before, self.clock(queue)))
        self._add_up()

    def _add_up(self) -> None:
        """Count the time between each pair of events that the device has passed; waits for nothing."""
        while self._running and self._running[0][2].query():
            name, before, after = self._running.popleft()
            self._spent[name] += before.elapsed_time(after) / 1e3

    def spent(self) -> dict[str, float]:
        """Of all that was put into the queues until now."""
        torch.accelerator.synchronize(self.device)
        self._add_up()
        return super().spent()

    def clock(self, queue: str = COMPUTE) -> Any:
        """An event in the queue's stream, with a time."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(self._stream(queue))
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """Waits until the device has passed `stop`."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def make_engine(device: torch.device) -> Engine:
    """An `AcceleratorEngine` for an accelerator, an `Engine` for any other device."""
    return AcceleratorEngine(device) if is_accelerator(device) else Engine(device)
