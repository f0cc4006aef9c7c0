"""The tensors of one layer call that may be on the host, by name and chunk.

HostTensors     put in, brought back, put in again: the tiles of a prefix
LayerTensors    what waits between a layer's forward and its backward, read back in a known order
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor

from streambp.errors import BackwardError
from streambp.offload.arena import Arena
from streambp.offload.engines import Engine
from streambp.offload.transfers import Entry, Holding, Transfers

Access = tuple[str, int]
ESSENTIAL = ("x", "state")  # what a recomputation starts from


class Policy(Protocol):
    """What decides where a tensor goes."""

    @property
    def transfers(self) -> Transfers:
        """What starts the copies and waits for them."""
        ...

    def place(
        self, holding: Holding, engine: Engine, tensor: Tensor, optional: bool, foreign: bool = False
    ) -> Entry | None:
        """Where a tensor [...] is now: on its way to the host, or on the device; None for an optional one to be recomputed.

        engine: of the tensor's device. foreign: others may change the tensor in place; what goes to the host is as it is
            now.
        """
        ...

    def reserve(self, holding: Holding, size: int) -> None:
        """Make room for `size` bytes more on a holding's stack, if there are as many."""
        ...

    def has_room(self, size: int) -> bool:
        """Whether as many bytes of saved tensors may stay on the device."""
        ...

    def needs(self, workspace: int) -> None:
        """A backward will need as many bytes on the device for its prefix."""
        ...


class HostTensors:
    """Tensors of one device, by name and chunk, in one stack of host memory.

    Raises:
        HostMemoryError: the host budget is used up and `on_host_full` is "raise".
        BackwardError: a tensor is asked for that is not there (any more).
    """

    optional = False  # whether what does not fit may be left out

    def __init__(self, policy: Policy, holding: Holding, engine: Engine) -> None:
        self._policy = policy
        self._holding = holding
        self._engine = engine
        self._entries: dict[Access, Entry] = {}

    def reserve(self, size: int) -> None:
        """Make room for `size` bytes at once, if there are as many; otherwise it is made tensor by tensor."""
        self._policy.reserve(self._holding, size)

    def put(self, name: str, chunk: int, tensor: Tensor) -> None:
        """Start the copy of a tensor [...] to the host; one that was there before by that name and chunk is replaced."""
        self._check_not_retired()
        self._policy.transfers.begin(self, chunk)
        entry = self._entries.get((name, chunk))
        if entry is None:
            entry = self._place(name, tensor)
            if entry is not None:
                self._entries[name, chunk] = entry
        elif entry.host is None:
            entry.source = tensor
        else:
            self._policy.transfers.send(self._holding, entry, tensor, (entry.read,))

    def _place(self, name: str, tensor: Tensor) -> Entry | None:
        return self._policy.place(self._holding, self._engine, tensor, self.optional)

    def has(self, name: str, chunk: int) -> bool:
        """Whether it was put in and not taken."""
        return (name, chunk) in self._entries

    def load(self, name: str, chunk: int) -> None:
        """Start its copy back to the device, if it is not there."""
        self._policy.transfers.load(self._holding, self._entry(name, chunk))

    def peek(self, name: str, chunk: int) -> Tensor:
        """The tensor [...], on the device, to be read alone; it stays on the host."""
        return self._policy.transfers.fetch(self._holding, self._entry(name, chunk))

    def borrow(self, name: str, chunk: int) -> Tensor:
        """The tensor [...], on the device, to be changed and put in again."""
        return self._policy.transfers.borrow(self._holding, self._entry(name, chunk))

    def take(self, name: str, chunk: int) -> Tensor:
        """The tensor [...], on the device, for the last time."""
        tensor = self.peek(name, chunk)
        self._policy.transfers.let_go(self._entries.pop((name, chunk)))
        return tensor

    def _check_not_retired(self) -> None:
        if self._holding.retired:
            raise BackwardError(
                "The saved tensors of this forward were given up (OffloadManager.abort or close was called since). "
                "Compute the loss again."
            )

    def _entry(self, name: str, chunk: int) -> Entry:
        self._check_not_retired()
        entry = self._entries.get((name, chunk))
        if entry is None:
            raise BackwardError(
                f"{name} of chunk {chunk} was asked for a second time, or never saved; offloaded tensors are brought back "
                "once. Compute the loss again, or add losses up and call backward once."
            )
        return entry


