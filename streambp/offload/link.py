"""What may leave the device behind the compute: measured by the first forward of each length. [Note: saves on the host]"""

from __future__ import annotations

import math
from typing import Any

from streambp.offload.costs import LayerSeen, Measured, attention_rate
from streambp.offload.engines import OUT, DeviceMemory, Engine
from streambp.offload.manager import OffloadManager

FREE_SHARE = 0.9  # of what a step left free on the device; the rest is for fragments


class LinkBudget:
    """Measures the first forward of each length, within a factor of two.

    Args:
        manager: moves saved tensors to the host. on_device: also sets the manager's budget of the device, out of what the
            measured step left free. [Note: device budget]

    measured: by the number of bits of the length.
    """

    def __init__(self, manager: OffloadManager, on_device: bool) -> None:
        self.manager, self.on_device = manager, on_device
        self.measured: dict[int, Measured] = {}
        self._sent = 0.0, 0.0  # as the forward at work began: bytes moved to the host, and the seconds that took
        self._memory: dict[Engine, DeviceMemory] = {}  # as its first layer on each device began

    def __reduce__(self) -> Any:
        """A copied or pickled one has measured nothing."""
        return LinkBudget, (self.manager, self.on_device)

    def begin(self, length: int) -> Measured | None:
        """A forward begins: what forwards like it were measured to have; None: it is to be measured."""
        transfers = self.manager.transfers
        self._sent, self._memory = (transfers.bytes[OUT], transfers.spent()[OUT]), {}
        return self.measured.get(length.bit_length())

    def watch(self, seen: LayerSeen) -> LayerSeen:
        """To be told what a layer's forward costs, with its times."""
        _, seen.engine = self.manager.start(seen.device)
        memory = None if seen.engine in self._memory else seen.engine.memory()
        if memory is not None:
            self._memory[seen.engine] = memory
            if self.on_device and self.manager.gpu_memory is None:  # for prefixes, until it is measured
                half = (memory.limit - memory.allocated) // 2
                known = self.manager.prefix_memory
                self.manager.prefix_memory = half if known is None else min(known, half)
        return seen

    def measure(self, seen: list[LayerSeen]) -> None:
        """Of the forward before with these layers, if each layer's backward has run."""
        if not seen or not all(layer.engine is not None and layer.learnt() for layer in seen):
            return
        transfers, arena = self.manager.transfers, self.manager.arena
        moved, took = transfers.bytes[OUT] - self._sent[0], transfers.spent()[OUT] - self._sent[1]
        warm = seen[1:] or seen  # the first layer's kernels may have been made while it ran
        seconds = sum(sum(layer.times()) for layer in warm) * len(seen) / len(warm)
        link, rate = moved / took if moved and took else 1.0, attention_rate(warm)
        tokens, length = seen[0].tokens, seen[0].length
        host_room = math.inf if arena is None else arena.limit
        self.measured[length.bit_length()] = Measured(tokens, length, seconds, link, rate, host_room)
        # What a device has more than at first are the optimizer's states, born after the peak.
        pairs = [(before, engine.memory()) for engine, before in self._memory.items()]
        free = [now.limit - now.peak - max(0, now.allocated - one.allocated) for one, now in pairs if now is not None]
        if self.on_device and free and self.manager.prefix_memory is not None:
            left = min(self.manager.workspace, self.manager.prefix_memory) + max(0, int(FREE_SHARE * min(free)))
            self.manager.gpu_memory = self.manager.prefix_memory = left
