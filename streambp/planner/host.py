"""Host memory of a step that is counted: its bytes, and none of them allocated on the device that is counted."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from streambp.offload.engines import BACK, OUT, Engine
from streambp.offload.manager import OffloadManager
from streambp.offload.transfers import MICRO_BATCH, Entry, Holding
from streambp.planner.count import one_kernel
from streambp.planner.skeleton import Skeleton


class UncountedHost(Engine):
    """Copies at once, like a CPU's; host memory stays out of the count of the device's."""

    def __init__(self, device: torch.device, skeleton: Skeleton | None = None) -> None:
        super().__init__(device)
        self._skeleton = skeleton

    def host_buffer(self, size: int) -> Tensor:
        """`size` bytes [size], uint8, allocated while the modes that count are off."""
        with _disable_current_modes(), self._skeleton.active() if self._skeleton is not None else contextlib.nullcontext():
            return torch.empty(size, dtype=torch.uint8)

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """The bytes of `target` [...] are counted as those of the link."""
        size = target.nbytes
        with one_kernel(0, out=size if queue == OUT else 0, back=size if queue == BACK else 0):
            super().copy(queue, target, source)


class CountingManager(OffloadManager):
    """Counts the host's bytes of a step: what waits for backward, and at most of one layer's keys and values."""

    def __init__(self, layers: int = 0, gpu_memory: int | None = None, engine: UncountedHost | None = None) -> None:
        super().__init__(None, "raise", layers, gpu_memory, engine=engine)
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._waiting = self._prefix = 0

    def on_host(self) -> int:
        """Bytes of host memory that the step has needed so far."""
        return self._waiting + self._prefix

    def place(
        self, holding: Holding, engine: Engine, tensor: Tensor, optional: bool, foreign: bool = False
    ) -> Entry | None:
        """`OffloadManager.place` of a tensor [...], counted: saved tensors add up, of prefixes the largest counts."""
        entry = super().place(holding, engine, tensor, optional, foreign)
        if holding.stack.kind == MICRO_BATCH:
            self._waiting += tensor.nbytes
        else:
            self._prefix = max(self._prefix, holding.stack.used)
        return entry
