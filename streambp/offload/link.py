"""Measure, in the first forward of each length, how many bytes can be copied to the host while the
device computes.

The policy chooses as many saved tensors for the host as hide behind the compute.
"""

from __future__ import annotations

import math
from typing import Any

from streambp.offload.costs import ForwardMeasurement, ObservedCosts, attention_rate
from streambp.offload.engines import TO_HOST_QUEUE, DeviceMemory, Engine
from streambp.offload.manager import OffloadManager

USABLE_FREE_FRACTION = 0.9  # fraction of a step's free device memory; the rest is for fragmentation


class LinkBudget:
    """Measures, in a model's first forward, how many bytes can be copied to the host while the
    device computes. Later forwards of similar length (within a factor of two) use the result.

    Args:
        manager: moves saved tensors to the host.
        on_device: True to also set the manager's `gpu_memory`, from the memory that the measured
            step left free. False: `gpu_memory` stays as the user has set it.

    Attributes:
        measured: the measurements of one forward for each range of row lengths; the key is
            `length.bit_length()`, which is equal for similar lengths.
    """

    def __init__(self, manager: OffloadManager, on_device: bool) -> None:
        self.manager = manager
        self.on_device = on_device
        self.measured: dict[int, ForwardMeasurement] = {}
        self._prefix = 0.0  # bytes of a layer's keys and values in backward, for each token
        self._sent = 0.0, 0.0  # bytes moved to the host, and seconds, at a forward's start
        self._memory: dict[Engine, DeviceMemory] = {}  # at the first layer of each device

    def __reduce__(self) -> Any:
        """Return the class and arguments of a copy without measurements, for copy and pickle."""
        return LinkBudget, (self.manager, self.on_device)

    def begin(self, length: int) -> ForwardMeasurement | None:
        """Begin a forward of the model. Return the measurements of an earlier forward of similar
        length, or None if this forward must be measured.

        Args:
            length: tokens of each row.
        """
        transfers = self.manager.transfers
        self._sent = (transfers.bytes[TO_HOST_QUEUE], transfers.queue_seconds()[TO_HOST_QUEUE])
        self._memory = {}
        return self.measured.get(length.bit_length())

    @property
    def is_measured(self) -> bool:
        """True if the manager's `gpu_memory`, the bytes for saved tensors that stay on the device,
        was measured in a step. Copies that are under way need a part of these bytes. False if the
        user has set `gpu_memory`: copies then need device memory in addition."""
        return self.on_device and self.manager.gpu_memory is not None

    def room_on_device(self, tokens: int) -> float:
        """Return the bytes of the manager's `gpu_memory` that are free for saved tensors that stay
        on the device. K and V of the running layer and saved tensors of earlier micro-batches are
        subtracted. K and V take precedence: on the host they would be copied once for each chunk,
        and a saved tensor is copied only once.

        Args:
            tokens: tokens over all rows.
        """
        manager = self.manager
        if manager.gpu_memory is None:
            return 0.0
        prefix = self._prefix * tokens
        return max(
            0.0, manager.gpu_memory - min(prefix, manager.gpu_memory) - manager.resident_bytes
        )

    def time_chunks(self, observed_costs: ObservedCosts) -> ObservedCosts:
        """Set the engine of a layer's measurements, so that the layer's chunks are timed. Called in
        a forward for which `begin` has returned None. The first call for a device also limits the
        manager's `prefix_memory`, if `gpu_memory` is still to be determined.

        Args:
            observed_costs: measurements of the layer's forward; changed and returned.
        """
        _, observed_costs.engine = self.manager.start(observed_costs.device)
        memory = None if observed_costs.engine in self._memory else observed_costs.engine.memory()
        if memory is not None:
            self._memory[observed_costs.engine] = memory
            if self.on_device and self.manager.gpu_memory is None:  # for prefixes, until measured
                half_of_free = (memory.limit - memory.allocated) // 2
                prefix_memory = self.manager.prefix_memory
                self.manager.prefix_memory = (
                    half_of_free if prefix_memory is None else min(prefix_memory, half_of_free)
                )
        return observed_costs

    def measure(self, layer_costs: list[ObservedCosts]) -> None:
        """Store the measurements of the previous forward in `measured`, if every layer was timed
        and its backward has run. If `on_device`, also set the manager's `gpu_memory`.

        Args:
            layer_costs: measurements of each layer's forward.
        """
        if not layer_costs or not all(
            layer.engine is not None and layer.measured_cost() for layer in layer_costs
        ):
            return
        transfers = self.manager.transfers
        arena = self.manager.arena
        sent_bytes = transfers.bytes[TO_HOST_QUEUE] - self._sent[0]
        copy_seconds = transfers.queue_seconds()[TO_HOST_QUEUE] - self._sent[1]
        warm_layers = layer_costs[1:] or layer_costs  # the first layer may include compilation
        seconds = (
            sum(sum(layer.chunk_seconds()) for layer in warm_layers)
            * len(layer_costs)
            / len(warm_layers)
        )
        link = sent_bytes / copy_seconds if sent_bytes and copy_seconds else 1.0
        rate = attention_rate(warm_layers)
        tokens = layer_costs[0].tokens
        length = layer_costs[0].length
        self._prefix = self.manager.workspace / tokens
        host_room = math.inf if arena is None else arena.limit
        self.measured[length.bit_length()] = ForwardMeasurement(
            tokens, length, seconds, link, rate, host_room
        )
        # Memory that was added since the start is the optimizer's states, allocated after the peak.
        pairs = [(memory_before, engine.memory()) for engine, memory_before in self._memory.items()]
        free = [
            end.limit - end.peak - max(0, end.allocated - start.allocated)
            for start, end in pairs
            if end is not None
        ]
        if self.on_device and free and self.manager.prefix_memory is not None:
            gpu_memory = min(self.manager.workspace, self.manager.prefix_memory) + max(
                0, int(USABLE_FREE_FRACTION * min(free))
            )
            self.manager.gpu_memory = self.manager.prefix_memory = gpu_memory
