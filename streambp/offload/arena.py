"""Host memory: one stack for each micro-batch between its forward and its backward, allocated once and used again."""

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
NO_LIMIT = 2**62  # bytes, where nothing says how much memory a machine has
NO_HOST_MEMORY = re.compile(r"DefaultCPUAllocator|(can't|cannot|could not) (allocate|pin|register)|out of memory", re.I)


def padded(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes on a stack."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(eq=False)
class BufferStack:
    """Ranges handed out one behind the other, all given back together.

    kind: stacks of one kind serve the same purpose and grow to similar sizes. size: bytes, handed out or not.
    last_uses: the events after which its contents may be written over, the last copy of each engine and queue.
        [Note: offload order], wait 5; that a queue waits for another device's copies out matters as well
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
        """Bytes that can still be handed out."""
        if self._segment >= len(self.segments):
            return 0
        return sum(segment.numel() for segment in self.segments[self._segment :]) - self._top

    def push(self, size: int) -> Tensor | None:
        """`size` bytes [size]; None if the stack is full."""
        wanted = padded(size)
        while self._segment < len(self.segments):
            segment = self.segments[self._segment]
            if self._top + wanted <= segment.numel():
                start, self._top = self._top, self._top + wanted
                self.used += wanted
                return segment[start : start + size]
            self._segment, self._top = self._segment + 1, 0
        return None


@dataclasses.dataclass(eq=False)
class Arena:
    """Stacks within a budget. A stack that is given back is the next of its kind to be handed out.

    Args:
        limit: bytes. buffer: allocates as many. settle: waits until no copy reads or writes host memory any more.

    refused: what the system said when it gave no memory within the budget.
    """

    limit: int
    buffer: Callable[[int], Tensor]
    settle: Callable[[], None] = lambda: None
    allocated: int = 0
    refused: str | None = None
    _free: list[BufferStack] = dataclasses.field(default_factory=list)

    def take(self, kind: str = "") -> BufferStack:
        """The free stack of that kind that was given back last, or a new one, which has no memory yet."""
        for stack in reversed(self._free):
            if stack.kind == kind:
                self._free.remove(stack)
                return stack
        return BufferStack(kind)

    def give_back(self, stack: BufferStack) -> None:
        """Take a stack back: all its ranges are free, and its memory waits for the next of its kind."""
        stack.used = stack._segment = stack._top = 0
        self._free.append(stack)

    def grow(self, stack: BufferStack, size: int) -> bool:
        """Add `size` bytes to a stack; False if that would exceed the budget even without the stacks that are free, or if
        the system does not give as many: then `refused` has its words."""
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
            self.settle()  # once more without the stacks that are free
            while self._free:
                self.allocated -= self._free.pop().size


def local_ranks() -> int:
    """How many ranks share this machine's memory, as the launcher says."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _text(path: Path) -> str:
    """What is in a file; "" if it is not there, or is gone since."""
    try:
        return path.read_text()
    except OSError:
        return ""


@functools.lru_cache(maxsize=16)
def _groups(cgroup: Path, members: str) -> tuple[tuple[Path, Path, Path, str], ...]:
    """Files of this process's control groups and all above them, as a batch system's limit is not at the root: limit, bytes
    in use, counts, and the name of the count of cache. Of version 2 and of version 1, whose limit of a group without one is
    beyond any memory. They are looked for once: a training step asks five times a second.

    Args:
        cgroup: where groups are. members: of which this process is one, as /proc/self/cgroup lists them.
    """
    own = {kinds: path for _, kinds, path in (line.split(":", 2) for line in members.splitlines() if line.count(":") > 1)}
    first = next((path for kinds, path in own.items() if "memory" in kinds.split(",")), "/")
    found = []
    for root, path, (most, current, cached) in (
        (cgroup, own.get("", "/"), ("memory.max", "memory.current", "inactive_file")),
        (cgroup / "memory", first, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):
        deepest = root / path.lstrip("/")
        for group in (deepest, *deepest.parents):
            limit, used = group / most, group / current
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
    """Bytes of host memory that this rank may use: `wanted`, but no more than its share of what this machine and its
    control group have free; NO_LIMIT where that is not known.

    Args:
        set_aside: bytes that this rank will allocate for other things.

    Raises:
        StreamBPError: less is available than wanted. The out-of-memory killer would give no exception.
    """
    found = re.search(r"^MemAvailable:\s*(\d+)", _text(meminfo), re.MULTILINE)
    limits: list[float] = [] if found is None else [int(found[1]) * 1024]
    for limit, used, stat, cached in _groups(cgroup, _text(membership)):
        most = _text(limit).strip()
        if most.isdigit() and int(most) < NO_LIMIT:
            # MemAvailable counts such cache as free as well: a checkpoint that was just read fills it.
            cache = re.search(rf"^{cached} (\d+)", _text(stat), re.MULTILINE)
            limits.append(int(most) - int(_text(used) or 0) + (0 if cache is None else int(cache[1])))
    ranks = local_ranks()
    available = min(limits, default=math.inf) / ranks
    if wanted is None:
        return max(0, int(0.9 * available) - set_aside) if available != math.inf else NO_LIMIT
    if wanted + set_aside > available:
        shared = f" for each of {ranks} ranks on this machine" if ranks > 1 else ""
        beside = f", and the engine's offloading will take {set_aside / 2**30:.1f} GiB" if set_aside else ""
        raise StreamBPError(
            f"host_memory is {wanted / 2**30:.1f} GiB, but only {available / 2**30:.1f} GiB of host memory are available"
            f"{shared}{beside}. Lower host_memory, or free memory; leave it out to use nine tenths of what there is."
        )
    return wanted
