"""Allocate host memory: one stack for each micro-batch between forward and backward, allocated once
and reused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from streambp.errors import StreamBPError
from streambp.reporting import reason

ALIGNMENT = 64
NO_LIMIT = 2**62  # bytes, if a machine's memory is unknown
NO_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator|(can't|cannot|could not) (allocate|pin|register)|out of memory", re.I
)


def padded(size: int) -> int:
    """Return the bytes that a tensor of `size` bytes occupies in host memory, with the
    alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(eq=False)
class BufferStack:
    """Host memory that is allocated range after range and freed all at once, like a stack.

    Attributes:
        kind: purpose of the stack; stacks of one kind grow to similar sizes.
        segments: the memory.
        size: bytes of all segments.
        used: allocated bytes.
        last_uses: the last copy's event for each engine and queue; the content may be overwritten
            after these events. Copies of other devices count as well. [Note: offload order], wait 5
    """

    kind: str
    segments: list[Tensor] = dataclasses.field(default_factory=list)
    size: int = 0
    used: int = 0
    last_uses: dict[Any, Any] = dataclasses.field(default_factory=dict)
    _segment: int = 0
    _top: int = 0

    @property
    def left(self) -> int:
        """Return the bytes of the stack that can still be allocated."""
        if self._segment >= len(self.segments):
            return 0
        return sum(segment.numel() for segment in self.segments[self._segment :]) - self._top

    def push(self, size: int) -> Tensor | None:
        """Reserve `size` bytes and return them as a uint8 tensor [size]; None if the stack is
        full."""
        wanted = padded(size)
        while self._segment < len(self.segments):
            segment = self.segments[self._segment]
            if self._top + wanted <= segment.numel():
                start = self._top
                self._top += wanted
                self.used += wanted
                return segment[start : start + size]
            self._segment += 1
            self._top = 0
        return None


@dataclasses.dataclass(eq=False)
class Arena:
    """Pool of host memory within a budget. Memory is borrowed as stacks (`BufferStack`), and a
    returned stack is reused for the next request of its kind.

    Args:
        limit: budget in bytes.
        buffer: allocates a number of bytes.
        settle: waits until no copy accesses host memory any more.

    Attributes:
        allocated: bytes of all stacks.
        refused: the system's error text if an allocation within the budget failed.
    """

    limit: int
    buffer: Callable[[int], Tensor]
    settle: Callable[[], None] = lambda: None
    allocated: int = 0
    refused: str | None = None
    _free: list[BufferStack] = dataclasses.field(default_factory=list)

    def take(self, kind: str = "") -> BufferStack:
        """Return the stack of this kind that was returned last, or a new stack without memory."""
        for stack in reversed(self._free):
            if stack.kind == kind:
                self._free.remove(stack)
                return stack
        return BufferStack(kind)

    def give_back(self, stack: BufferStack) -> None:
        """Return a stack to the pool. All of its ranges become free, and its memory is reused for
        the same kind of stack."""
        stack.used = stack._segment = stack._top = 0
        self._free.append(stack)

    def grow(self, stack: BufferStack, size: int) -> bool:
        """Add `size` bytes of memory to a stack. Return False if the budget or the system refuses.

        Unused stacks are released first if the budget is short. `refused` contains the system's
        error text.
        """
        self.refused = None
        if self.allocated + size > self.limit and self._free:
            self.settle()
        while self.allocated + size > self.limit and self._free:
            self.allocated -= self._free.pop(0).size
        if self.allocated + size > self.limit:
            return False
        while True:
            try:
                stack.segments.append(self.buffer(size))
            except (MemoryError, RuntimeError) as error:
                if not isinstance(error, MemoryError) and NO_HOST_MEMORY.search(str(error)) is None:
                    raise
                self.refused = reason(error)
            else:
                stack.size += size
                self.allocated += size
                return True
            if not self._free:
                return False
            self.settle()  # retry without the free stacks
            while self._free:
                self.allocated -= self._free.pop().size


