"""Query the bytes that a step can allocate on a device."""

from __future__ import annotations

import dataclasses
import math
import time

import torch

from streambp.device import allocator_count, counted_bytes, memory_limit, tells_memory
from streambp.offload.arena import NO_LIMIT, host_limit

# fraction of a machine's free memory for a step; a machine without free memory raises no error
HOST_SHARE = 0.5
HOST_MEMORY_CACHE_SECONDS = (
    0.2  # seconds between reads of the host's memory; a read takes a third of a millisecond
)
USABLE = 0.95  # fraction of the device; the rest is for fragmentation
LEFT = 2**30  # bytes that stay free for other libraries


def free_memory(device: torch.device) -> float | None:
    """Return the bytes that a step can allocate on a device: free according to the driver, or
    cached by torch's allocator.

    None if no limit is known, for example because the allocator has no statistics.
    """
    if not tells_memory(device):
        return None
    try:
        limit = memory_limit(device)
        allocated = counted_bytes(device, "allocated")
    except RuntimeError:
        return None
    return min(USABLE * limit, limit - LEFT) - allocated


@dataclasses.dataclass
class FreeMemory:
    """Callable that returns the bytes a step can allocate on a device, without asking the driver
    each time; None if no limit is known.

    The driver is queried once. Afterwards torch's own statistics follow the changes, until
    `forget`. The value for a CPU is half of the machine's free memory, read from files every
    `HOST_MEMORY_CACHE_SECONDS` seconds.
    """

    _limits: dict[torch.device, float | None] = dataclasses.field(default_factory=dict)
    _host: float | None = None
    _until: float = -math.inf

    def __call__(self, device: torch.device) -> float | None:
        """Return the bytes that a step can allocate on `device` now; None if no limit is known. The
        value for a CPU may be a moment old."""
        if device not in self._limits:
            free = free_memory(device)
            if free is not None:
                free += _allocated(device)
            self._limits[device] = free
        limit = self._limits[device]
        if limit is not None:
            return limit - _allocated(device)
        if device.type != "cpu":
            return None
        now = time.monotonic()
        if now > self._until:
            found = host_limit(None)
            self._host = None
            if found != NO_LIMIT:
                self._host = HOST_SHARE * found
            self._until = now + HOST_MEMORY_CACHE_SECONDS
        return self._host

    def forget(self) -> None:
        """Discard the driver's last answer, so that the next call queries the driver. Other
        processes may use more or less memory now."""
        self._limits.clear()

    def sees_others(self, device: torch.device) -> bool:
        """True if the returned free memory includes later changes by other processes.

        A shortage of memory then does not prove that a prediction was wrong.
        """
        return self._limits.get(device) is None

    def retries(self, device: torch.device) -> int:
        """Return how many times torch's allocator has freed its cache because an allocation failed
        (`num_alloc_retries`)."""
        if self._limits.get(device) is None:
            return 0
        return allocator_count(device, "num_alloc_retries")


def _allocated(device: torch.device) -> int:
    """Return the bytes that torch's allocator has allocated on a device; 0 if unknown."""
    return counted_bytes(device, "allocated") if tells_memory(device) else 0
