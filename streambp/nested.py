"""Find and replace tensors in nested containers, and set attributes of objects temporarily."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T", bound=Tensor)
# types without inner tensors
LEAVES = (Tensor, int, float, str, type(None), torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Placeholder for a tensor in nested arguments, which are stored without their tensors.

    Attributes:
        number: the tensor's index in a list.
    """

    number: int


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested lists, tuples and dicts with `change` applied to all tensors and
    `Slot` placeholders."""
    if isinstance(value, Tensor | Slot):
        return change(value)
    if isinstance(value, tuple | list):
        parts = list(map(rebuilt, value, itertools.repeat(change)))
        if type(value) in (tuple, list):
            return type(value)(parts)
        return value
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        changed = copy.copy(value)
        for key, part in value.items():
            changed[key] = rebuilt(part, change)
        return changed
    return value


@contextlib.contextmanager
def replaced(objects: Collection[Any], name: str, values: Iterable[Any]) -> Iterator[None]:
    """Context manager that sets the attribute `name` of several objects, each to its value in
    `values`, and restores the attributes afterwards."""
    before = [getattr(one, name) for one in objects]
    try:
        for one, value in zip(objects, values, strict=False):
            setattr(one, name, value)
        yield
    finally:
        for one, own in zip(objects, before, strict=True):
            setattr(one, name, own)


def tensors_in(value: Any, kind: type[T]) -> list[T]:
    """Return the tensors of type `kind` in nested lists, tuples and dicts."""
    if isinstance(value, LEAVES):
        return [value] if isinstance(value, kind) else []
    if type(value) in (tuple, list, dict):
        parts = value.values() if type(value) is dict else value
        leaves: list[T] = []
        for part in parts:
            leaves.extend(tensors_in(part, kind))
        return leaves
    leaves = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, kind):
            leaves.append(leaf)
    return leaves


def changed_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[T], change: Callable[[T], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with `change` applied to all tensors of type `kind`, also in nested
    lists, tuples and dicts."""
    # torch's tree functions are many times slower
    if all(isinstance(value, LEAVES) for value in (*args, *kwargs.values())):
        own = tuple([change(value) if isinstance(value, kind) else value for value in args])
        return own, {
            name: change(value) if isinstance(value, kind) else value
            for name, value in kwargs.items()
        }
    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(kind, change, (args, kwargs))
    return found
