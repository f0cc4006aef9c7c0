"""Allocate host memory: one stack for each micro-batch between forward and backward, allocated once
and reused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from streambp.reporting import reason

ALIGNMENT_BYTES = 64
HOST_MEMORY_ERROR = re.compile(
    r"DefaultCPUAllocator|(can't|cannot|could not) (allocate|pin|register)|out of memory", re.I
)


def padded(size: int) -> int:
    """Return the bytes that a tensor of `size` bytes occupies in a stack of host memory: `size`,
    rounded up to a multiple of 64 bytes (ALIGNMENT_BYTES)."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclasses.dataclass(eq=False)
class BufferStack:
    """Host memory from which ranges are taken one behind the other, like from a stack. No single
    range is freed: `Arena.give_back` frees all ranges at once. A full stack grows by another
    segment of memory. The next range begins at byte `_top` of segment `_segment`.

    Attributes:
        kind: purpose of the stack, such as "micro-batch". `Arena` reuses the stack only for the
            same purpose, which needs a similar number of bytes each time.
        segments: the memory, as tensors [bytes] in uint8.
        size: bytes of all segments.
        used_bytes: bytes of the allocated ranges.
        last_uses: dict from (a device's `Engine`, name of its queue) to the event of the last copy
            that read or wrote this memory. A copy that overwrites the memory must wait for all of
            these events (wait 5 of [Note: offload order]).
    """

    kind: str
    segments: list[Tensor] = dataclasses.field(default_factory=list)
    size: int = 0
    used_bytes: int = 0
    last_uses: dict[Any, Any] = dataclasses.field(default_factory=dict)
    _segment: int = 0
    _top: int = 0

    @property
    def free_bytes(self) -> int:
        """Return the bytes of the stack that can still be allocated without growing it."""
        if self._segment >= len(self.segments):
            return 0
        return sum(segment.numel() for segment in self.segments[self._segment :]) - self._top

    def push(self, size: int) -> Tensor | None:
        """Reserve `size` bytes and return them as a uint8 tensor [size]; None if the stack is full,
        and `Arena.grow` must add memory first."""
        padded_size = padded(size)
        while self._segment < len(self.segments):
            segment = self.segments[self._segment]
            if self._top + padded_size <= segment.numel():
                start = self._top
                self._top += padded_size
                self.used_bytes += padded_size
                return segment[start : start + size]
            self._segment += 1
            self._top = 0
        return None


@dataclasses.dataclass(eq=False)
class Arena:
    """Pool of host memory within a budget. Memory is borrowed as stacks (`BufferStack`), and a
    returned stack is reused for the next request with the same purpose (`BufferStack.kind`).

    Args:
        limit: budget in bytes.
        buffer: function that allocates a number of bytes of host memory.
        settle: function that waits until no copy accesses host memory any more.

    Attributes:
        allocated: bytes of all stacks, borrowed or free.
        system_error: error text of the system, if the last call of `grow` failed within the budget;
            None otherwise.
    """

    limit: int
    buffer: Callable[[int], Tensor]
    settle: Callable[[], None] = lambda: None
    allocated: int = 0
    system_error: str | None = None
    _free: list[BufferStack] = dataclasses.field(default_factory=list)

    @property
    def idle(self) -> int:
        """Return the bytes of all stacks that are not borrowed."""
        return sum(stack.size for stack in self._free)

    def largest_idle(self, kind: str) -> int:
        """Return the bytes of the stack that `take` would return, or 0 if the stack would be new.
        If several stacks of this kind are free, the stack that came back last counts. Others may be
        larger.

        Args:
            kind: purpose of the stack (`BufferStack.kind`).
        """
        sizes = [stack.size for stack in self._free if stack.kind == kind]
        return sizes[-1] if sizes else 0

    def take(self, kind: str = "") -> BufferStack:
        """Return a free stack of this kind and remove the stack from the pool. The stack that came
        back last is taken first. If the pool has no such stack, return a new stack without memory.

        Args:
            kind: purpose of the stack (`BufferStack.kind`).
        """
        for stack in reversed(self._free):
            if stack.kind == kind:
                self._free.remove(stack)
                return stack
        return BufferStack(kind)

    def give_back(self, stack: BufferStack) -> None:
        """Return a stack to the pool. All of its ranges become free, and its memory is reused for
        the same kind of stack."""
        stack.used_bytes = stack._segment = stack._top = 0
        self._free.append(stack)

    def grow(self, stack: BufferStack, size: int) -> bool:
        """Add `size` bytes of memory to a stack, and return True. Return False, with the stack
        unchanged, if the budget or the system refuses.

        Free stacks of the pool are released first if the budget is short. If the system refused
        memory within the budget, `system_error` contains the system's error text.

        Args:
            stack: the stack.
            size: number of bytes.
        """
        self.system_error = None
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
                if (
                    not isinstance(error, MemoryError)
                    and HOST_MEMORY_ERROR.search(str(error)) is None
                ):
                    raise
                self.system_error = reason(error)
            else:
                stack.size += size
                self.allocated += size
                return True
            if not self._free:
                return False
            self.settle()  # retry without the free stacks
            while self._free:
                self.allocated -= self._free.pop().size
