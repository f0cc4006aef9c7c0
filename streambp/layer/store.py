"""Where tensors wait between a layer's forward and its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

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


class Weights(Protocol):
    """Where the weights of a model's layers live, if not on the device. [Note: weights on the host]"""

    def here(self, index: int, direction: str, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Within, those of the model's layer `index` are on the device, in a pass "forward", "backward" or "trial"."""
        ...

    def refuse_trained(self, index: int) -> None:
        """Gradients of those of layer `index` are wanted.

        Raises:
            UnsupportedModelError: it has none.
        """
        ...


class Chooser(Protocol):
    """Chooses what the layers of a model save on the device. [Note: saves that fit]"""

    @property
    def latest(self) -> object | None:
        """What the last micro-batch chose."""
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


class Notes(Protocol):
    """Notes on the steps of a model. [Note: notes on a step]"""

    def in_backward(self) -> None:
        """The backward of a layer begins."""
        ...
