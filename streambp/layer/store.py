"""Where tensors wait between a layer's forward and its backward."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

Access = tuple[str, int]


class SavedTensors(Protocol):
    """One layer's saved tensors, by name and chunk. chunks are taken last to first.

    `take` gives a tensor back for the last time, `peek` leaves it in place for another read. `seal` ends forward: backward
    will read `accesses` in this order, `ahead` of them belong to one chunk. copies: what was put in may be freed or changed
    afterwards.
    """

    @property
    def copies(self) -> bool: ...

    def put(self, name: str, chunk: int, tensor: Tensor) -> None: ...

    def has(self, name: str, chunk: int) -> bool: ...

    def seal(self, accesses: list[Access], ahead: int) -> None: ...

    def peek(self, name: str, chunk: int) -> Tensor: ...

    def take(self, name: str, chunk: int) -> Tensor: ...


class Offloader(Protocol):
    """Makes the stores of a model whose saved tensors leave the device."""

    def open(self, index: int, device: torch.device) -> SavedTensors:
        """The store for a call of the model's layer `index`."""
        ...


class InMemory:
    """Keeps the tensors where they are."""

    copies = False

    def __init__(self) -> None:
        self._tensors: dict[Access, Tensor] = {}

    def put(self, name: str, chunk: int, tensor: Tensor) -> None:
        self._tensors[name, chunk] = tensor

    def has(self, name: str, chunk: int) -> bool:
        return (name, chunk) in self._tensors

    def seal(self, accesses: list[Access], ahead: int) -> None:
        pass

    def peek(self, name: str, chunk: int) -> Tensor:
        return self._tensors[name, chunk]

    def take(self, name: str, chunk: int) -> Tensor:
        return self._tensors.pop((name, chunk))
