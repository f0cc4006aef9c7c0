"""Streams, events and copies, as the manager sees them.

[Note: offload order] Three queues: compute, out (device to host) and back (host to device). Six waits order them:

    1  out waits for compute      before it reads a tensor: its producer must be done
    2  back waits for compute     before it writes a fresh tensor: whoever had that memory before must be done
    3  back waits for out         before it reads host memory: the copy there must be done
    4  compute waits for back     before it reads a tensor that came back
    5  out waits for back         before it overwrites host memory: it must have been read
    6  compute waits for out      before a source is let go: its memory may be written next

The manager speaks only this interface, so that `trace.TraceEngine` can check the waits without a GPU.
"""

from __future__ import annotations

import time
import warnings
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

COMPUTE, OUT, BACK = "compute", "out", "back"


class Engine(Protocol):
    """What moves bytes between a device and the host."""

    def host_buffer(self, size: int) -> Tensor:
        """`size` bytes of host memory [size], uint8, pinned where that matters."""
        ...

    def like(self, host: Tensor) -> Tensor:
        """A device tensor shaped like `host`, allocated for the compute queue."""
        ...

    def record(self, queue: str) -> Any:
        """An event: everything that was put into the queue so far."""
        ...

    def wait(self, queue: str, event: Any) -> None:
        """What is put into the queue from now on comes after the event."""
        ...

    def done(self, event: Any) -> bool:
        """Whether the event has passed already."""
        ...

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None: ...

    def compute_access(self, tensor: Tensor, write: bool) -> None:
        """The compute queue has just written `tensor`, or reads it next; for checkers."""
        ...

    def stalls(self) -> dict[str, float]:
        """Seconds that compute has waited for copies out and copies back."""
        ...


class SynchronousEngine:
    """Copies at once, on the calling thread: for CPU models, where offloading frees nothing but can be tested."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = {OUT: 0.0, BACK: 0.0}

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def like(self, host: Tensor) -> Tensor:
        return torch.empty_like(host, device=self.device)

    def record(self, queue: str) -> Any:
        return None

    def wait(self, queue: str, event: Any) -> None:
        pass

    def done(self, event: Any) -> bool:
        return True

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        start = time.perf_counter()
        target.copy_(source)
        self._seconds[queue] += time.perf_counter() - start

    def compute_access(self, tensor: Tensor, write: bool) -> None:
        pass

    def stalls(self) -> dict[str, float]:
        return dict(self._seconds)


class CudaEngine:
    """Two side streams and events; the compute queue is whatever stream is current."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {OUT: torch.cuda.Stream(device), BACK: torch.cuda.Stream(device)}
        self._waits: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = {OUT: 0.0, BACK: 0.0}
        self._origin: dict[int, str] = {}

    def _stream(self, queue: str) -> torch.cuda.Stream:
        return self._streams[queue] if queue in self._streams else torch.cuda.current_stream(self.device)

    def host_buffer(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)  # type: ignore[attr-defined]
        if int(error) != 0:
            warnings.warn(
                f"{size / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {int(error)}); copies will be "
                "synchronous and slow. Raise the limit on locked memory, or lower host_memory.",
                stacklevel=2,
            )
        else:
            weakref.finalize(buffer.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, buffer.data_ptr())  # type: ignore[attr-defined]
        return buffer

    def like(self, host: Tensor) -> Tensor:
        return torch.empty_like(host, device=self.device)

    def record(self, queue: str) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(queue))
        self._origin[id(event)] = queue
        return event

    def wait(self, queue: str, event: Any) -> None:
        if event is None:
            return
        if queue == COMPUTE and not event.query():
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            stream = self._stream(queue)
            before.record(stream)
            stream.wait_event(event)
            after.record(stream)
            self._waits.append((self._origin.get(id(event), BACK), before, after))
            return
        self._stream(queue).wait_event(event)

    def done(self, event: Any) -> bool:
        return event is None or bool(event.query())

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream(queue)):
            target.copy_(source, non_blocking=True)

    def compute_access(self, tensor: Tensor, write: bool) -> None:
        pass

    def stalls(self) -> dict[str, float]:
        """Waits for the device, so call it outside of a step."""
        torch.cuda.synchronize(self.device)
        for queue, before, after in self._waits:
            self._seconds[queue] += before.elapsed_time(after) / 1e3
        self._waits.clear()
        return dict(self._seconds)


def make_engine(device: torch.device) -> Engine:
    return CudaEngine(device) if device.type == "cuda" else SynchronousEngine(device)
