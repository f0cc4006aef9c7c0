"""Query the bytes that a step can allocate, on a device or in host memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import time
from pathlib import Path

import torch

from streambp.device import allocator_bytes, allocator_count, memory_limit, reports_memory
from streambp.errors import StreamBPError

UNLIMITED_BYTES = 2**62  # bytes, if a machine's memory is unknown
# fraction of a machine's free memory for a step; a machine without free memory raises no error
STEP_HOST_FRACTION = 0.5
HOST_MEMORY_CACHE_SECONDS = (
    0.2  # seconds between reads of the host's memory; a read takes a third of a millisecond
)
USABLE_DEVICE_FRACTION = 0.95  # fraction of the device; the rest is for fragmentation
USABLE_HOST_FRACTION = 0.9  # fraction of the free host memory that offloading may use
# The program has not asked for offloading here, and pinned memory cannot be swapped.
DEFAULT_HOST_FRACTION = 0.5
RESERVED_BYTES = 2**30  # bytes that stay free for other libraries


def free_memory(device: torch.device) -> float | None:
    """Return the bytes that a step can allocate on a device. The result is the limit of this
    process minus allocated tensors and a small reserve. Memory in the cache of torch's allocator
    counts as free.

    None if no limit is known, for example because the allocator has no statistics.
    """
    if not reports_memory(device):
        return None
    try:
        limit = memory_limit(device)
        allocated = allocator_bytes(device, "allocated")
    except RuntimeError:
        return None
    return min(USABLE_DEVICE_FRACTION * limit, limit - RESERVED_BYTES) - allocated


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
        seconds = time.monotonic()
        if seconds > self._until:
            host_bytes = host_limit(None)
            self._host = None
            if host_bytes != UNLIMITED_BYTES:
                self._host = STEP_HOST_FRACTION * host_bytes
            self._until = seconds + HOST_MEMORY_CACHE_SECONDS
        return self._host

    def forget(self) -> None:
        """Discard the driver's last answer at the start of a forward, so that the next call queries
        the driver. Other processes may use more or less memory now."""
        self._limits.clear()

    def sees_others(self, device: torch.device) -> bool:
        """True if the reported free memory of a device includes changes by other processes. If so,
        a shortage of memory does not prove that the policy's prediction was wrong. True for a CPU:
        its free memory is read again and again. False for a GPU: its driver is queried once for
        each forward."""
        return self._limits.get(device) is None

    def retries(self, device: torch.device) -> int:
        """Return how many times torch's allocator has freed its cache on `device` because an
        allocation failed (`num_alloc_retries`). An increase during a micro-batch shows that memory
        was short."""
        if self._limits.get(device) is None:
            return 0
        return allocator_count(device, "num_alloc_retries")


def _allocated(device: torch.device) -> int:
    """Return the bytes that torch's allocator has allocated on a device; 0 if unknown."""
    return allocator_bytes(device, "allocated") if reports_memory(device) else 0


def local_ranks() -> int:
    """Return the number of ranks on this machine, as reported by the launcher (torchrun's
    LOCAL_WORLD_SIZE, for example). The ranks share the host memory."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _text(path: Path) -> str:
    """Return the content of the file `path`, which has numbers about memory, such as /proc/meminfo.
    Return "" if the file does not exist or has disappeared."""
    try:
        return path.read_text()
    except OSError:
        return ""


@functools.lru_cache(maxsize=16)
def _groups(cgroup: Path, members: str) -> tuple[tuple[Path, Path, Path, str], ...]:
    """Return the files with memory limits of this process's Linux control groups (cgroups) and of
    all their parents.

    Each tuple has three files, with the limit, the bytes in use and the statistics of a group. The
    last entry is the statistic's name for the bytes of cached files, which the system can free.
    Parents count because a batch system may set the limit of a parent. Versions 1 and 2 are
    covered; an unlimited group of version 1 has a limit beyond any memory. The result is cached,
    because training calls this function several times a second.

    Args:
        cgroup: root folder of the groups.
        members: the groups of this process, as in /proc/self/cgroup.
    """
    group_paths = {
        kinds: path
        for _, kinds, path in (
            line.split(":", 2) for line in members.splitlines() if line.count(":") > 1
        )
    }
    first = next((path for kinds, path in group_paths.items() if "memory" in kinds.split(",")), "/")
    files = []
    for root, path, (limit_name, current, cached) in (
        (cgroup, group_paths.get("", "/"), ("memory.max", "memory.current", "inactive_file")),
        (
            cgroup / "memory",
            first,
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ):
        deepest = root / path.lstrip("/")
        for group in (deepest, *deepest.parents):
            limit = group / limit_name
            usage = group / current
            if group.is_relative_to(root) and limit.exists() and usage.exists():
                files.append((limit, usage, group / "memory.stat", cached))
    return tuple(files)


def host_limit(
    requested_bytes: int | None,
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    set_aside: int = 0,
    membership: Path = Path("/proc/self/cgroup"),
    part: float = USABLE_HOST_FRACTION,
) -> int:
    """Return the bytes of host memory that this rank may use.

    The result is `requested_bytes` if given. Otherwise it is a part of this rank's share of the
    free memory, or UNLIMITED_BYTES if the free memory is unknown. Free memory is limited by the
    machine and by its control groups.

    Args:
        requested_bytes: requested bytes; None: no request.
        meminfo: file with the machine's memory.
        cgroup: root folder of the control groups.
        set_aside: bytes that this rank will allocate for other purposes.
        membership: file with the control groups of this process.
        part: fraction of the rank's share, if `requested_bytes` is None.

    Raises:
        StreamBPError: less memory is available than requested. The out-of-memory killer would raise
            no exception.
    """
    match = re.search(r"^MemAvailable:\s*(\d+)", _text(meminfo), re.MULTILINE)
    limits: list[float] = [] if match is None else [int(match[1]) * 1024]
    for limit, usage, stat, cached in _groups(cgroup, _text(membership)):
        limit_text = _text(limit).strip()
        if limit_text.isdigit() and int(limit_text) < UNLIMITED_BYTES:
            # Cache counts as free, as in MemAvailable. A checkpoint that was just read fills the
            # cache.
            cache = re.search(rf"^{cached} (\d+)", _text(stat), re.MULTILINE)
            limits.append(
                int(limit_text) - int(_text(usage) or 0) + (0 if cache is None else int(cache[1]))
            )
    ranks = local_ranks()
    available = min(limits, default=math.inf) / ranks
    if requested_bytes is None:
        return (
            max(0, int(part * available) - set_aside) if available != math.inf else UNLIMITED_BYTES
        )
    if requested_bytes + set_aside > available:
        shared = f" for each of {ranks} ranks on this machine" if ranks > 1 else ""
        if set_aside:
            set_aside_text = f", and the engine's offloading will take {set_aside / 2**30:.1f} GiB"
        else:
            set_aside_text = ""
        raise StreamBPError(
            f"host_memory is {requested_bytes / 2**30:.1f} GiB, but only {available / 2**30:.1f} "
            f"GiB of host memory are available{shared}{set_aside_text}. Lower host_memory, or leave "
            "it out to use nine tenths of the available memory."
        )
    return requested_bytes
