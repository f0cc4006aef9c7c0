"""Where a model's saved tensors are between forward and backward: on the host, and back a step ahead of their use.

    OffloadManager        one for each patched model: the arena, the queues, the micro-batches in flight
      MicroBatch          a forward that waits for its backward: one stack of host memory
        LayerTensors      one layer's saved tensors, by name and chunk (`layer.store.SavedTensors`)
          Entry           one tensor: on the host, on its way, or still on the device

Forward puts tensors in; the copy starts when their producer is done. Backward's order of access is known when a layer's
forward ends, so each access starts the copy of the next one, across layers. The last tensors of a layer stay on the device
until newer ones push them out: the layer whose backward follows at once finds them there. Micro-batches are independent,
so any order of their backward passes works (1F1B, interleaved, accumulation, evaluation in between).
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor

from streambp.errors import BackwardError, HostMemoryError
from streambp.offload.arena import Arena, Stack, as_tensor, host_limit, padded
from streambp.offload.engines import BACK, COMPUTE, OUT, Engine, make_engine

IN_FLIGHT = 4  # sources of copies to the host that are kept alive at most
Access = tuple[str, int]


@dataclasses.dataclass(eq=False)
class Entry:
    """One saved tensor. `source` holds it on the device, `host` a copy that is complete after `copied_out`."""

    host: Tensor | None = None
    source: Tensor | None = None
    copied_out: Any = None


@dataclasses.dataclass(eq=False)
class Departure:
    """A copy to the host that may be under way: `tensor` must live until it is done."""

    entry: Entry
    tensor: Tensor


class MicroBatch:
    """One forward's saved tensors: its stack, its layers in the order of their forward, and what is on its way back."""

    def __init__(self, arena: Arena, engine: Engine) -> None:
        self.stack = arena.take()
        self.last_index = -1
        self.layers: list[weakref.ref[LayerTensors]] = []
        self.arriving: dict[int, tuple[Tensor, Any]] = {}  # by entry: the tensor, and the event that ends its copy
        # When its graph is gone, used up or thrown away; after an exception copies may still be under way.
        weakref.finalize(self, _retire, engine, arena, self.stack, self.arriving)


def _retire(engine: Engine, arena: Arena, stack: Stack, arriving: dict[int, tuple[Tensor, Any]]) -> None:
    for _, event in arriving.values():
        engine.wait(COMPUTE, event)  # [Note: offload order], 4: the tensors' memory goes back to compute
    arriving.clear()
    arena.give_back(stack)


class LayerTensors:
    """One layer's saved tensors, moved to the host. chunks are taken last to first; each is taken once.

    Raises:
        HostMemoryError: the host budget is used up and `on_host_full` is "raise".
        BackwardError: a tensor is asked for a second time.
    """

    copies = True  # the tensors put in may be changed or freed afterwards

    def __init__(self, manager: OffloadManager, batch: MicroBatch, index: int) -> None:
        self._manager = manager
        self._batch = batch
        self._before = batch.layers[-1] if batch.layers else None
        self._entries: dict[Access, Entry] = {}
        self._accesses: list[Access] = []
        self._ahead = 1
        self._position = 0
        self.index = index

    def put(self, name: str, chunk: int, tensor: Tensor) -> None:
        entry = self._manager.push(self._batch.stack, tensor, optional=name != "x")
        if entry is not None:
            self._entries[name, chunk] = entry

    def has(self, name: str, chunk: int) -> bool:
        return (name, chunk) in self._entries

    def seal(self, accesses: list[Access], ahead: int) -> None:
        """Forward is over; backward will read in this order."""
        self._accesses = [access for access in accesses if access in self._entries]
        self._ahead = ahead
        self._manager.finish_layer(
            self, [entry for (_, chunk), entry in self._entries.items() if chunk == self._last_chunk]
        )

    @property
    def _last_chunk(self) -> int:
        return max((chunk for _, chunk in self._entries), default=-1)

    def peek(self, name: str, chunk: int) -> Tensor:
        return self._get(name, chunk, last=False)

    def take(self, name: str, chunk: int) -> Tensor:
        return self._get(name, chunk, last=True)

    def _get(self, name: str, chunk: int, last: bool) -> Tensor:
        entry = self._entries.get((name, chunk))
        if entry is None:
            raise BackwardError(
                f"{name} of chunk {chunk} was asked for a second time, or never saved; offloaded tensors are brought back "
                "once. Compute the loss again, or add losses up and call backward once."
            )
        tensor = self._manager.fetch(self._batch, entry)
        if last:
            del self._entries[name, chunk]
        if self._accesses[self._position : self._position + 1] == [(name, chunk)]:
            self._position += 1
        self.prefetch(self._ahead)
        return tensor

    def prefetch(self, count: int) -> None:
        """Start the copies of what is read next, here and then in the layer whose backward follows."""
        ahead = self._accesses[self._position : self._position + count]
        for access in ahead:
            if access in self._entries:
                self._manager.load(self._batch, self._entries[access])
        before = self._before() if self._before is not None else None
        if before is not None and len(ahead) < count:
            before.prefetch(count - len(ahead))


