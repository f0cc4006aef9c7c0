"""Where tensors wait between a layer's forward and its backward."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SavedTensors(Protocol):
    """One layer's saved tensors, by name and chunk. chunks are taken last to first.

    `take` gives a tensor back for the last time, `peek` leaves it in place for another read.
    """

    def put(self, name: str, chunk: int, tensor: Tensor) -> None: ...

    def peek(self, name: str, chunk: int) -> Tensor: ...

    def take(self, name: str, chunk: int) -> Tensor: ...

    def clear(self) -> None: ...


class InMemory:
    """Keeps the tensors where they are."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, int], Tensor] = {}

    def put(self, name: str, chunk: int, tensor: Tensor) -> None:
        self._tensors[name, chunk] = tensor

    def peek(self, name: str, chunk: int) -> Tensor:
        return self._tensors[name, chunk]

    def take(self, name: str, chunk: int) -> Tensor:
        return self._tensors.pop((name, chunk))

    def clear(self) -> None:
        self._tensors.clear()