def local_ranks() -> int:
    """Return the number of ranks on this machine, as reported by the launcher (torchrun's
    LOCAL_WORLD_SIZE, for example)."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _text(path: Path) -> str:
    """Return the content of a file; "" if the file does not exist or has disappeared."""
    try:
        return path.read_text()
    except OSError:
        return ""


@functools.lru_cache(maxsize=16)
def _groups(cgroup: Path, members: str) -> tuple[tuple[Path, Path, Path, str], ...]:
    """Return the files with memory limits of this process's Linux control groups, and of all groups
    above.

    The files are: limit, bytes in use, and statistics, with the name of the cache statistic.
    Parents count because a batch system's limit is not at the root. Versions 1 and 2 are covered;
    an unlimited group of version 1 has a limit beyond any memory. The result is cached, because a
    training step asks five times a second.

    Args:
        cgroup: root folder of the groups.
        members: the groups of this process, as in /proc/self/cgroup.
    """
    own = {
        kinds: path
        for _, kinds, path in (
            line.split(":", 2) for line in members.splitlines() if line.count(":") > 1
        )
    }
    first = next((path for kinds, path in own.items() if "memory" in kinds.split(",")), "/")
    found = []
    for root, path, (most, current, cached) in (
        (cgroup, own.get("", "/"), ("memory.max", "memory.current", "inactive_file")),
        (
            cgroup / "memory",
            first,
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ):
        deepest = root / path.lstrip("/")
        for group in (deepest, *deepest.parents):
            limit = group / most
            used = group / current
            if group.is_relative_to(root) and limit.exists() and used.exists():
                found.append((limit, used, group / "memory.stat", cached))
    return tuple(found)


def host_limit(
    wanted: int | None,
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    set_aside: int = 0,
    membership: Path = Path("/proc/self/cgroup"),
) -> int:
    """Return the bytes of host memory that this rank may use.

    The result is `wanted` if given. Otherwise it is nine tenths of this rank's share of the free
    memory, or NO_LIMIT if the free memory is unknown. Free memory is limited by the machine and by
    its control groups.

    Args:
        wanted: requested bytes; None: no request.
        meminfo: file with the machine's memory.
        cgroup: root folder of the control groups.
        set_aside: bytes that this rank will allocate for other purposes.
        membership: file with the control groups of this process.

    Raises:
        StreamBPError: less memory is available than requested. The out-of-memory killer would raise
            no exception.
    """
    found = re.search(r"^MemAvailable:\s*(\d+)", _text(meminfo), re.MULTILINE)
    limits: list[float] = [] if found is None else [int(found[1]) * 1024]
    for limit, used, stat, cached in _groups(cgroup, _text(membership)):
        most = _text(limit).strip()
        if most.isdigit() and int(most) < NO_LIMIT:
            # Cache counts as free, as in MemAvailable: a checkpoint that was just read fills the
            # cache.
            cache = re.search(rf"^{cached} (\d+)", _text(stat), re.MULTILINE)
            limits.append(
                int(most) - int(_text(used) or 0) + (0 if cache is None else int(cache[1]))
            )
    ranks = local_ranks()
    available = min(limits, default=math.inf) / ranks
    if wanted is None:
        return max(0, int(0.9 * available) - set_aside) if available != math.inf else NO_LIMIT
    if wanted + set_aside > available:
        shared = f" for each of {ranks} ranks on this machine" if ranks > 1 else ""
        beside = (
            f", and the engine's offloading will take {set_aside / 2**30:.1f} GiB"
            if set_aside
            else ""
        )
        raise StreamBPError(
            f"host_memory is {wanted / 2**30:.1f} GiB, but only {available / 2**30:.1f} GiB of "
            f"host memory are available{shared}{beside}. Lower host_memory, or leave it out to use "
            "nine tenths of the available memory."
        )
    return wanted
