"""A race checker: the manager's engine with queues that exist on paper only.

Each queue has a vector clock. An event carries its queue's clock, a wait takes the maximum, and every access to memory is
compared with the accesses before it: two of them, at least one a write, race unless one happened before the other. Device
memory is handed out like a caching allocator does it: a freed block is given to the next tensor, whoever read it last.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor

from streambp.errors import StreamBPError
from streambp.offload.engines import BACK, COMPUTE, OUT, DeviceMemory

QUEUES = (COMPUTE, OUT, BACK)
Clock = dict[str, int]


class RaceError(StreamBPError):
    """Two accesses to the same memory that nothing orders."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A range of memory. Two lives of a device block overlap everywhere; within one, ranges are told apart by their start
    (chunks of a batch interleave)."""

    memory: str
    life: int
    start: int


class TraceEngine:
    """Copies at once, as on CPU, and raises RaceError where a GPU might have read or written too early.

    Args:
        collect: keep the races' descriptions in `races` and go on.
    """

    def __init__(self, collect: bool = False) -> None:
        self.collect = collect
        self.races: list[str] = []
        self._clocks: dict[str, Clock] = {queue: dict.fromkeys(QUEUES, 0) for queue in QUEUES}
        self._accesses: dict[str, list[tuple[str, int, bool, Place]]] = {}  # memory -> (queue, time, is a write, place)
        self._blocks: dict[int, tuple[int, int]] = {}  # storage of a device tensor -> its block and which life of it
        self._free: list[int] = []
        self._lives = 0
        self.checked = 0

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def like(self, host: Tensor) -> Tensor:
        return torch.empty_like(host)

    def record(self, queue: str) -> Any:
        self._clocks[queue][queue] += 1
        return dict(self._clocks[queue])

    def wait(self, queue: str, event: Any) -> None:
        for name, when in (event or {}).items():
            self._clocks[queue][name] = max(self._clocks[queue][name], when)

    def settle(self) -> None:
        for queue in QUEUES:
            for other in (OUT, BACK):
                self.wait(queue, self.record(other))

    def copy(self, queue: str, target: Tensor, source: Tensor) -> None:
        device, host = (source, target) if queue == OUT else (target, source)
        self._access(queue, self._device(device), write=queue == BACK)
        self._access(queue, Place("host", 0, host.data_ptr()), write=queue == OUT)
        target.copy_(source)

    def compute_access(self, tensor: Tensor, write: bool) -> None:
        self._access(COMPUTE, self._device(tensor), write)

    def stalls(self) -> dict[str, float]:
        return {OUT: 0.0, BACK: 0.0}

    def copying(self) -> dict[str, float]:
        return {OUT: 0.0, BACK: 0.0}

    def clock(self) -> Any:
        return 0.0

    def seconds(self, start: Any, stop: Any) -> float:
        return float(stop - start)

    def memory(self) -> DeviceMemory | None:
        return None

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
        return Place(f"device block {block}", life, int(tensor.storage_offset()))

    def _release(self, key: int) -> None:
        self._free.append(self._blocks.pop(key)[0])

    def _access(self, queue: str, place: Place, write: bool) -> None:
        self._clocks[queue][queue] += 1
        mine = self._clocks[queue]
        before = self._accesses.setdefault(place.memory, [])
        for other, when, wrote, there in before:
            self.checked += 1
            conflict = (write or wrote) and (there.life != place.life or there.start == place.start)
            if conflict and other != queue and mine[other] < when:
                now, then = ("writes" if write else "reads"), ("writing" if wrote else "reading")
                self.races.append(f"{queue} {now} {place.memory} while {other} may still be {then} it")
                if not self.collect:
                    raise RaceError(f"{self.races[-1]}. A wait is missing.")
        # What every queue has seen can race with nothing any more.
        kept = [access for access in before if any(clock[access[0]] < access[1] for clock in self._clocks.values())]
        self._accesses[place.memory] = [*kept, (queue, mine[queue], write, place)]
