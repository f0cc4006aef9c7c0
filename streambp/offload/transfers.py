"""Tensors on their way to the host: copies to one stack of its memory; `manager.HostTensors` brings them back.

Holding     a stack, and the tensors on their way back from it
Entry       one tensor: on the host, on its way, or on the device
Transfers   the copies of a model to the host, and the sources that must live until theirs are done
"""

from __future__ import annotations

import collections
import dataclasses
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from streambp.offload.arena import Arena, BufferStack
from streambp.offload.engines import BACK, COMPUTE, OUT, SPENT, Engine

MICRO_BATCH = "micro-batch"  # a kind of stacks
GROUPS_IN_FLIGHT = 2  # chunks, or tiles, whose copies to the host may be under way before compute waits


@dataclasses.dataclass(eq=False)
class Entry:
    """One tensor. `source` holds it on the device, `host` a copy that is complete after `copied_out`.

    engine: of its device.
    read: the event after which the last copy back is done.
    version: of a source that others may change in place while it waits on the device.
    budgeted: it stays on the device and counts against `gpu_memory`.
    """

    engine: Engine
    source: Tensor | None = None
    host: Tensor | None = None
    copied_out: Any = None
    read: Any = None
    version: int | None = None
    budgeted: bool = False


@dataclasses.dataclass(eq=False)
class Departure:
    """A copy to the host that may be under way: `tensor` must live until `event`."""

    entry: Entry
    tensor: Tensor
    event: Any
    group: int


class Holding:
    """A stack of host memory in use, given back when nobody refers to this any more, or by `retire`.

    stores: of what lies there (`manager.HostTensors`), in their order; of a forward that waits for its backward, layers.
    retire: does so once; while it is `alive` it has not.
    """

    def __init__(self, arena: Arena, kind: str) -> None:
        self.last_index = -1
        self.stores: list[weakref.ref[Any]] = []
        self.arena, self.stack = arena, arena.take(kind)
        self.free_after = tuple(self.stack.last_uses.values())
        self.arriving: dict[Entry, tuple[Tensor, Any]] = {}  # the tensor, and the event that ends its copy
        self.retire = weakref.finalize(self, _retire, arena, self.stack, self.arriving)
        self.retire.atexit = False

    def alive(self) -> list[Any]:
        """Stores that somebody refers to."""
        return [store for store in (one() for one in self.stores) if store is not None]

    @property
    def layer_bytes(self) -> int:
        """Of the largest layer that has run; 0 if none has."""
        return max((store.bytes for store in self.alive()), default=0)


def _retire(arena: Arena, stack: BufferStack, arriving: dict[Entry, tuple[Tensor, Any]]) -> None:
    """Give a stack back to the arena; compute waits for what is on its way back from it."""
    for entry, (_, event) in arriving.items():
        entry.engine.wait(COMPUTE, event)  # [Note: offload order], 4: the tensors' memory goes back to compute
    arriving.clear()
    arena.give_back(stack)


class Transfers:
    """Starts copies to the host and makes compute wait for them. A group is what belongs to one chunk, or to one tile.

    engines: by device. [Note: several devices]
    """

    def __init__(self) -> None:
        self.engines: dict[torch.device, Engine] = {}
        self.bytes = {OUT: 0.0, BACK: 0.0}
        self._in_flight: collections.deque[Departure] = collections.deque()
        self._group = 0
        self._key: tuple[Any, int] | None = None

    def settle(self) -> None:
        """Wait, on the calling thread, until all copies are done."""
        for engine in self.engines.values():
            engine.settle()

    def spent(self) -> dict[str, float]:
        """`Engine.spent`, over all devices."""
        spent = [engine.spent() for engine in self.engines.values()]
        return {name: sum(seconds[name] for seconds in spent) for name in SPENT}

    def begin(self, owner: object, chunk: int) -> None:
        """What is sent next belongs to this chunk of this owner; sources of groups long past are let go."""
        key = (weakref.ref(owner), chunk)
        if key == self._key:
            return
        self._key, self._group = key, self._group + 1
        self.let_go(upto=self._group - GROUPS_IN_FLIGHT)

    def send(
        self, holding: Holding, entry: Entry, tensor: Tensor, host_is_free: Iterable[Any], foreign: bool = False
    ) -> None:
        """Start the copy of a tensor [...] to `entry.host`, which may be written after the events `host_is_free`.

        foreign: others may change it in place while it is on its way, or while its source waits here.
        """
        assert entry.host is not None
        part = tensor.untyped_storage().nbytes() > tensor.nbytes  # of something that need not live as long
        tensor = tensor.clone(memory_format=torch.contiguous_format) if part or foreign else tensor.contiguous()
        engine = entry.engine
        engine.access(COMPUTE, tensor, write=True)
        engine.wait(OUT, engine.record(COMPUTE))  # [Note: offload order], 1
        for event in host_is_free:
            engine.wait(OUT, event)  # 5
        engine.copy(OUT, entry.host, tensor)
        entry.source, entry.copied_out = tensor, engine.record(OUT)
        holding.stack.last_uses[engine, OUT] = entry.copied_out
        self.bytes[OUT] += tensor.nbytes
        self._in_flight.append(Departure(entry, tensor, entry.copied_out, self._group))

    def let_go(self, entry: Entry | None = None, upto: float = math.inf) -> None:
        """Let an entry's sources go, or those of all groups up to one: compute waits for their copies."""
        for departure in [d for d in self._in_flight if d.group <= upto and entry in (None, d.entry)]:
            self._in_flight.remove(departure)
            departure.entry.engine.wait(COMPUTE, departure.event)  # 6
            if departure.entry.source is departure.tensor:
                departure.entry.source = None
