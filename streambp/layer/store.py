"""Where tensors wait between a layer's forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from streambp.attention.kv import TileStore
from streambp.layer.cost import Watch

Access = tuple[str, int]


class SavedTensors(TileStore, Protocol):
    """One layer's saved tensors; chunks are taken last to first. copies: what was put may be changed afterwards."""

    @property
    def copies(self) -> bool:
        """Whether what was put may be changed afterwards."""
        ...

    def seal(self, accesses: list[Access], ahead: int, workspace: int = 0) -> None:
        """Forward is over. Backward will read in this order, `ahead` tensors of a chunk at a time, and needs `workspace`
        bytes on the device beside."""
        ...


class Offloader(Protocol):
    """Makes the stores of a model whose saved tensors leave the device. prefix_memory: bytes that a prefix may use there;
    None: no limit."""

    @property
    def prefix_memory(self) -> int | None:
        """Bytes of the device that the prefixes of one layer call may use; None: no limit."""
        ...

    def scratch(self, device: torch.device) -> TileStore:
        """A store for what lives no longer than one pass over a layer's chunks."""
        ...

    def open(self, index: int, device: torch.device, length: int) -> SavedTensors:
        """The store for a call of the model's layer `index` on so many tokens a row."""
        ...

    def chosen_saves(self, length: int) -> tuple[str, ...] | None:
        """What to save of a sequence of that length; None: what the configuration says."""
        ...

    def watch(self, length: int, unread: dict[Any, Any]) -> Watch | None:
        """Measures this call; None: nothing is to be measured. unread: `LayerSite.unread`."""
        ...


class Chooser(Protocol):
    """Chooses what the layers of a model save on the device. [Note: saves that fit]"""

    @property
    def latest(self) -> object | None:
        """What the last micro-batch chose; its str() tells."""
        ...

    def saves(self, kept: Any, rows: int, can_keep_graph: Callable[[], bool]) -> tuple[str, ...]:
        """What the call of a layer saves that keeps what it saves in `kept`, for a batch of so many rows.

        can_keep_graph: whether its graph may be among it. [Note: kept graphs]
        """
        ...

    def look(self, kept: Any) -> None:
        """A chunk of this call begins: let go of what backward can compute again if the device lacks memory for it."""
        ...

    def let_go(self, kept: Any) -> bool:
        """Let go of what backward can compute again, after this call has run out of memory; False: nothing was there."""
        ...

    def failed(self) -> None:
        """A step has run out of memory."""
        ...


class InMemory:
    """Keeps the tensors where they are."""

    copies = False

    def __init__(self) -> None:
        self._tensors: dict[Access, Tensor] = {}

    def put(self, name: str, chunk: int, tensor: Tensor) -> None:
        """Keep the tensor itself."""
        self._tensors[name, chunk] = tensor

    def has(self, name: str, chunk: int) -> bool:
        """True from `put` to `take`."""
        return (name, chunk) in self._tensors

    def keep_only(self, needed: Callable[[str], bool]) -> None:
        """Let go of the tensors whose names are not needed."""
        self._tensors = {access: tensor for access, tensor in self._tensors.items() if needed(access[0])}

    def reserve(self, size: int) -> None:
        """Nothing: a tensor that is kept needs no room of its own."""

    def seal(self, accesses: list[Access], ahead: int, workspace: int = 0) -> None:
        """Nothing: no tensor has to come back."""

    def load(self, name: str, chunk: int) -> None:
        """Nothing: the tensor is where it was."""

    def borrow(self, name: str, chunk: int) -> Tensor:
        """The tensor itself, so that a change of it is kept at once."""
        return self._tensors[name, chunk]

    def peek(self, name: str, chunk: int) -> Tensor:
        """The tensor itself."""
        return self._tensors[name, chunk]

    def take(self, name: str, chunk: int) -> Tensor:
        """The tensor itself, which is not kept any longer."""
        return self._tensors.pop((name, chunk))
