"""Move a model's saved tensors to the host after forward, and back one step ahead of their use in
backward.

    OffloadManager        one for each patched model: the budgets, the arena, the copies
      MicroBatchMemory    one stack of host memory: of a forward that waits for its backward, or of
                          a running prefix
        HostTensors       one layer's saved tensors, read back in a known order, or a prefix's tiles,
                          read and changed

Forward puts tensors in, and each copy starts when the tensor's producer is done. The order of
backward's reads is known at the end of a layer's forward. After each group of reads, the reader
therefore starts the copies of the next group, across layers. The sources of the last two chunks
stay on the device until newer chunks replace them. The layer whose backward follows at once finds
its tensors there. Micro-batches are independent, so their backward passes may run in any order
(1F1B, interleaved, accumulation, evaluation in between).

`gpu_memory` first serves the prefix of the running layer, because the rest of the prefix moves once
for each chunk. The remainder serves the saved tensors of the last layers, which move once; their
copies would hide least. Layers on several devices share one budget, so no device holds more. The
budget of offload="auto" is measured (`link.py`).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from streambp.device import MEMORY_ERRORS, is_out_of_memory
from streambp.errors import BackwardError, HostMemoryError
from streambp.offload.arena import Arena, padded
from streambp.offload.costs import saves_name
from streambp.offload.engines import (
    COMPUTE_QUEUE,
    FROM_HOST_QUEUE,
    STALL_PREFIX,
    TO_HOST_QUEUE,
    Engine,
    make_engine,
)
from streambp.offload.free_memory import DEFAULT_HOST_FRACTION, UNLIMITED_BYTES, host_limit
from streambp.offload.transfers import MICRO_BATCH, MicroBatchMemory, TensorEntry, Transfers

Access = tuple[str, int]
RECOMPUTATION_INPUTS = ("x", "state")  # inputs of a recomputation


@dataclasses.dataclass
class OtherHostUse:
    """Bytes of host memory that do not hold saved tensors.

    Attributes:
        set_aside: bytes that a training engine (DeepSpeed) will allocate.
        weight_bytes: bytes of `host_memory` for weights.
        gradient_bytes: bytes of `host_memory` for gradients of these weights.
    """

    set_aside: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0


class OffloadManager:
    """Moves tensors that one model's layers save for backward to host memory, and back (DESIGN.md
    section 5).

    Args:
        host_memory: limit on host memory in bytes; None: nine tenths of the available memory, or
            half of it if tensors leave on demand.
        on_host_full: treatment of tensors that do not fit: "keep" on the device, "recompute" if
            possible, or "raise".
        layers: number of layers in a forward, for the size of the host memory and the choice of
            layers whose tensors stay on the device.
        gpu_memory: device bytes for K and V of the running layer and for saved tensors that stay;
            None: K and V stay on the device, and all saved tensors leave.
        engine: object that copies tensors, replaced in tests; None: an engine is created for the
            device of the first tensor.

    Attributes:
        prefix_memory: device bytes for K and V of the running layer alone, which `LinkBudget` may
            determine before `gpu_memory`.
        workspace: device bytes that K and V of one layer take in backward, for the layer with the
            most bytes in this forward.
        staying: names of the tensors that stay on the device, by the layer's index, as chosen by
            the policy; None: the last layers' tensors stay. [Note: two rooms]
        on_demand: True if the policy decides in each micro-batch if tensors leave for the host
            ([Note: host by seconds]); False if they leave in each step.
        reserve: bytes of host memory that a micro-batch is expected to take, allocated at its
            start; 0: unknown.
        other_use: bytes of host memory that do not hold saved tensors.
    """

    def __init__(
        self,
        host_memory: int | None,
        on_host_full: str,
        layers: int,
        gpu_memory: int | None = None,
        engine: Engine | None = None,
        on_demand: bool = False,
    ) -> None:
        self.on_demand = on_demand
        self.reserve = 0
        self.host_memory = host_memory
        self.on_host_full = on_host_full
        self.layers = layers
        self.other_use = OtherHostUse()
        self.staying: dict[int, set[str]] | None = None
        self.workspace = 0  # bytes of this forward's largest prefix, for backward
        self._given_gpu_memory = gpu_memory
        self.gpu_memory = self.prefix_memory = gpu_memory
        self._given_engine = engine
        self.transfers = Transfers()
        self.arena: Arena | None = None
        self._current: weakref.ref[MicroBatchMemory] | None = None
        self._holdings: weakref.WeakSet[MicroBatchMemory] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        """Return the class and arguments of a copy with the same settings and without tensors, for
        copy and pickle."""
        return OffloadManager, (
            self.host_memory,
            self.on_host_full,
            self.layers,
            self._given_gpu_memory,
            None,
            self.on_demand,
        )

    @property
    def is_used(self) -> bool:
        """True if tensors leave for the host in each step, or if host memory for tensors that leave
        on demand was allocated."""
        return not self.on_demand or self.arena is not None

    def start(self, device: torch.device) -> tuple[Arena, Engine]:
        """Return the host memory pool and the copy engine for a device. The first call creates the
        pool, and the first call for a device its engine."""
        engines = self.transfers.engines
        if not engines:
            engines[device] = self._given_engine or make_engine(device)
        elif device not in engines:
            engines[device] = next(iter(engines.values())).engine_for(device)
        if self.arena is None:
            self.arena = Arena(self._limit(), engines[device].host_buffer, self.transfers.settle)
        return self.arena, engines[device]

    def _limit(self) -> int:
        """Return the bytes of host memory for saved tensors. Weights on the host and their
        gradients take a part of `host_memory`.

        Tensors that leave on demand may take half of the available memory, or the available part of
        `host_memory` if it is set. The result is 0 if neither `host_memory` nor the available
        memory is known.
        """
        if self.on_demand and self.host_memory is None:
            default_limit = host_limit(
                None, set_aside=self.other_use.set_aside, part=DEFAULT_HOST_FRACTION
            )
            return 0 if default_limit == UNLIMITED_BYTES else default_limit
        if self.on_demand and self.host_memory is not None:
            return min(self.host_memory, host_limit(None, set_aside=self.other_use.set_aside))
        if self.host_memory is None:
            requested_bytes = None
        else:
            requested_bytes = max(
                1, self.host_memory - self.other_use.weight_bytes - self.other_use.gradient_bytes
            )
        return host_limit(
            requested_bytes,
            set_aside=self.other_use.set_aside
            + (self.other_use.gradient_bytes if requested_bytes is None else 0),
        )

    def host_room(self) -> float:
        """Return the bytes of host memory that a new micro-batch can take; 0 if host memory cannot
        be pinned, because copies would be slow."""
        if self.arena is None:
            return self._limit()
        if not all(engine.pinned for engine in self.transfers.engines.values()):
            return 0.0
        return self.arena.limit - self.arena.allocated + self.arena.idle

    @property
    def pinned(self) -> int:
        """Return the bytes of host memory that are allocated and free for a new micro-batch. A new
        micro-batch can use this memory without waiting for more memory to be pinned."""
        return 0 if self.arena is None else self.arena.largest_idle(MICRO_BATCH)

    def link_rate(self) -> float | None:
        """Return the measured bytes/s to the host; None before enough bytes were moved."""
        rates = [engine.rate(TO_HOST_QUEUE) for engine in self.transfers.engines.values()]
        measured_rates = [rate for rate in rates if rate is not None]
        return min(measured_rates, default=None)

    def open(self, index: int, device: torch.device) -> HostTensors:
        """Return the storage for the tensors that one layer saves in this call. Indices of layers
        increase within a micro-batch. A new micro-batch starts if the index is not larger than in
        the call before.

        Args:
            index: index of the layer.
            device: the layer's device.
        """
        arena, engine = self.start(device)
        batch = None if self._current is None else self._current()
        if batch is None or not batch.retire.alive or index <= batch.last_index:
            self.workspace = 0
            batch = MicroBatchMemory(arena, MICRO_BATCH)
            self._current = weakref.ref(batch)
            self._holdings.add(batch)
            if self.reserve > batch.stack.size:
                arena.grow(batch.stack, padded(self.reserve - batch.stack.size))
        batch.last_index = index
        if self.staying is not None:
            return HostTensors(self, batch, engine, self.staying.get(index, frozenset()))
        # A layer stays if all remaining layers, estimated by the largest earlier one, fit on the
        # device. The first layer's size is unknown; its tensors leave, because its backward comes
        # last.
        largest = batch.layer_bytes
        stays = largest > 0 and self.has_room((self.layers - index) * largest)
        return HostTensors(self, batch, engine, None if stays else frozenset())

    def scratch(self, device: torch.device) -> HostTensors:
        """Return storage on the host for K and V of all chunks of one layer on `device`. The
        storage is for a single forward or a single backward of the layer."""
        arena, engine = self.start(device)
        holding = MicroBatchMemory(arena, "prefix")
        self._holdings.add(holding)
        return HostTensors(self, holding, engine)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of saved tensors that stay on the device, which count against
        `gpu_memory`."""
        return sum(store.resident_bytes for holding in self._holdings for store in holding.alive())

    def has_room(self, size: int) -> bool:
        """True if `size` more bytes of saved tensors may stay on the device, beside K and V of the
        running layer. `gpu_memory` limits the sum; if `gpu_memory` is None, no tensor may stay.

        Args:
            size: number of bytes.
        """
        return (
            self.gpu_memory is not None
            and self.workspace + self.resident_bytes + size <= self.gpu_memory
        )

    def move_to_host(
        self,
        holding: MicroBatchMemory,
        engine: Engine,
        tensor: Tensor,
        optional: bool,
        needs_clone: bool = False,
    ) -> TensorEntry | None:
        """Start the copy of a tensor [...] to the host, and return the record of the copy.

        A tensor that does not fit into host memory stays on the device, and the record says that
        there is no copy. Only an optional tensor is not saved if `on_host_full` is "recompute"; the
        result is then None.

        Args:
            holding: host memory of the micro-batch.
            engine: engine of the tensor's device.
            tensor: the tensor.
            optional: True if backward can recompute the tensor.
            needs_clone: True if other code may change the tensor in place before the copy has
                ended. A clone is then copied in its place.

        Raises:
            HostMemoryError: the tensor does not fit, and `on_host_full` is "raise".
        """
        arena = holding.arena
        stack = holding.stack
        size = tensor.nbytes
        host = stack.push(size)
        if host is None:
            requested_bytes = padded(size)
            if len(holding.stores) > 1:  # estimate later layers by earlier ones
                finished_layers = len(holding.stores) - 1
                staying = 0
                if self.gpu_memory is not None and not self.on_demand:
                    staying = max(0, self.gpu_memory - self.workspace - self.resident_bytes) // max(
                        1, holding.layer_bytes
                    )
                requested_bytes = max(
                    requested_bytes,
                    stack.used_bytes
                    // finished_layers
                    * max(0, self.layers - finished_layers - staying),
                )
            if arena.grow(stack, requested_bytes) or arena.grow(stack, padded(size)):
                host = stack.push(size)
        if host is not None:
            if size:
                view = host.view(tensor.dtype).view(tensor.shape)
            else:
                view = tensor.new_empty(tensor.shape, device=host.device)
            entry = TensorEntry(engine, host=view)
            self.transfers.send(holding, entry, tensor, holding.free_after, needs_clone)
            return entry
        if self.on_host_full == "raise":
            usage = (
                f"{arena.allocated / 2**30:.2f} GiB allocated, {size / 2**20:.1f} MiB more wanted"
            )
            if arena.system_error is None:
                advice = (
                    f"The host budget of {arena.limit / 2**30:.2f} GiB is used up ({usage}). Raise "
                    "host_memory"
                )
            else:
                advice = (
                    f"The host has no memory left within the budget ({usage}; {arena.system_error}"
                    "). Free memory"
                )
            raise HostMemoryError(
                f"{advice}, save less (saves=()), shorten the sequence, or set on_host_full='keep' "
                "to leave the rest on the device."
            )
        self.transfers.overflow_count += 1
        return (
            None if optional and self.on_host_full == "recompute" else TensorEntry(engine, tensor)
        )

    @property
    def host_bytes(self) -> int:
        """Return the bytes of allocated host memory."""
        return 0 if self.arena is None else self.arena.allocated

    def stats(self) -> dict[str, float]:
        """Return statistics by name, for each direction, "out" (to the host) and "back": bytes
        moved ("bytes_out"), GB/s ("gb_per_s_out"), and seconds for which computation waited
        ("stall_out"). "host_bytes" is the bytes of host memory, and "left" the number of tensors
        that did not fit there.

        The call synchronizes with the device.
        """
        moved_bytes = self.transfers.bytes
        spent = self.transfers.queue_seconds()
        statistics = dict[str, float]()
        for queue in (TO_HOST_QUEUE, FROM_HOST_QUEUE):
            statistics[f"bytes_{queue}"], statistics[STALL_PREFIX + queue] = (
                moved_bytes[queue],
                spent[STALL_PREFIX + queue],
            )
            statistics[f"gb_per_s_{queue}"] = (
                moved_bytes[queue] / spent[queue] / 1e9 if spent[queue] else 0.0
            )
        return {**statistics, "host_bytes": self.host_bytes, "left": self.transfers.overflow_count}

    def abort(self) -> None:
        """Discard the saved tensors of every forward whose backward has not run, for example after
        an exception, and free their host memory.

        If `abort` is not called, the memory is freed with the loss and the exception's traceback. A
        later backward of such a forward raises BackwardError; the next forward is unaffected.
        """
        self.transfers.release()
        self.transfers.settle()
        for holding in list(self._holdings):
            holding.retire()
            for store in holding.alive():
                store._entries.clear()
                store.resident_bytes = 0
        self._current = None

    def close(self) -> None:
        """Return the host memory to the system, and discard the saved tensors of every forward
        whose backward has not run (see `abort`)."""
        self.abort()
        self.arena, self.transfers = None, Transfers(self.transfers.overflow_count)


