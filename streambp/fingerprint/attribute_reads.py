"""Find the attributes that a layer's code reads, from its bytecode.

A program may set attributes that no forward reads: a profiler's handles, a phase, a time. These
attributes may change between a forward and its backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from streambp.known_names import ATTENTION_ATTRIBUTES

# Read by torch for every module, or by streamed attention.
ALWAYS_READ_ATTRIBUTES = ("forward", "training", *ATTENTION_ATTRIBUTES)
MAX_CALL_DEPTH = 2  # levels of called functions that are searched, below a module's methods


def names_read(modules: Iterable[nn.Module], hooks: Iterable[Any]) -> set[str]:
    """Return the names of the attributes that the code of these modules and hooks may read. An
    attribute that changes between forward and backward matters only if its name is among these
    names.

    The names are all attribute names and string constants in the code, because getattr takes
    strings. `ALWAYS_READ_ATTRIBUTES`, which torch or streambp reads of every module, are added.

    Args:
        modules: modules whose methods are searched, and functions among their attributes.
        hooks: module hooks, searched as well.
    """
    names: set[str] = set(ALWAYS_READ_ATTRIBUTES)
    visited: set[int] = set()
    classes: set[type] = set()
    for module in modules:
        classes |= {base for base in type(module).__mro__ if base not in (nn.Module, object)}
        _collect(list(module.__dict__.values()), names, visited, MAX_CALL_DEPTH)
    for base in classes:
        _collect(list(vars(base).values()), names, visited, MAX_CALL_DEPTH)
    _collect(hooks, names, visited, MAX_CALL_DEPTH)
    return names


def _collect(values: Iterable[Any], names_found: set[str], visited: set[int], depth: int) -> None:
    """Add the attribute names in the code of some functions to `names_found`. The functions in
    their closures, and the global functions that they call, are searched too.

    Args:
        values: functions, and objects around functions, such as properties, methods and partials;
            all other values are ignored.
        names_found: receives the names.
        visited: ids of the code objects that were searched already.
        depth: the number of levels of called global functions that are searched.
    """
    for function in (function for value in values for function in _functions(value)):
        if id(function.__code__) in visited:
            continue
        visited.add(id(function.__code__))
        names: set[str] = set()
        codes = [function.__code__]
        for code in codes:  # the loop appends to this list
            names.update(
                code.co_names,
                (constant for constant in code.co_consts if isinstance(constant, str)),
            )
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names_found |= names
        contents = []
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # the variable has no value yet
                contents.append(cell.cell_contents)
        _collect(contents, names_found, visited, depth)
        if depth:
            called = (function.__globals__.get(name) for name in names)
            _collect(
                (f for f in called if isinstance(f, FunctionType)), names_found, visited, depth - 1
            )


def _functions(value: Any) -> list[FunctionType]:
    """Return the Python functions whose code runs if this value is called: the function in a
    method, a partial or a decorator, or the `__call__` of an object. A property gives the functions
    that read and set the attribute. [] for values without such functions.

    Args:
        value: an attribute of a module or class, a hook, or a value in a closure.
    """
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
