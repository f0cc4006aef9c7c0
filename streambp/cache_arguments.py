"""Which arguments take a cache: found by what functions say of them and do with them, whatever their names are.

[Note: cache arguments] transformers has called a layer's cache `past_key_values`, `past_key_value`, `layer_past`,
`cache_params` and, from 5.24 on, `cache`; models outside of it have names of their own. So no name is asked for:

    a value is a cache        by its class: transformers' `Cache`, or a class with a cache's name or a cache's methods
    a parameter takes one     its annotation names such a class, or the forward calls a cache's methods on it
    a layer's parameter       the same of its own forward; else it has the name of one of a module inside the layer, to
                              which it is handed on. A forward that takes what it is given and hands it on (**kwargs)
                              has the parameters of the forwards above it in its class, or of the modules inside.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import typing
from collections.abc import Hashable, Iterator, Mapping
from types import CodeType
from typing import Any

from torch import nn
from transformers.cache_utils import Cache

from streambp.known_names import CACHE_CALLS, SEQUENCE_LENGTH, STATE, UNTYPED_CACHES, UPDATE
from streambp.source import written

ENDING = "Cache"  # of the names of classes that are caches
READS = ("LOAD_FAST", "LOAD_DEREF")  # the starts of operations that read a parameter
ASKS = ("LOAD_ATTR", "LOAD_METHOD")  # the starts of those that read an attribute
MAPPINGS = ("dict", "Dict", "Mapping", "MutableMapping")  # these have an `update`, and are no caches


@functools.lru_cache(maxsize=1024)
def is_cache_class(kind: Hashable) -> bool:
    """Whether objects of a class are caches. [Note: cache arguments]"""
    if not isinstance(kind, type) or issubclass(kind, nn.Module):
        return False
    if issubclass(kind, Cache) or any(base.__name__.endswith(ENDING) for base in kind.__mro__):
        return True
    return all(callable(getattr(kind, name, None)) for name in (UPDATE, SEQUENCE_LENGTH))


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of keys, values or states."""
    kind: Any = type(value)
    return value is not None and is_cache_class(kind)


def has_cache(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is given a cache to read and write, or states to go on from."""
    for name, value in kwargs.items():
        if value is None:
            continue
        if is_cache(value) or name == STATE or name in UNTYPED_CACHES:
            return True
    return False


def without_caches(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments with None in the place of each cache."""
    return {name: None if is_cache(value) else value for name, value in kwargs.items()}


@functools.lru_cache(maxsize=4096)
def cache_parameters(forward: Any) -> tuple[str, ...]:
    """The parameters of a function that take a cache: those that are annotated so first, then those that it calls a
    cache's methods on."""
    forward = written(forward)
    code = getattr(forward, "__code__", None)
    if not isinstance(code, CodeType):
        return ()
    names = _parameters(code)
    annotations = getattr(forward, "__annotations__", {})
    annotated = [name for name in names if names_a_cache(annotations.get(name), forward.__globals__)]
    used = _called_as_caches(code)
    called = [name for name in names if name in used and name not in annotated and not _is_mapping(annotations.get(name))]
    return (*annotated, *called)


def cache_arguments(layer: nn.Module) -> tuple[str, ...]:
    """The arguments that take the cache of a layer, or of another module that hands it on. [Note: cache arguments]"""
    forwards = [vars(base)["forward"] for base in type(layer).__mro__ if "forward" in vars(base) and base is not nn.Module]
    inner = dict.fromkeys(name for part in layer.modules() if part is not layer for name in _of_class(type(part)))
    for forward in forwards:
        found = cache_parameters(forward)
        if found:
            return found
        code = getattr(written(forward), "__code__", None)
        if not isinstance(code, CodeType):
            return ()
        handed = tuple(name for name in _parameters(code) if name in inner)
        if handed or not code.co_flags & inspect.CO_VARKEYWORDS:
            return handed
    return tuple(inner)


def _of_class(kind: type[nn.Module]) -> tuple[str, ...]:
    return cache_parameters(kind.forward)


def _parameters(code: CodeType) -> tuple[str, ...]:
    """The parameters of a function by name, but those that collect what has no parameter."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def names_a_cache(annotation: Any, names: Mapping[str, Any]) -> bool:
    """Whether an annotation, which may be a text, names the class of a cache.

    Args:
        names: where a text's names stand.
    """
    if annotation is None:
        return False
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        words = re.findall(r"[A-Za-z_]\w*", annotation)
        return any(word.endswith(ENDING) or is_cache_class(names.get(word)) for word in words)
    parts = typing.get_args(annotation)
    return any(names_a_cache(part, names) for part in parts) if parts else is_cache_class(annotation)


def _is_mapping(annotation: Any) -> bool:
    """Whether an annotation names a dictionary."""
    return any(word in MAPPINGS for word in re.findall(r"[A-Za-z_]\w*", str(annotation)))


def _called_as_caches(code: CodeType) -> frozenset[str]:
    """The variables on which a function calls methods that caches have."""
    return frozenset(name for name, method in _asked(code) if method in CACHE_CALLS)


def _asked(code: CodeType) -> Iterator[tuple[str, str]]:
    """Each attribute that a function reads of one of its variables: the variable, the attribute."""
    before: Any = None
    for step in dis.get_instructions(code):
        if step.opname.startswith(ASKS) and before is not None:
            yield before, str(step.argval)
        loads = step.opname.startswith(READS)
        before = step.argval if loads else None
        if isinstance(before, tuple):  # Python 3.13 reads two variables at once
            before = before[-1]