class HostTensors:
    """Storage of a layer's tensors on the host, by name and chunk. All tensors of one storage are
    from the same device and in the same stack of host memory.

    Tensors saved for backward are read once, from the last chunk to the first. K and V that a
    running layer reads and changes in each chunk are in another storage (`OffloadManager.scratch`).

    Args:
        manager: decides which tensors stay on the device, and starts copies.
        holding: host memory of the micro-batch.
        engine: copies between the layer's device and the host.
        staying: names of the tensors that stay on the device while `gpu_memory` has room, in the
            form of `StreamConfig.saves`, with "x" for the layer's input; None: all tensors.

    Attributes:
        bytes: bytes of all tensors that were ever stored.
        resident_bytes: bytes of stored tensors that stay on the device within `gpu_memory`.

    Raises:
        HostMemoryError: the host budget is exhausted and `on_host_full` is "raise".
        BackwardError: a requested tensor was never stored, or was removed.
    """

    copies = True  # the tensors put in may be changed or freed afterwards

    def __init__(
        self,
        manager: OffloadManager,
        holding: MicroBatchMemory,
        engine: Engine,
        staying: AbstractSet[str] | None = frozenset(),
    ) -> None:
        self._manager = manager
        self._transfers = manager.transfers
        self._holding = holding
        self._engine = engine
        self._entries: dict[Access, TensorEntry] = {}
        self._previous_store = holding.stores[-1] if holding.stores else None
        holding.stores.append(weakref.ref(self))
        self._order: list[list[Access]] = []  # order of backward's reads, set after forward
        self._ahead = self._position = 0
        self.staying = staying
        self.bytes = self.resident_bytes = 0

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes of host memory at once, if possible. Otherwise memory is allocated
        for each tensor."""
        shortfall = size - self._holding.stack.free_bytes
        if shortfall > 0:
            self._holding.arena.grow(self._holding.stack, padded(shortfall))

    def save(self, name: str, chunk: int, tensor: Tensor) -> None:
        """Store a tensor [...]: start its copy to the host, or keep the tensor on the device if
        `staying` names it and `gpu_memory` has room. A tensor stored before under this name and
        chunk is replaced.

        Args:
            name: name of the tensor in the storage, such as "k.0".
            chunk: index of the chunk.
            tensor: the tensor on the device.
        """
        self._check_not_retired()
        self._transfers.begin(self, chunk)
        entry = self._entries.get((name, chunk))
        if entry is not None and entry.host is None:
            entry.source = tensor
        elif entry is not None:
            self._transfers.send(self._holding, entry, tensor, (entry.read,))
        else:
            self.bytes += tensor.nbytes
            stays = self.staying is None or saves_name(name) in self.staying
            if stays and self._manager.has_room(tensor.nbytes):
                self.resident_bytes += tensor.nbytes
                entry = TensorEntry(self._engine, tensor, budgeted=True)
            else:
                optional = (
                    self._holding.stack.kind == MICRO_BATCH
                    and name.split(".")[0] not in RECOMPUTATION_INPUTS
                )
                entry = self._manager.move_to_host(
                    self._holding, self._engine, tensor, optional, needs_clone=name == "x"
                )
            if entry is not None:
                if entry.host is None and name == "x":  # the tensor belongs to the caller
                    entry.version = tensor._version
                self._entries[name, chunk] = entry

    def has(self, name: str, chunk: int) -> bool:
        """True if a tensor is stored under this name, such as "k.0", for the chunk with index
        `chunk`."""
        return (name, chunk) in self._entries

    def finish_copies(self) -> bool:
        """Free the tensors on the device whose copies to the host were started. The compute stream
        first waits for these copies. Return True if such tensors existed."""
        return self._transfers.release() > 0

    def drop(self, names: Callable[[str], bool]) -> set[str]:
        """Remove tensors that are stored on the device and not on the host, to free device memory.
        Return the names of the removed tensors.

        Args:
            names: function that returns True if tensors of the given name may be removed.
        """
        dropped = set()
        for access, entry in list(self._entries.items()):
            if entry.host is None and names(access[0]):
                self.remove(*access)
                dropped.add(access[0])
        return dropped

    def load(self, name: str, chunk: int) -> None:
        """Start the copy of a stored tensor to the device, unless the tensor is on the device or on
        its way.

        Args:
            name: name of the tensor in the storage, such as "k.0".
            chunk: index of the chunk.
        """
        entry = self._entry(name, chunk)
        holding = self._holding
        if entry.source is not None or entry in holding.arriving:
            return
        assert entry.host is not None
        engine = entry.engine
        tensor = engine.empty_like(entry.host)
        engine.wait(FROM_HOST_QUEUE, engine.record(COMPUTE_QUEUE))  # [Note: offload order], 2
        engine.wait(FROM_HOST_QUEUE, entry.copied_out)  # 3
        engine.copy(FROM_HOST_QUEUE, tensor, entry.host)
        holding.stack.last_uses[engine, FROM_HOST_QUEUE] = entry.read = event = engine.record(
            FROM_HOST_QUEUE
        )
        holding.arriving[entry] = (tensor, event)
        self._transfers.bytes[FROM_HOST_QUEUE] += tensor.nbytes

    def peek(self, name: str, chunk: int) -> Tensor:
        """Return the tensor [...] stored under `name` for the chunk with index `chunk`, on the
        device. The caller must not change the tensor, which stays in the storage.

        Raises:
            BackwardError: the tensor is the layer's input, stayed on the device, and was changed in
                place since forward.
        """
        entry = self._entry(name, chunk)
        reads = self._order[self._position] if self._position < len(self._order) else []
        self._position += (name, chunk) in reads
        if entry.source is not None:
            tensor = entry.source
        else:
            if entry not in self._holding.arriving and (name, chunk) in reads:
                self._load_all(reads)
            self.load(name, chunk)
            tensor, event = self._holding.arriving.pop(entry)
            entry.engine.wait(COMPUTE_QUEUE, event)  # 4
            entry.engine.access(COMPUTE_QUEUE, tensor, write=False)
        if entry.version is not None and entry.version != tensor._version:
            raise BackwardError(
                "The input of a streamed layer was changed in place between forward and backward. "
                "Work on a copy (tensor.clone()) instead."
            )
        return tensor

    def borrow(self, name: str, chunk: int) -> Tensor:
        """Return the tensor [...] stored under `name` for the chunk with index `chunk`, on the
        device. The caller may change the tensor, and then stores the tensor again with `save`."""
        tensor = self.peek(name, chunk)
        entry = self._entries[name, chunk]
        if tensor is entry.source:
            entry.engine.wait(COMPUTE_QUEUE, entry.copied_out)  # 6: the copy out may still read it
        entry.engine.access(COMPUTE_QUEUE, tensor, write=True)
        return tensor

    def take(self, name: str, chunk: int) -> Tensor:
        """Return the tensor [...] stored under `name` for the chunk with index `chunk`, on the
        device, and remove the tensor from the storage."""
        tensor = self.peek(name, chunk)
        self.remove(name, chunk)
        return tensor

    def remove(self, name: str, chunk: int) -> None:
        """Remove the tensor stored under `name` for the chunk with index `chunk`."""
        entry = self._entries.pop((name, chunk))
        if entry.budgeted and entry.source is not None:
            self.resident_bytes -= entry.source.nbytes
        self._transfers.release(entry)

    def seal(self, order: list[list[Access]], workspace: int = 0) -> None:
        """End a layer's forward: set the order in which backward will read the stored tensors. The
        order tells which copies to the device must be started early.

        Args:
            order: groups of (name, chunk) in backward's order; backward reads all tensors of a
                group together.
            workspace: device bytes that the layer's backward needs beside the stored tensors.
        """
        self._order = order
        self._position = 0
        self._ahead = max(map(len, order), default=0)
        self._manager.workspace = max(self._manager.workspace, workspace)

    def read_ahead(self) -> None:
        """Start the copies to the device that backward needs next, in this layer, or in the layer
        before if this layer has no more.

        Tensors that backward reads together form a group. Groups are started in backward's order,
        until at least as many tensors are on their way as the largest group has. A device
        without memory gets the tensors later, when backward reads them.
        """
        try:
            self._read_ahead()
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise

    def _read_ahead(self) -> None:
        """Start the copies to the device that backward needs next. Called by `read_ahead`, which
        also handles the error if the device has no memory left."""
        started = 0
        if not self._order:  # forward runs, or the store holds a prefix's tiles
            return
        for reads in self._order[self._position :]:
            started += self._load_all(reads)
            if started >= self._ahead:
                break
        previous_store = self._previous_store() if self._previous_store is not None else None
        if previous_store is not None and not started:
            previous_store._read_ahead()

    def _load_all(self, reads: list[Access]) -> int:
        """Start the copies to the device of the tensors in `reads` that are still stored. Return
        the number of these tensors, also of those that are on the device already.

        Args:
            reads: pairs (name, chunk).
        """
        stored_reads = [access for access in reads if access in self._entries]
        for access in stored_reads:
            self.load(*access)
        return len(stored_reads)

    def _check_not_retired(self) -> None:
        if not self._holding.retire.alive:
            raise BackwardError(
                "The saved tensors of this forward were freed, because OffloadManager.abort or "
                "close was called since. Compute the loss again."
            )

    def _entry(self, name: str, chunk: int) -> TensorEntry:
        entry = self._entries.get((name, chunk))
        if entry is None:
            self._check_not_retired()
            raise BackwardError(
                f"{name} of chunk {chunk} was read a second time, or never saved; backward can "
                "read an offloaded tensor once. Compute the loss again, or add losses up and call "
                "backward once."
            )
        return entry
