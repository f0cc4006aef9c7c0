"""Split a value that a layer's forward may read into leaves: its comparable parts.

Such a value is an attribute, or a variable in a hook's closure. Each number, string, tensor or
object inside a value gives one leaf, down to a few levels. The levels are entries of small
containers, closures and code of functions, and attributes of objects outside torch. A leaf has two
sides. The exact side is equal if a forward would read the same value. The kind is equal if test
results about the layer still hold.

The kind of a number is zero or nonzero, that of a function is its code, and that of an object is
its class. An annealed weight therefore keeps the kind, and so does a hook that a `with` block
registers anew in every step.

Leaves do not cover globals, deeply nested objects, and containers of more than
`MAX_COMPARED_ENTRIES` entries.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streambp.known_names import OBJECTS_ARE_KNOWN

MAX_COMPARED_ENTRIES = 32
MAX_NESTING_DEPTH = 4
VALUE_TYPES = (bool, str, bytes, torch.dtype, torch.device, torch.layout)
CONTAINER_TYPES = (list, tuple, set, frozenset)
CALLABLE_TYPES = (types.FunctionType, types.MethodType, functools.partial)


class ObjectIdentity:
    """Value that stands for an object in a snapshot. Two values are equal only if they stand for
    the same object, however its content has changed. The snapshot does not keep the object alive,
    if its class allows weak references."""

    def __init__(self, value: Any) -> None:
        self.kind = name_of(type(value)).rpartition(".")[2]
        try:
            self._mark: Any = weakref.ref(value)  # one reference for all marks of an object
        except TypeError:
            self._mark = id(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectIdentity):
            return False
        numbers = isinstance(self._mark, int) and isinstance(other._mark, int)
        # comparing references would compare the objects
        return self._mark is other._mark or (numbers and bool(self._mark == other._mark))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{'an' if self.kind[:1] in 'AEIOUaeiou' else 'a'} {self.kind}"


@dataclasses.dataclass(frozen=True)
class ObservedValue:
    """A part of a value that a layer's forward may read, in a form that can be compared with the
    same part in another snapshot. An example is an entry of a list attribute.

    Attributes:
        name: the value's name and the position inside the value, such as "cache[3]".
        exact: equal in two snapshots if a forward would read the same value.
        kind: class and other properties of the part, without numbers and identities. Test results
            (if the layer can run in chunks) hold until the repr of `kind` changes.
    """

    name: str
    exact: Any
    kind: Any


def name_of(definition: Any) -> str:
    """Return the module and qualified name of a function or class. An object of any other type gets
    the name of its class."""
    name = getattr(definition, "__qualname__", type(definition).__qualname__)
    return f"{getattr(definition, '__module__', None)}.{name}"


def plain_leaf(value: Any, name: str) -> ObservedValue | None:
    """Return the comparable form (`ObservedValue`) of a None, bool, str, int or float. None for
    every other value, which `leaves` splits into parts.

    Args:
        value: the value.
        name: the value's name.
    """
    value_type = type(value)
    if value is None or value_type is bool or value_type is str:
        return ObservedValue(name, value, value)
    if value_type is int or value_type is float:
        return ObservedValue(name, value, ("number", value != 0))
    return None


def leaves(value: Any, name: str, depth: int = MAX_NESTING_DEPTH) -> Iterator[ObservedValue]:
    """Yield the parts of a value in comparable form (`ObservedValue`): the numbers, strings,
    tensors and objects inside. Two snapshots of a layer are compared by these parts.

    Args:
        value: an attribute of a module, or a hook.
        name: the value's name, with which the names of the parts begin.
        depth: levels of containers, closures and objects to search.
    """
    if value is None or isinstance(value, VALUE_TYPES):
        yield ObservedValue(name, value, value)
    elif isinstance(value, int | float | complex):
        yield ObservedValue(name, value, ("number", value != 0))
    elif isinstance(value, Tensor):
        yield ObservedValue(
            name, (ObjectIdentity(value), version_of(value)), ("tensor", value.requires_grad)
        )
    elif isinstance(value, type):
        yield ObservedValue(name, ObjectIdentity(value), name_of(value))
    elif isinstance(value, (Mapping, *CONTAINER_TYPES)):
        entries = contents(value)
        if entries is None or depth == 0:
            yield ObservedValue(name, ObjectIdentity(value), name_of(type(value)))
            return
        yield ObservedValue(name, ("entries", len(entries)), name_of(type(value)))
        for key, part in entries:
            yield from leaves(part, f"{name}{key}", depth - 1)
    elif isinstance(value, CALLABLE_TYPES) and depth == 0:
        yield ObservedValue(name, ObjectIdentity(value), name_of(value))
    elif isinstance(value, functools.partial):
        yield from leaves(value.func, name, depth - 1)
        yield from leaves(value.args, f"{name} argument ", depth - 1)
        yield from leaves(value.keywords, f"{name} argument ", depth - 1)
    elif isinstance(value, types.MethodType):
        yield from leaves(value.__func__, name, depth - 1)
        yield from leaves(value.__self__, f"{name} of", depth - 1)
    elif isinstance(value, types.FunctionType):
        yield ObservedValue(name, value.__code__, (name_of(value), hash(value.__code__)))
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
            if content is not value:
                yield from leaves(content, f"{variable} in {name}", depth - 1)
        yield from leaves(value.__defaults__, f"defaults of {name}", depth - 1)
        yield from leaves(value.__kwdefaults__, f"defaults of {name}", depth - 1)
    else:
        cls = type(value)
        is_known = _is_known_class(cls)
        call = None if is_known or isinstance(value, nn.Module) else getattr(cls, "__call__", None)  # noqa: B004 - its code
        code = hash(call.__code__) if isinstance(call, types.FunctionType) else None
        yield ObservedValue(
            name,
            ObjectIdentity(value),
            (name_of(cls if code or not is_known else value), code),
        )
        if depth < 2 or is_known:
            return
        # This includes modules outside the layer.
        for attribute, part in list(getattr(value, "__dict__", {}).items())[:MAX_COMPARED_ENTRIES]:
            if not attribute.startswith("_") and (
                part is None or isinstance(part, (*VALUE_TYPES, int, float, Tensor))
            ):
                yield from leaves(part, f"{name}.{attribute}", depth - 1)


def version_of(tensor: Tensor) -> int | None:
    """Return the version counter of a tensor [...]; None for an inference tensor, which has no
    counter."""
    return None if tensor.is_inference() else tensor._version


def contents(value: Any) -> list[tuple[str, Any]] | None:
    """Return the entries of a container as (label, entry), with labels such as "[3]". Snapshots
    compare each entry. None for containers of more than `MAX_COMPARED_ENTRIES` entries, and for all
    values that are no container."""
    if isinstance(value, Mapping) and len(value) <= MAX_COMPARED_ENTRIES:
        return [
            (f"[{key!r}]" if isinstance(key, str | int) else "[...]", part)
            for key, part in value.items()
        ]
    if isinstance(value, CONTAINER_TYPES) and len(value) <= MAX_COMPARED_ENTRIES:
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [(f"[{index}]", part) for index, part in enumerate(ordered)]
    return None


def has_inner_state(value: Any) -> bool:
    """True if comparing a value by identity and entries is not enough to see that it has changed.
    This holds for functions, whose closures may change, and for objects with attributes."""
    if isinstance(value, CALLABLE_TYPES):
        return True
    plain = value is None or isinstance(
        value,
        (*VALUE_TYPES, int, float, complex, Tensor, type, nn.Module, Mapping, *CONTAINER_TYPES),
    )
    return not plain and not _is_known_class(type(value))


def _is_known_class(cls: type) -> bool:
    """True if the attributes of objects of this class need not be compared: the class is from a
    library whose objects do not store a program's values."""
    return cls.__module__.partition(".")[0] in OBJECTS_ARE_KNOWN
