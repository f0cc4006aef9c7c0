"""Tensors in nested containers, and attributes that several objects lend for a while."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

T = TypeVar("T", bound=Tensor)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for the differentiable tensor of that number."""

    number: int


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every tensor and slot in its tuples, lists and mappings changed."""
    if isinstance(value, Tensor | Slot):
        return change(value)
    if isinstance(value, tuple | list):
        parts = list(map(rebuilt, value, itertools.repeat(change)))
        return type(value)(parts) if type(value) in (tuple, list) else value
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        changed = copy.copy(value)
        for key, part in value.items():
            changed[key] = rebuilt(part, change)
        return changed
    return value


@contextlib.contextmanager
def replaced(objects: Collection[Any], name: str, value: Any) -> Iterator[None]:
    """Within, an attribute of these objects has that value."""
    before = [getattr(one, name) for one in objects]
    try:
        for one in objects:
            setattr(one, name, value)
        yield
    finally:
        for one, own in zip(objects, before, strict=True):
            setattr(one, name, own)


def tensors_in(value: Any, kind: type[T]) -> list[T]:
    """The tensors of a kind in nested containers."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, kind):
            found.append(leaf)
    return found
