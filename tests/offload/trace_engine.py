"""A race checker: the manager's engine with queues that exist on paper only.

Each queue has a vector clock. An event carries its queue's clock, a wait takes the maximum, and
every access to memory is compared with the accesses before it: two of them, at least one a write,
race unless one happened before the other. Device memory is handed out like a caching allocator does
it: a freed block is given to the next tensor, whoever read it last.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor

from streambp.errors import StreamBPError
from streambp.offload.engines import (
    COMPUTE_QUEUE,
    FROM_HOST_QUEUE,
    HOST_QUEUE,
    TO_HOST_QUEUE,
    Engine,
)

QUEUES = (
    COMPUTE_QUEUE,
    TO_HOST_QUEUE,
    FROM_HOST_QUEUE,
    HOST_QUEUE,
)  # the last is the thread that puts work into the others
Clock = dict[str, int]


class RaceError(StreamBPError):
    """Two accesses to the same memory that nothing orders."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A range of memory. Two lives of a device block overlap everywhere; within one, ranges are
    told apart by their start (chunks of a batch interleave)."""

    memory: str
    life: int
    start: int


@dataclasses.dataclass
class World:
    """What the engines of all devices see of each other: their queues' clocks, and who used which
    memory.

    accesses: by memory; queue, time, whether it was a write, and where. thread: the calling thread
    is one of those who used the host's.
    """

    collect: bool
    races: list[str] = dataclasses.field(default_factory=list)
    clocks: dict[str, Clock] = dataclasses.field(default_factory=dict)
    accesses: dict[str, list[tuple[str, int, bool, Place]]] = dataclasses.field(
        default_factory=dict
    )
    checked: int = 0
    thread: bool = False

    def users(self) -> list[str]:
        """Of host memory."""
        return [name for name in self.clocks if self.thread or not name.endswith(HOST_QUEUE)]


class TraceEngine(Engine):
    """Copies at once, as on CPU, and raises RaceError where a GPU might have read or written too
    early.

    Args:
        collect: keep the races' descriptions in `races` and go on.
        name, world: of one among several devices (`offload/engines.py`).
    """

    def __init__(self, collect: bool = False, name: str = "", world: World | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._name = name
        self._world = world or World(collect)
        self._queues = [name + queue for queue in QUEUES if queue != HOST_QUEUE]
        self._world.clocks.update({name + queue: {} for queue in QUEUES})
        self._blocks: dict[
            int, tuple[int, int]
        ] = {}  # storage of a device tensor -> its block and which life of it
        self._free: list[int] = []
        self._lives = 0

    def engine_for(self, device: torch.device) -> TraceEngine:
        return TraceEngine(name=f"{device} ", world=self._world)

    @property
    def races(self) -> list[str]:
        return self._world.races

    @property
    def checked(self) -> int:
        """Pairs of accesses that were compared."""
        return self._world.checked

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def empty_like(self, host: Tensor) -> Tensor:
        return torch.empty_like(host)

    def record(self, queue: str) -> Any:
        clock = self._world.clocks[self._name + queue]
        clock[self._name + queue] = clock.get(self._name + queue, 0) + 1
        return dict(clock)

    def wait(self, queue: str, event: Any) -> None:
        clock = self._world.clocks[self._name + queue]
        for name, when in (event or {}).items():
            clock[name] = max(clock.get(name, 0), when)

    def settle(self) -> None:
        copies = [
            clock
            for name, clock in self._world.clocks.items()
            if name.endswith((TO_HOST_QUEUE, FROM_HOST_QUEUE))
        ]
        for queue in QUEUES:
            for clock in copies:
                self.wait(queue, clock)

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        if queue == TO_HOST_QUEUE:  # it begins when the thread has read what was there
            self.wait(TO_HOST_QUEUE, self._world.clocks[self._name + HOST_QUEUE])
        device, host = (source, target) if queue == TO_HOST_QUEUE else (target, source)
        self._access(queue, self._device(device), self._queues, write=queue == FROM_HOST_QUEUE)
        self._access(
            queue,
            Place("host", 0, host.data_ptr()),
            self._world.users(),
            write=queue == TO_HOST_QUEUE,
        )
        target.copy_(source)

    def access(self, queue: str, tensor: Tensor, write: bool) -> None:
        if queue == COMPUTE_QUEUE:
            self._access(COMPUTE_QUEUE, self._device(tensor), self._queues, write)
        else:
            self._world.thread = True
            self._access(
                HOST_QUEUE, Place("host", 0, tensor.data_ptr()), self._world.users(), write
            )

    def clock(self, queue: str = COMPUTE_QUEUE) -> Any:
        return 0.0

    def _device(self, tensor: Tensor) -> Place:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            if not self._free:
                self._free.append(len(self._blocks))
            self._lives += 1
            self._blocks[key] = (self._free.pop(), self._lives)
            weakref.finalize(storage, self._release, key)
        block, life = self._blocks[key]
        return Place(f"{self._name}device block {block}", life, int(tensor.storage_offset()))

    def _release(self, key: int) -> None:
        self._free.append(self._blocks.pop(key)[0])

    def _access(self, queue: str, location: Place, users: list[str], write: bool) -> None:
        """users: the queues that can reach this memory."""
        world, queue = self._world, self._name + queue
        self.record(queue.removeprefix(self._name))
        mine = world.clocks[queue]
        accesses = world.accesses.setdefault(location.memory, [])
        for other_queue, when, wrote, other_location in accesses:
            world.checked += 1
            conflict = (write or wrote) and (
                other_location.life != location.life or other_location.start == location.start
            )
            if conflict and other_queue != queue and mine.get(other_queue, 0) < when:
                verb, participle = (
                    ("writes" if write else "reads"),
                    ("writing" if wrote else "reading"),
                )
                world.races.append(
                    f"{queue} {verb} {location.memory} while {other_queue} may still be "
                    f"{participle} it"
                )
                if not world.collect:
                    raise RaceError(f"{world.races[-1]}. A wait is missing.")
        # What every queue has seen can race with nothing any more.
        pending = [
            access
            for access in accesses
            if any(world.clocks[user].get(access[0], 0) < access[1] for user in users)
        ]
        world.accesses[location.memory] = [*pending, (queue, mine[queue], write, location)]
