"""Find the arguments of a layer that take a cache, by annotations and use instead of names.

transformers has called a layer's cache `past_key_values`, `past_key_value`, `layer_past`,
`cache_params` and, since 5.24, `cache`. Models outside of transformers use names of their own.
Caches are therefore found without names:

    a value is a cache        if its class is transformers' `Cache`, or has a cache's name or
                              methods
    a parameter takes one     if its annotation names such a class, or the forward calls a cache's
                              methods on it
    a layer's parameter       the same, for its own forward; otherwise the parameter has the name of
                              a cache parameter of an inner module, to which the layer passes it. A
                              forward with **kwargs has the parameters of its base classes'
                              forwards, or of the modules inside.
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

from streambp.known_names import CACHE_CALLS, SEQUENCE_LENGTH, UPDATE_METHOD
from streambp.source import undecorate

CACHE_CLASS_SUFFIX = "Cache"  # the ending of cache classes' names
VARIABLE_READ_OPS = ("LOAD_FAST", "LOAD_DEREF")  # prefixes of instructions that read a parameter
VARIABLE_WRITE_OPS = (
    "STORE_FAST",
    "STORE_DEREF",
)  # prefixes of instructions that assign a variable
ATTRIBUTE_READ_OPS = ("LOAD_ATTR", "LOAD_METHOD")  # prefixes of instructions that read an attribute
# classes with an `update` that are no caches
MAPPING_CLASSES = ("dict", "Dict", "Mapping", "MutableMapping")


@functools.lru_cache(maxsize=1024)
def is_cache_class(kind: Hashable) -> bool:
    """True if instances of the class are caches of keys, values or recurrent states, such as
    transformers' `DynamicCache`."""
    if not isinstance(kind, type) or issubclass(kind, nn.Module):
        return False
    if issubclass(kind, Cache) or any(
        base.__name__.endswith(CACHE_CLASS_SUFFIX) for base in kind.__mro__
    ):
        return True
    return all(callable(getattr(kind, name, None)) for name in (UPDATE_METHOD, SEQUENCE_LENGTH))


def is_cache(value: Any) -> bool:
    """True if the value is a cache of keys, values or recurrent states, by its class."""
    kind: Any = type(value)
    return value is not None and is_cache_class(kind)


def without_caches(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's keyword arguments with None in place of each cache. Used to run a layer on
    all tokens at once: the run needs no cache, and must not add keys to the caller's cache."""
    return {name: None if is_cache(value) else value for name, value in kwargs.items()}


@functools.lru_cache(maxsize=4096)
def cache_parameters(forward: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters that take a cache.

    Parameters that are annotated with a cache class come first. Other parameters are found in the
    bytecode, if the function calls a cache's methods on them.
    """
    forward = undecorate(forward)
    code = getattr(forward, "__code__", None)
    if not isinstance(code, CodeType):
        return ()
    names = _parameters(code)
    annotations = getattr(forward, "__annotations__", {})
    called_names = _called_as_caches(code)
    annotated = []
    called = []
    for name in names:
        annotation = annotations.get(name)
        if names_a_cache(annotation, forward.__globals__):
            annotated.append(name)
        elif name in called_names and not _is_mapping(annotation):
            called.append(name)
    return (*annotated, *called)


def cache_arguments(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of a decoder layer's forward arguments that take a KV cache. The layer may
    pass the cache on to its attention without using it.
    """
    inner: dict[str, None] = {}
    for part in layer.modules():
        if part is not layer:
            inner.update(dict.fromkeys(_cache_parameters_of_class(type(part))))
    forwards = []
    for base in type(layer).__mro__:
        if "forward" in vars(base) and base is not nn.Module:
            forwards.append(vars(base)["forward"])
    for forward in forwards:
        names = cache_parameters(forward)
        if names:
            return names
        code = getattr(undecorate(forward), "__code__", None)
        if not isinstance(code, CodeType):
            return ()
        handed = tuple(name for name in _parameters(code) if name in inner)
        if handed or not code.co_flags & inspect.CO_VARKEYWORDS:
            return handed
    return tuple(inner)


def _cache_parameters_of_class(kind: type[nn.Module]) -> tuple[str, ...]:
    return cache_parameters(kind.forward)


def _parameters(code: CodeType) -> tuple[str, ...]:
    """Return a function's parameter names, without *args and **kwargs."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def names_a_cache(annotation: Any, names: Mapping[str, Any]) -> bool:
    """True if an annotation, which may be a string, names a cache class.

    Args:
        annotation: the annotation.
        names: the globals in which a string's names are looked up.
    """
    if annotation is None:
        return False
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        words = re.findall(r"[A-Za-z_]\w*", annotation)
        return any(
            word.endswith(CACHE_CLASS_SUFFIX) or is_cache_class(names.get(word)) for word in words
        )
    parts = typing.get_args(annotation)
    if parts:
        return any(names_a_cache(part, names) for part in parts)
    return is_cache_class(annotation)


def _is_mapping(annotation: Any) -> bool:
    """True if a parameter's annotation names a dictionary. Methods of a dictionary may have the
    names of a cache's methods, such as `update`, so the parameter does not count as a cache."""
    return any(word in MAPPING_CLASSES for word in re.findall(r"[A-Za-z_]\w*", str(annotation)))


def _called_as_caches(code: CodeType) -> frozenset[str]:
    """Return the names of variables that a function's bytecode uses as a cache, by calling a
    cache's methods on them.

    After an assignment `a = b`, a call on `a` counts for `b` too.
    """
    called = {name for name, method in _attribute_reads(code) if method in CACHE_CALLS}
    sources = _assignments(code)
    called.update(source for name in tuple(called) for source in sources.get(name, ()))
    return frozenset(called)


def _assignments(code: CodeType) -> dict[str, set[str]]:
    """Return the assignments `a = b` in a function's bytecode, as a dict from each variable `a` to
    the set of variables `b` assigned to `a`. Both names then refer to the same object."""
    sources: dict[str, set[str]] = {}
    source: Any = None
    for step in dis.get_instructions(code):
        if step.opname.startswith(VARIABLE_WRITE_OPS) and source is not None:
            # Python 3.13 assigns two variables in one instruction.
            if isinstance(step.argval, tuple):
                target = step.argval[0]
            else:
                target = step.argval
            sources.setdefault(target, set()).add(source)
        source = _variable_read(step)
    return sources


def _attribute_reads(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield a pair (variable, attribute) for each attribute of a variable that a function's
    bytecode reads."""
    variable: Any = None
    for step in dis.get_instructions(code):
        if step.opname.startswith(ATTRIBUTE_READ_OPS) and variable is not None:
            yield variable, str(step.argval)
        variable = _variable_read(step)


def _variable_read(step: dis.Instruction) -> Any:
    """Return the name of the variable that a bytecode instruction reads; None if it reads none. An
    instruction of Python 3.13 may read two variables; the second is then returned."""
    if not step.opname.startswith(VARIABLE_READ_OPS):
        return None
    if isinstance(step.argval, tuple):  # Python 3.13 reads two variables in one instruction
        return step.argval[-1]
    return step.argval