class OffloadManager:
    """Moves saved tensors of one model between a device and the host (DESIGN.md section 5).

    Args:
        host_memory: bytes of host memory that may be used; None: nine tenths of what is available.
        on_host_full: "keep" what does not fit on the device, "recompute" what can be, or "raise".
        layers: how many layers a forward has, for the size of a stack.
        engine: for tests; made for the device of the first tensor if None.
    """

    def __init__(self, host_memory: int | None, on_host_full: str, layers: int, engine: Engine | None = None) -> None:
        self.host_memory = host_memory
        self.on_host_full = on_host_full
        self.layers = layers
        self.set_aside = 0  # bytes of host memory that an engine will take
        self.left = 0  # tensors that did not fit on the host
        self.bytes = {OUT: 0, BACK: 0}
        self._given_engine = engine
        self._engine: Engine | None = engine
        self._arena: Arena | None = None
        self._current: weakref.ref[MicroBatch] | None = None
        self._in_flight: collections.deque[Departure] = collections.deque()

    def __reduce__(self) -> Any:
        """A copied or pickled model starts with an empty manager."""
        return OffloadManager, (self.host_memory, self.on_host_full, self.layers)

    def open(self, index: int, device: torch.device) -> LayerTensors:
        """The store of one layer's call; a layer that does not come after the last one starts a new micro-batch."""
        if self._engine is None:
            self._engine = make_engine(device)
        if self._arena is None:
            self._arena = Arena(host_limit(self.host_memory, set_aside=self.set_aside), self._engine.host_buffer)
        batch = self._current() if self._current is not None else None
        if batch is None or index <= batch.last_index:
            batch = MicroBatch(self._arena, self._engine)
            self._current = weakref.ref(batch)
        batch.last_index = index
        tensors = LayerTensors(self, batch, index)
        batch.layers.append(weakref.ref(tensors))
        return tensors

    def push(self, stack: Stack, tensor: Tensor, optional: bool) -> Entry | None:
        """Start the copy of a tensor to the host; None for one that is optional and is to be recomputed instead."""
        engine, size = self.engine, tensor.numel() * tensor.element_size()
        entry = Entry(source=tensor)
        host = self._reserve(stack, size)
        if host is None:
            self.left += 1
            return None if optional and self.on_host_full == "recompute" else entry
        entry.host = as_tensor(host, tensor)
        engine.compute_access(tensor, write=True)
        engine.wait(OUT, engine.record(COMPUTE))  # [Note: offload order], 1
        engine.wait(OUT, stack.last_read)  # 5
        engine.copy(OUT, entry.host, tensor)
        entry.copied_out = engine.record(OUT)
        self.bytes[OUT] += size
        self._in_flight.append(Departure(entry, tensor))
        while len(self._in_flight) > IN_FLIGHT:
            self._let_go(self._in_flight.popleft())
        return entry

    def _reserve(self, stack: Stack, size: int) -> Tensor | None:
        host = stack.push(size)
        if host is not None:
            return host
        assert self._arena is not None
        if self._arena.grow(stack, self._wanted(stack, size)) or self._arena.grow(stack, padded(size)):
            return stack.push(size)
        if self.on_host_full == "raise":
            raise HostMemoryError(
                f"The host budget of {self._arena.limit / 2**30:.2f} GiB is used up ({self._arena.allocated / 2**30:.2f} "
                f"GiB allocated, {size / 2**20:.1f} MiB more wanted). Raise host_memory, save less (saves=()), shorten the "
                "sequence, or set on_host_full='keep' to leave the rest on the device."
            )
        return None

    def _wanted(self, stack: Stack, size: int) -> int:
        """Bytes to add: what the layers still to come will need if they are like those before."""
        batch = self._current() if self._current is not None else None
        done = 0 if batch is None else len(batch.layers) - 1
        if done == 0 or stack.used == 0:
            return padded(size)
        return max(padded(size), stack.used // done * (self.layers - done))

    def _let_go(self, departure: Departure) -> None:
        self.engine.wait(COMPUTE, departure.entry.copied_out)  # 6
        departure.entry.source = None

    def finish_layer(self, tensors: LayerTensors, last: list[Entry]) -> None:
        """Keep copies of the last chunk's tensors if they are parts of larger ones, which must not live on for them."""
        for entry in last:
            source = entry.source
            if source is not None and entry.host is not None and source.untyped_storage().nbytes() > source.nbytes:
                entry.source = source.clone()
        if tensors.index >= self.layers - 1:  # nothing pushes its sources out before its backward
            while self._in_flight:
                departure = self._in_flight.popleft()
                kept = departure.entry.source if any(departure.entry is entry for entry in last) else None
                self._let_go(departure)
                departure.entry.source = kept

    def load(self, batch: MicroBatch, entry: Entry) -> None:
        """Start the copy back, unless the tensor is on the device or on its way."""
        if entry.source is not None or id(entry) in batch.arriving:
            return
        assert entry.host is not None
        engine = self.engine
        tensor = engine.like(entry.host)
        engine.wait(BACK, engine.record(COMPUTE))  # 2
        engine.wait(BACK, entry.copied_out)  # 3
        engine.copy(BACK, tensor, entry.host)
        batch.stack.last_read = event = engine.record(BACK)
        batch.arriving[id(entry)] = (tensor, event)
        self.bytes[BACK] += tensor.nbytes

    def fetch(self, batch: MicroBatch, entry: Entry) -> Tensor:
        """The tensor, on the device."""
        if entry.source is not None:
            return entry.source
        self.load(batch, entry)
        tensor, event = batch.arriving.pop(id(entry))
        self.engine.wait(COMPUTE, event)  # 4
        self.engine.compute_access(tensor, write=False)
        return tensor

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory allocated."""
        return 0 if self._arena is None else self._arena.allocated

    def stats(self) -> dict[str, float]:
        """Bytes moved and seconds that compute waited, in each direction; host memory; tensors that did not fit."""
        stalls = self._engine.stalls() if self._engine is not None else {OUT: 0.0, BACK: 0.0}
        return {
            "bytes_out": self.bytes[OUT],
            "bytes_back": self.bytes[BACK],
            "stall_out": stalls[OUT],
            "stall_back": stalls[BACK],
            "host_bytes": self.host_bytes,
            "left": self.left,
        }

    def close(self) -> None:
        """Give the host memory back. Graphs that still wait for their backward keep theirs until they are gone."""
        while self._in_flight:
            self._let_go(self._in_flight.popleft())
        self._arena, self._current, self._engine = None, None, self._given_engine
