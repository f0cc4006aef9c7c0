"""Where tensors wait between a layer's forward and its backward: where they are, or on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from streambp.offload.manager import Access, LayerTensors


class InMemory:
    """Keeps the tensors where they are."""

    copies = False

    def __init__(self) -> None:
        self._tensors: dict[Access, Tensor] = {}

    def put(self, name: str, chunk: int, tensor: Tensor) -> None:
        """Keep the tensor [...] itself."""
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
        """The tensor [...] itself, so that a change of it is kept at once."""
        return self._tensors[name, chunk]

    def peek(self, name: str, chunk: int) -> Tensor:
        """The tensor [...] itself."""
        return self._tensors[name, chunk]

    def take(self, name: str, chunk: int) -> Tensor:
        """The tensor [...] itself, which is not kept any longer."""
        return self._tensors.pop((name, chunk))


SavedTensors: TypeAlias = InMemory | LayerTensors
