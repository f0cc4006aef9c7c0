"""Where tensors wait between a layer's forward and its backward."""

from __future__ import annotations

from typing import Protocol

from streambp.attention.kv import TileStore

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


class Notes(Protocol):
    """Notes on the steps of a model. [Note: notes on a step]"""

    def in_backward(self) -> None:
        """The backward of a layer begins."""
        ...
