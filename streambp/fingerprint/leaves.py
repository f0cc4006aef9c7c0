"""What is seen of a value that a layer's forward may read: an attribute, or what a hook closes over.

Each value gives leaves, one for each number, string, tensor or object in it, down to a few levels: entries of small
containers, what a function closes over and which code it runs, attributes of objects that are not torch's. A leaf has two
sides. Exactly: does this forward read the same as that one? As a kind: does what was found out about the layer still hold?
For the kind a number is zero or not, a function its code, an object its class: an annealed weight or a hook that a `with`
block puts on anew in every step is no other kind of layer.

What no leaf tells: globals, objects deep inside of others, containers of more than `SMALL` entries.
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

SMALL = 32
DEPTH = 4
PLAIN = (bool, str, bytes, torch.dtype, torch.device, torch.layout)
CONTAINERS = (list, tuple, set, frozenset)
CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


class Mark:
    """An object's identity. It keeps nothing alive, and an object that comes to lie in its place is another one."""

    def __init__(self, value: Any) -> None:
        self.kind = name_of(type(value)).rpartition(".")[2]
        try:
            self._mark: Any = weakref.ref(value)  # the same reference for each mark of one object
        except TypeError:
            self._mark = id(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mark):
            return False
        numbers = isinstance(self._mark, int) and isinstance(other._mark, int)
        return self._mark is other._mark or (numbers and bool(self._mark == other._mark))  # references compare objects

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{'an' if self.kind[:1] in 'AEIOUaeiou' else 'a'} {self.kind}"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """name: of the value and where in it. exact: compares equal where a forward would read the same. kind: has a repr that
    is the same for all values of one kind."""

    name: str
    exact: Any
    kind: Any


def name_of(known: Any) -> str:
    """Module and qualified name of a function or a class; of any other object, those of its class."""
    return f"{getattr(known, '__module__', None)}.{getattr(known, '__qualname__', type(known).__qualname__)}"


def plain_leaf(value: Any, name: str) -> Leaf | None:
    """The one leaf of what most attributes are; None: ask `leaves`."""
    known = type(value)
    if value is None or known is bool or known is str:
        return Leaf(name, value, value)
    return Leaf(name, value, ("number", value != 0)) if known is int or known is float else None


def leaves(value: Any, name: str, depth: int = DEPTH) -> Iterator[Leaf]:
    """All that is seen of a value by that name."""
    if value is None or isinstance(value, PLAIN):
        yield Leaf(name, value, value)
    elif isinstance(value, int | float | complex):
        yield Leaf(name, value, ("number", value != 0))
    elif isinstance(value, Tensor):
        yield Leaf(name, (Mark(value), version_of(value)), ("tensor", value.requires_grad))
    elif isinstance(value, type):
        yield Leaf(name, Mark(value), name_of(value))
    elif isinstance(value, (Mapping, *CONTAINERS)):
        found = contents(value)
        if found is None or depth == 0:
            yield Leaf(name, Mark(value), name_of(type(value)))
            return
        yield Leaf(name, ("entries", len(found)), name_of(type(value)))
        for key, part in found:
            yield from leaves(part, f"{name}{key}", depth - 1)
    elif isinstance(value, CALLABLES) and depth == 0:
        yield Leaf(name, Mark(value), name_of(value))
    elif isinstance(value, functools.partial):
        yield from leaves(value.func, name, depth - 1)
        yield from leaves(value.args, f"{name} argument ", depth - 1)
        yield from leaves(value.keywords, f"{name} argument ", depth - 1)
    elif isinstance(value, types.MethodType):
        yield from leaves(value.__func__, name, depth - 1)
        yield from leaves(value.__self__, f"{name} of", depth - 1)
    elif isinstance(value, types.FunctionType):
        yield Leaf(name, value.__code__, (name_of(value), hash(value.__code__)))
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if held is not value:
                yield from leaves(held, f"{variable} in {name}", depth - 1)
        yield from leaves(value.__defaults__, f"defaults of {name}", depth - 1)
        yield from leaves(value.__kwdefaults__, f"defaults of {name}", depth - 1)
    else:
        own = type(value)
        known = _is_known(own)
        call = None if known or isinstance(value, nn.Module) else getattr(own, "__call__", None)  # noqa: B004 - its code
        code = hash(call.__code__) if isinstance(call, types.FunctionType) else None
        yield Leaf(name, Mark(value), (name_of(own if code or not known else value), code))
        if depth < 2 or known:
            return
        # Also of a module that is not inside the layer.
        for attribute, part in list(getattr(value, "__dict__", {}).items())[:SMALL]:
            if not attribute.startswith("_") and (part is None or isinstance(part, (*PLAIN, int, float, Tensor))):
                yield from leaves(part, f"{name}.{attribute}", depth - 1)


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor [...] was written to in place; None for an inference tensor, which keeps no count."""
    return None if tensor.is_inference() else tensor._version


def contents(value: Any) -> list[tuple[str, Any]] | None:
    """The entries of a small container, by what they are called in it; None: it is none, or not small."""
    if isinstance(value, Mapping) and len(value) <= SMALL:
        return [(f"[{key!r}]" if isinstance(key, str | int) else "[...]", part) for key, part in value.items()]
    if isinstance(value, CONTAINERS) and len(value) <= SMALL:
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [(f"[{index}]", part) for index, part in enumerate(ordered)]
    return None


def holds_more(value: Any) -> bool:
    """Whether its leaves may change while it and the entries of a container in its place stay the same."""
    if isinstance(value, CALLABLES):
        return True
    plain = value is None or isinstance(value, (*PLAIN, int, float, complex, Tensor, type, nn.Module, Mapping, *CONTAINERS))
    return not plain and not _is_known(type(value))


def _is_known(own: type) -> bool:
    return own.__module__.partition(".")[0] in OBJECTS_ARE_KNOWN