class MicroBatch(Holding):
    """A forward that waits for its backward, and its layers in the order of their forward."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, "micro-batch")
        self.last_index = -1
        self.layers: list[weakref.ref[LayerTensors]] = []

    @property
    def layer_bytes(self) -> int:
        """Of the largest layer that has run; 0 if none has."""
        return max((tensors.bytes for tensors in (layer() for layer in self.layers) if tensors is not None), default=0)


class LayerTensors(HostTensors):
    """What one layer saves for its backward. Each tensor is taken once, chunks from the last to the first.

    stays: everything stays on the device. bytes: of everything put in; kept: of what stays and was not yet taken.
    """

    copies = True  # the tensors put in may be changed or freed afterwards

    def __init__(self, policy: Policy, batch: MicroBatch, engine: Engine, index: int, stays: bool) -> None:
        super().__init__(policy, batch, engine)
        self._batch = batch
        self._before = batch.layers[-1] if batch.layers else None
        self._accesses: list[Access] | None = None  # None: forward is not over
        self._ahead = 1
        self._position = 0
        self.index = index
        self.stays = stays
        self.bytes = self.kept = 0

    def _place(self, name: str, tensor: Tensor) -> Entry | None:
        self.bytes += tensor.nbytes
        if self.stays and self._policy.has_room(tensor.nbytes):
            self.kept += tensor.nbytes
            entry: Entry | None = Entry(self._engine, tensor, budgeted=True)
        else:
            optional = name.split(".")[0] not in ESSENTIAL
            entry = self._policy.place(self._batch, self._engine, tensor, optional, foreign=name == "x")
        if entry is not None and entry.host is None and name == "x":  # the caller's tensor, not ours
            entry.version = tensor._version
        return entry

    def seal(self, accesses: list[Access], ahead: int, workspace: int = 0) -> None:
        """Forward is over; backward will read in this order, `ahead` tensors of a chunk at a time.

        workspace: bytes on the device that backward needs beside.
        """
        self._accesses = [access for access in accesses if access in self._entries]
        self._ahead = ahead
        self._policy.needs(workspace)

    def peek(self, name: str, chunk: int) -> Tensor:
        """`HostTensors.peek` of a tensor [...], which also starts the copies of what is read next.

        Raises:
            BackwardError: it is the layer's input, which stayed on the device and was changed in place since forward.
        """
        entry = self._entry(name, chunk)
        tensor = super().peek(name, chunk)
        if entry.version is not None and entry.version != tensor._version:
            raise BackwardError(
                "The input of a streamed layer was changed in place between forward and backward. "
                "Work on a copy (tensor.clone()) instead."
            )
        if self._accesses is not None:
            if self._accesses[self._position : self._position + 1] == [(name, chunk)]:
                self._position += 1
            self.prefetch(self._ahead)
        return tensor

    def take(self, name: str, chunk: int) -> Tensor:
        """`HostTensors.take` of a tensor [...], after which its bytes are free in the device's budget."""
        entry = self._entry(name, chunk)
        tensor = super().take(name, chunk)
        self.kept -= tensor.nbytes if entry.budgeted else 0
        return tensor

    def forget(self) -> None:
        """Let everything go; it cannot be asked for any more."""
        self._entries.clear()
        self.kept = 0

    def prefetch(self, count: int) -> None:
        """Start the copies of what is read next, here and then in the layer whose backward follows."""
        ahead = (self._accesses or [])[self._position : self._position + count]
        for access in ahead:
            if access in self._entries:
                self.load(*access)
        before = self._before() if self._before is not None else None
        if before is not None and len(ahead) < count:
            before.prefetch(count - len(ahead))
