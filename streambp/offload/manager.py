"""Where a model's saved tensors are between forward and backward: on the host, and back a step ahead of their use.

    OffloadManager        one for each patched model: the budgets, the arena, the copies
      MicroBatch          a forward that waits for its backward: one stack of host memory
        LayerTensors      one layer's saved tensors, by name and chunk (`layer.store.SavedTensors`)
      HostTensors         the tiles of the prefix of the layer at work: a stack of its own

Forward puts tensors in; the copy starts when their producer is done. Backward's order of access is known when a layer's
forward ends, so each access starts the copy of the next one, across layers. The sources of the last two chunks stay on the
device until newer ones push them out: the layer whose backward follows at once finds them there. Micro-batches are
independent, so any order of their backward passes works (1F1B, interleaved, accumulation, evaluation in between).

[Note: device budget] `gpu_memory` is for the prefix of the layer at work first, because what does not stay of it moves once
for each chunk; then for the saved tensors of the last layers, which move once and whose copies would hide least. Layers on
several devices share one budget, so that none of the devices holds more. With offload="auto" it is measured (`link.py`).
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from streambp.errors import HostMemoryError
from streambp.offload.arena import Arena, as_tensor, host_limit, padded
from streambp.offload.engines import BACK, OUT, SPENT, STALL, Engine, make_engine
from streambp.offload.stores import HostTensors, LayerTensors, MicroBatch
from streambp.offload.transfers import Entry, Holding, Transfers


class OffloadManager:
    """Moves saved tensors of one model between a device and the host (DESIGN.md section 5).

    Args:
        host_memory: bytes of host memory that may be used; None: nine tenths of what is available.
        on_host_full: "keep" what does not fit on the device, "recompute" what can be, or "raise".
        layers: how many layers a forward has, for the size of a stack and for which of them stay on the device.
        gpu_memory: bytes on the device for a layer's prefix and for saved tensors that stay; None: the prefix is whole,
            and all saved tensors leave. prefix_memory: those for prefixes alone, which `LinkBudget` may know before.
        engine: for tests; made for the device of the first tensor if None.
    """

    def __init__(
        self,
        host_memory: int | None,
        on_host_full: str,
        layers: int,
        gpu_memory: int | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.host_memory = host_memory
        self.on_host_full = on_host_full
        self.layers = layers
        self.set_aside = 0  # bytes of host memory that an engine will take
        self.held = self.to_come = 0  # bytes of `host_memory` that weights take, and those that their gradients will take
        self.workspace = 0  # bytes of the largest prefix of this forward, as backward will need it
        self._given_gpu_memory = gpu_memory
        self.gpu_memory = self.prefix_memory = gpu_memory
        self.left = 0  # tensors that did not fit on the host
        self._given_engine = engine
        self._engine: Engine | None = None  # of the layer that was opened last
        self._transfers: Transfers | None = None
        self._arena: Arena | None = None
        self._current: weakref.ref[MicroBatch] | None = None
        self._stores: weakref.WeakSet[LayerTensors] = weakref.WeakSet()
        self._holdings: weakref.WeakSet[Holding] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        """A copied or pickled model starts with an empty manager."""
        return OffloadManager, (self.host_memory, self.on_host_full, self.layers, self._given_gpu_memory)

    def open(self, index: int, device: torch.device) -> LayerTensors:
        """The store of one layer's call; a layer that does not come after the last one starts a new micro-batch."""
        arena = self._start(device)
        batch = self._current_batch()
        if batch is None or batch.retired or index <= batch.last_index:
            self.workspace = 0
            batch = MicroBatch(arena)
            self._current = weakref.ref(batch)
            self._holdings.add(batch)
        batch.last_index = index
        self._engine = self.transfers.on(device)
        tensors = LayerTensors(self, batch, self._engine, index, self._stays(index, batch))
        batch.layers.append(weakref.ref(tensors))
        self._stores.add(tensors)
        return tensors

    def on(self, device: torch.device) -> Engine:
        """What copies between a device and the host."""
        self._start(device)
        return self.transfers.on(device)

    def sent(self) -> tuple[float, float]:
        """Bytes that have been moved to the host so far, and the seconds that took."""
        return (0.0, 0.0) if self._transfers is None else (self._transfers.bytes[OUT], self._transfers.spent()[OUT])

    @property
    def host_room(self) -> float:
        """Bytes of host memory that may be used."""
        return math.inf if self._arena is None else self._arena.limit

    def scratch(self, device: torch.device) -> HostTensors:
        """A store for the tiles of one prefix."""
        holding = Holding(self._start(device), "prefix")
        self._holdings.add(holding)
        return HostTensors(self, holding, self.transfers.on(device))

    def _start(self, device: torch.device) -> Arena:
        if self._transfers is None:
            self._transfers = Transfers(device, self._given_engine or make_engine(device))
        if self._arena is None:
            wanted = None if self.host_memory is None else max(1, self.host_memory - self.held - self.to_come)
            limit = host_limit(wanted, set_aside=self.set_aside + (self.to_come if wanted is None else 0))
            self._arena = Arena(limit, self._transfers.on(device).host_buffer, self._transfers.settle)
        return self._arena

    @property
    def transfers(self) -> Transfers:
        """The model's copies; they are there from the first `open` or `scratch` on."""
        assert self._transfers is not None
        return self._transfers

    def _current_batch(self) -> MicroBatch | None:
        return self._current() if self._current is not None else None

    @property
    def kept(self) -> int:
        """Bytes of saved tensors that stay on the device."""
        return sum(tensors.kept for tensors in self._stores)

    def has_room(self, size: int) -> bool:
        """[Note: device budget]"""
        return self.gpu_memory is not None and self.workspace + self.kept + size <= self.gpu_memory

    def needs(self, workspace: int) -> None:
        """The backward of a layer will need as many bytes for its prefix."""
        self.workspace = max(self.workspace, workspace)

    def _stays(self, index: int, batch: MicroBatch) -> bool:
        """Whether layer `index` and all after it fit on the device, if they are like those before it.

        The first layer's size is not known yet; it leaves, as its backward comes last.
        """
        return batch.layer_bytes > 0 and self.has_room((self.layers - index) * batch.layer_bytes)

    def place(
        self, holding: Holding, engine: Engine, tensor: Tensor, optional: bool, foreign: bool = False
    ) -> Entry | None:
        """Start the copy of a tensor [...] to the host. One that does not fit stays, or is None if it can be recomputed.

        Raises:
            HostMemoryError: it does not fit, and `on_host_full` is "raise".
        """
        host = self._push(holding, tensor.nbytes)
        if host is None:
            self.left += 1
            return None if optional and self.on_host_full == "recompute" else Entry(engine, tensor)
        entry = Entry(engine, host=as_tensor(host, tensor))
        self.transfers.send(holding, entry, tensor, holding.free_after, foreign)
        return entry

    def reserve(self, holding: Holding, size: int) -> None:
        """As `Policy.reserve`; where the budget does not allow it, nothing happens."""
        missing = size - holding.stack.left
        if missing > 0 and self._arena is not None:
            self._arena.grow(holding.stack, padded(missing))

    def _push(self, holding: Holding, size: int) -> Tensor | None:
        stack = holding.stack
        host = stack.push(size)
        if host is not None:
            return host
        assert self._arena is not None
        if self._arena.grow(stack, self._wanted(holding, size)) or self._arena.grow(stack, padded(size)):
            return stack.push(size)
        if self.on_host_full == "raise":
            arena = self._arena
            wanted = f"{arena.allocated / 2**30:.2f} GiB allocated, {size / 2**20:.1f} MiB more wanted"
            found = f"The host budget of {arena.limit / 2**30:.2f} GiB is used up ({wanted}). Raise host_memory"
            if arena.refused is not None:
                found = f"The host has no memory left within the budget ({wanted}; {arena.refused}). Free memory"
            raise HostMemoryError(
                f"{found}, save less (saves=()), shorten the sequence, or set on_host_full='keep' to leave the rest on the "
                "device."
            )
        return None

    def _wanted(self, holding: Holding, size: int) -> int:
        """Bytes to add: what the layers still to come will need if they are like those before."""
        if not isinstance(holding, MicroBatch) or len(holding.layers) < 2 or holding.stack.used == 0:
            return padded(size)
        done = len(holding.layers) - 1
        staying = 0
        if self.gpu_memory is not None:
            staying = max(0, self.gpu_memory - self.workspace - self.kept) // max(1, holding.layer_bytes)
        return max(padded(size), holding.stack.used // done * max(0, self.layers - done - staying))

    @property
    def moved(self) -> dict[str, float]:
        """Bytes in each direction so far, without waiting for anything."""
        return {} if self._transfers is None else dict(self._transfers.bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory allocated."""
        return 0 if self._arena is None else self._arena.allocated

    def stats(self) -> dict[str, float]:
        """Bytes moved, seconds that compute waited and GB/s in each direction; host memory; tensors that did not fit."""
        moved, spent = {OUT: 0.0, BACK: 0.0}, dict.fromkeys(SPENT, 0.0)
        if self._transfers is not None:
            moved, spent = self._transfers.bytes, self._transfers.spent()
        return {
            "bytes_out": moved[OUT],
            "bytes_back": moved[BACK],
            "gb_per_s_out": moved[OUT] / spent[OUT] / 1e9 if spent[OUT] else 0.0,
            "gb_per_s_back": moved[BACK] / spent[BACK] / 1e9 if spent[BACK] else 0.0,
            "stall_out": spent[STALL + OUT],
            "stall_back": spent[STALL + BACK],
            "host_bytes": self.host_bytes,
            "left": self.left,
        }

    def abort(self) -> None:
        """Give up every forward that waits for its backward, after an exception, say: their host memory is free at once.

        Without it that happens when nothing refers to them any more: neither the loss, nor the exception's traceback. Their
        backward raises BackwardError from now on; the next forward finds everything as it was before.
        """
        if self._transfers is not None:
            self._transfers.let_go()
            self._transfers.settle()
        for holding in list(self._holdings):
            holding.retire()
        for tensors in list(self._stores):
            tensors.forget()
        self._current = None

    def close(self) -> None:
        """Give the host memory back to the system, and give up what waits for its backward (see `abort`)."""
        self.abort()
        self._arena = self._transfers = self._engine = None
