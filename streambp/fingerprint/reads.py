"""Which attributes a layer's code reads, as far as its source tells.

A program may note on modules what no forward reads: a profiler's handles, a phase, a time. Such a note may change between a
forward and its backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from streambp.known_names import READ_ALWAYS

# Read by torch for every module, or by streamed attention.
ALWAYS = ("forward", "training", *READ_ALWAYS)
DEPTH = 2  # functions that a module's methods call, and those that these call


def names_read(modules: Iterable[nn.Module], hooks: Iterable[Any]) -> set[str]:
    """The names that the methods of these modules, functions in their attributes and these hooks may read.

    Strings in the source count, since getattr takes them.
    """
    found: set[str] = set(ALWAYS)
    seen: set[int] = set()
    classes: set[type] = set()
    for module in modules:
        classes |= {base for base in type(module).__mro__ if base not in (nn.Module, object)}
        _collect(list(module.__dict__.values()), found, seen, DEPTH)
    for base in classes:
        _collect(list(vars(base).values()), found, seen, DEPTH)
    _collect(hooks, found, seen, DEPTH)
    return found


def _collect(values: Iterable[Any], found: set[str], seen: set[int], depth: int) -> None:
    for function in (function for value in values for function in _functions(value)):
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        names: set[str] = set()
        codes = [function.__code__]
        for code in codes:  # which grows
            names.update(code.co_names, (constant for constant in code.co_consts if isinstance(constant, str)))
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        found |= names
        held = []
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                held.append(cell.cell_contents)
        _collect(held, found, seen, depth)
        if depth:
            called = (function.__globals__.get(name) for name in names)
            _collect((f for f in called if isinstance(f, FunctionType)), found, seen, depth - 1)


def _functions(value: Any) -> list[FunctionType]:
    """What runs when a member of a class, a hook or an attribute is called or read."""
    if isinstance(value, property):
        return [f for part in (value.fget, value.fset) for f in _functions(part)]
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, FunctionType):
        return [value, *_functions(getattr(value, "__wrapped__", None))]
    call = getattr(type(value), "__call__", None)  # noqa: B004 - the function itself is wanted
    return [call] if isinstance(call, FunctionType) and not isinstance(value, nn.Module) else []
