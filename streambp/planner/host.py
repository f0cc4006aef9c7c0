"""Count the host memory of a step apart from its device memory."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from streambp.offload.engines import FROM_HOST_QUEUE, TO_HOST_QUEUE, Engine
from streambp.offload.manager import OffloadManager
from streambp.offload.transfers import MICRO_BATCH, MicroBatchMemory, TensorEntry
from streambp.planner.count import one_kernel
from streambp.planner.skeleton import Skeleton


class UncountedHost(Engine):
    """Object that allocates host memory and copies tensors to it (an offload engine), for a step
    whose device memory is added up. The step has a single device, the CPU or meta, so the sum would
    include host memory. This class allocates host memory outside of the sum. Copies are
    synchronous.

    Args:
        device: the device of the run.
        skeleton: the model without data; host memory then has no data either. None: host memory has
            data.
    """

    def __init__(self, device: torch.device, skeleton: Skeleton | None = None) -> None:
        super().__init__(device)
        self._skeleton = skeleton

    def host_buffer(self, size: int) -> Tensor:
        """Return a uint8 tensor [size] as host memory, allocated outside of the dispatch mode that
        counts the step's device memory. The mode would otherwise count the tensor, because the step
        has a single device."""
        with (
            _disable_current_modes(),
            self._skeleton.active() if self._skeleton is not None else contextlib.nullcontext(),
        ):
            return torch.empty(size, dtype=torch.uint8)

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        """Copy `source` to `target`, both of the same shape [...], between device and host. The
        bytes are added to the step's traffic, from which the planner predicts seconds.

        Args:
            queue: `TO_HOST_QUEUE` or `FROM_HOST_QUEUE`, the direction of the copy.
            target: destination.
            source: source.
        """
        size = target.nbytes
        with one_kernel(
            0,
            to_host=size if queue == TO_HOST_QUEUE else 0,
            from_host=size if queue == FROM_HOST_QUEUE else 0,
        ):
            super().copy(queue, target, source)


class CountingManager(OffloadManager):
    """Offload manager that adds up the host bytes of a step, without real copies to pinned memory.

    The sum has the bytes of the tensors that are stored until backward. If layers read keys and
    values from the host chunk by chunk, those of the largest layer are added: only one layer's are
    on the host at a time.

    Args:
        layers: number of layers of the model.
        gpu_memory: device bytes for keys and values of the running layer and for saved tensors;
            None: keys and values stay on the device.
        engine: the engine that allocates the host memory; None: the usual engine of the device.
    """

    def __init__(
        self, layers: int = 0, gpu_memory: int | None = None, engine: UncountedHost | None = None
    ) -> None:
        super().__init__(None, "raise", layers, gpu_memory, engine=engine)
        self.begin()

    def begin(self) -> None:
        """Set the counted host bytes to 0 for a new step."""
        self._waiting = self._prefix = 0

    def on_host(self) -> int:
        """Return the host bytes that the step has needed so far: the stored tensors and the largest
        layer's keys and values."""
        return self._waiting + self._prefix

    def move_to_host(
        self,
        holding: MicroBatchMemory,
        engine: Engine,
        tensor: Tensor,
        optional: bool,
        needs_clone: bool = False,
    ) -> TensorEntry | None:
        """Store a tensor [...] on the host like `OffloadManager.move_to_host`, and add its bytes to
        the host memory of the step. Return the record of the copy, from which backward reads the
        tensor.

        The bytes of all tensors saved for backward are added up. Keys and values are on the host
        for one layer at a time, so the largest layer's bytes are counted.

        Args:
            holding: host memory of the micro-batch.
            engine: engine of the tensor's device.
            tensor: the tensor.
            optional: True if backward can recompute the tensor.
            needs_clone: True if other code may change the tensor in place before the copy has
                ended.
        """
        entry = super().move_to_host(holding, engine, tensor, optional, needs_clone)
        if holding.stack.kind == MICRO_BATCH:
            self._waiting += tensor.nbytes
        else:
            self._prefix = max(self._prefix, holding.stack.used_bytes)
        return entry
