"""Save the Python state of modules and of their code before a trial, and restore it afterwards.

[Note: a trial leaves nothing] A module may store a value in many places. Examples are an attribute,
a dict, a list, a helper object or its class, a hook's closure, a global of its file. A trial runs a
few random tokens, and stored values of these tokens would be taken for the batch's. A snapshot
therefore follows references from the modules. The references are attributes, entries of containers,
objects, third-party classes and functions, closures, defaults, and the globals that functions name.
Each table is saved with the identity of its entries, each small tensor with its values. A large
tensor is copied before an operation writes to it.

Every run of a trial starts from the first run's state (`StateRestorer.rewind`), as the call itself
will. A value that a module takes from its first tokens therefore differs between an unchunked and a
chunked run, and the layer runs unchunked.

References are not followed into objects and functions of libraries, files, and other threads'
values. The position of an iterator cannot be restored: `Snapshot.iterators` names the iterators
that hooks and forwards may advance.
"""

from __future__ import annotations

import array
import collections
import functools
import gc
import io
import itertools
import operator
import os
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from streambp.admission.tables import (
    ATTRIBUTES,
    CACHED_CALLS,
    CELL,
    CLASS,
    CODE,
    CONTAINER_TYPES,
    DICT,
    ELEMENTS,
    MODULE_TABLE_TYPES,
    OWN_ATTRIBUTES,
    SET,
    SLOTS,
    TENSOR_ATTRIBUTES,
    TYPE,
    ContainerType,
    SavedContainer,
    attribute_name,
    is_replaced,
    item_name,
    read_globals,
    refill_globals,
    same_entries,
)
from streambp.admission.values import (
    BUFFER_TYPES,
    MEMORY_FILE_TYPES,
    CopyOnWrite,
    SavedValues,
    can_be_copied,
    changed_values,
    copy_memory,
    restore_values,
    save_values,
)
from streambp.instance_forward import InstanceForward, forwards
from streambp.known_names import (
    CAPTURE_HOOKS_FLAG,
    GLOBAL_HOOKS,
    MODULE_HOOKS,
    MODULE_TABLES,
    MODULES_ARE_HARMLESS,
    OBJECTS_ARE_KNOWN,
    PYTEST,
)
from streambp.layer.side_effects import Buffers

ATOMIC_TYPES = frozenset(
    (
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.Generator,
    )
)
TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}
CALLED_METHODS = ("forward", "__call__")  # methods that a layer calls
MODE_ATTRIBUTE = "training"  # an attribute that trials switch
BUFFER_TABLE = MODULE_TABLES[1]
# standard modules whose objects store a program's values
FOLLOWED_MODULES = ("collections", "types", "weakref", "queue", "functools", "contextlib")
KNOWN_MODULES = frozenset(
    (*MODULES_ARE_HARMLESS, *OBJECTS_ARE_KNOWN, PYTEST, "numpy", *sys.stdlib_module_names)
).difference(FOLLOWED_MODULES)
MAX_FOLLOWED_VALUES = 10_000  # values that are followed
MAX_COPIED_ELEMENTS = 2**22  # elements, over all tensors, that are copied beforehand
MAX_COPIED_MATRIX = (
    2**14
)  # largest number of elements of a matrix of parameters that is copied beforehand
MAX_OUTSIDE_MODULES = 64  # largest number of modules in an outside tree that is followed


class Change(NamedTuple):
    """A value that changed during a test of a layer.

    Attributes:
        value: the new value.
        grown_dict: name of the dict to which the test added the value under a new key. If later
            runs add further keys to this dict, the value is no value that only the first run sets.
            "": the value was replaced, or is in no dict.
    """

    value: Any
    grown_dict: str = ""


class Snapshot:
    """Saved Python state of a module and of the code that it runs, to restore after a test run. The
    state consists of attributes, entries of containers, closures, globals and values of tensors.
    [Note: a trial leaves nothing]

    Args:
        module: the module.

    Attributes:
        large: (name, tensor) of the tensors whose values are not copied now, because they are too
            large. `CopyOnWrite` copies them before the first write.
        has_foreign_code: True if third-party code may run in the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.large: list[tuple[str, Tensor]] = []
        self._weights: list[tuple[str, Tensor]] = []  # large parameters
        self._parameters: set[int] = set()  # ids of parameters whose values are saved
        self._iterators: dict[int, str] = {}  # the names by id
        self._attributes: dict[int, str] = {}  # names of objects' attributes that are iterators
        self._functions: list[types.FunctionType] = []  # hooks and forwards
        self._methods: dict[str, list[types.FunctionType]] = {}  # methods by name
        self._tables: list[SavedContainer] = []
        self._values: list[SavedValues] = []
        # keys are ids; each value is the object, so that no other object can reuse the id
        self._objects: dict[int, Any] = {}
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()
        self._classes: set[type] = set()
        self._room = MAX_COPIED_ELEMENTS
        named_modules = list(module.named_modules())
        self._objects.update((id(inner), inner) for _, inner in named_modules)
        for path, inner in named_modules:
            self._read_module(path, inner, inside=True)
        everywhere = vars(torch.nn.modules.module)
        self._enqueue((name, everywhere[name]) for name in GLOBAL_HOOKS if everywhere[name])
        while self._waiting and len(self._objects) < MAX_FOLLOWED_VALUES:
            self._follow(*self._waiting.popleft())
        self.has_foreign_code = any(map(is_foreign, (*self._classes, *self._functions)))
        if self.has_foreign_code:  # libraries' code writes to no weight in a forward
            self.large += self._weights

    def iterators(self) -> list[str]:
        """Return the names of the iterators and generators that the module's hooks and forwards may
        advance. A layer with such an iterator is not tested, because the position of an iterator
        cannot be restored.

        An iterator may be an attribute of an object, such as the training loop to which a hook
        belongs. The iterator's name is then returned only if the code of a hook or forward contains
        the attribute's name.
        """
        names: list[str] = []
        if not self._iterators:
            return names
        names_in_code = self._names_in_code()
        for key, name in self._iterators.items():
            if key not in self._attributes or self._attributes[key] in names_in_code:
                names.append(name)
        return names

    def _names_in_code(self) -> set[str]:
        """Return the names of the globals and attributes that the code of the module's hooks and
        forwards contains. If a method has one of these names, the names in the method's code are
        included too. `iterators` leaves out an object's attribute whose name is not in the result.
        """
        names: set[str] = set()
        waiting = [*self._functions]
        for name in CALLED_METHODS:
            waiting += self._methods.get(name, ())
        while waiting:
            for name in _names_in(waiting.pop().__code__):
                if name not in names:
                    names.add(name)
                    waiting += self._methods.get(name, ())
        return names

    def changes(self) -> dict[str, Change]:
        """Return a dict from the name of each value that has changed since the snapshot, such as
        "a.b['c']", to its new value (`Change`)."""
        changes: dict[str, Change] = {}
        for name, holder, saved, kind, structure in self._tables:
            current = {} if structure else kind.read(holder)
            if structure or same_entries(saved, current):
                continue
            if kind is SET and saved.keys() == current.keys():  # an equal entry was added again
                continue
            if kind.entry_name is None:
                changes[name] = Change(tuple(current.values()))
                continue
            for key in (*saved, *(key for key in current if key not in saved)):
                came = key not in saved
                differs = is_replaced if kind.names_alone else operator.is_not
                is_different = came or key not in current or differs(saved[key], current[key])
                if is_different and key not in (MODE_ATTRIBUTE, CAPTURE_HOOKS_FLAG):
                    changes[kind.entry_name(name, key)] = Change(
                        _copy_value(current.get(key)), name if came and kind.grows else ""
                    )
        changes |= {
            values.name: Change(_copy_value(values.holder))
            for values in changed_values(self._values)
        }
        return changes

    def restore(self, structure: bool = True) -> None:
        """Restore all values of the module and of the objects that it references: attributes,
        entries of containers, and contents of tensors.

        Args:
            structure: restore modules' train or eval mode and hooks as well. False between two runs
                of a test of the layer, because the test itself changes mode and hooks.
        """
        for table in self._tables:
            current = table.kind.read(table.holder)
            if (table.structure and not structure) or same_entries(table.content, current):
                continue
            content = table.content
            if table.kind is OWN_ATTRIBUTES and not structure and MODE_ATTRIBUTE in current:
                content = {**content, MODE_ATTRIBUTE: current[MODE_ATTRIBUTE]}
            table.kind.refill(table.holder, content)
        for values in changed_values(self._values):
            restore_values(values)

    def _enqueue(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Add (name, value) pairs to the queue of values to save; values that were queued before
        are skipped."""
        for name, value in pairs:
            if type(value) not in ATOMIC_TYPES and id(value) not in self._objects:
                self._objects[id(value)] = value
                self._waiting.append((name, value))

    def _save_container(
        self, name: str, holder: Any, kind: ContainerType, structure: bool = False
    ) -> dict[Any, Any]:
        """Save the content of a container, such as a dict or the attributes of an object, and
        return the content.

        Args:
            name: the container's name in messages.
            holder: the container.
            kind: functions that read and refill the container.
            structure: True if the container holds a module's hooks. Such a container is restored
                only at the end of the test.
        """
        content = kind.read(holder)
        self._tables.append(SavedContainer(name, holder, content, kind, structure))
        return content

    def _read_module(self, path: str, module: nn.Module, inside: bool) -> None:
        """Save a module's attributes, parameter dicts and hook dicts, and queue the values in them.

        Args:
            path: the module's name in messages.
            module: the module.
            inside: True for the module of the snapshot and its submodules; False for another
                module, found through an attribute of one of these.
        """
        attributes = self._save_container(path, module.__dict__, OWN_ATTRIBUTES)
        if is_foreign(type(module)):
            self._save_container(f"{path}.__class__", module, TYPE)
        for name, value in attributes.items():
            if type(value) in ATOMIC_TYPES:
                continue
            if name not in TORCH_ATTRIBUTES:
                self._enqueue([(attribute_name(path, name), value)])
            elif isinstance(value, set):
                self._save_container(path, value, SET, structure="hook" in name)
            elif isinstance(value, dict):
                kind = MODULE_TABLE_TYPES.get(name, DICT)
                if name == BUFFER_TABLE and not inside:  # tests replace the buffers inside alone
                    kind = ATTRIBUTES
                    self._enqueue(
                        (attribute_name(path, key), buffer) for key, buffer in value.items()
                    )
                self._save_container(path, value, kind, structure="hook" in name)
        # a module may scale its own parameters by its first batch
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._follow_attributes_of_tensor(attribute_name(path, name), parameter)
                self._copy_parameter(attribute_name(path, name), parameter)
        if (
            not inside
            and len(list(itertools.islice(module.modules(), MAX_OUTSIDE_MODULES + 1)))
            <= MAX_OUTSIDE_MODULES
        ):
            self._enqueue(
                (attribute_name(path, name), part) for name, part in module._modules.items()
            )
        for table in filter(None, map(attributes.get, MODULE_HOOKS)):
            self._enqueue((f"a hook of {path}", hook) for hook in table.values())
        for forward in forwards(module):
            if not isinstance(forward, InstanceForward):
                self._enqueue([(f"{path}.forward", forward)])
        self._read_class(type(module))

    def _read_class(self, cls: type) -> None:
        """Save the attributes of a class and its bases, and queue the values in them to be saved
        later."""
        for base in cls.__mro__:
            if base in self._classes or base in (object, nn.Module):
                continue
            self._classes.add(base)
            is_third_party = is_foreign(base)
            if not (is_third_party or issubclass(base, nn.Module)):
                continue
            attributes = self._save_container(base.__qualname__, base, CLASS)
            for name, value in attributes.items():
                if is_third_party and isinstance(value, types.FunctionType):
                    self._methods.setdefault(name, []).append(value)
            self._enqueue(
                (f"{base.__qualname__}.{name}", value)
                for name, value in attributes.items()
                if is_third_party or not isinstance(value, types.FunctionType)
            )

    def _follow(self, name: str, value: Any) -> None:
        """Save a value of any type. The parts of a container, object or function are not saved now,
        but added to the queue of values to save.

        Args:
            name: the value's name in messages.
            value: the value, which the module references directly or indirectly.
        """
        if isinstance(value, Tensor):
            self._follow_attributes_of_tensor(name, value)
            if isinstance(value, nn.Parameter):
                self._copy_parameter(name, value)
            else:
                self._copy(name, value)
        elif isinstance(value, array.array):
            self._values.append(SavedValues(name, value, value[:], None))
        elif isinstance(value, BUFFER_TYPES + MEMORY_FILE_TYPES):
            copy = copy_memory(value, self._room)
            if copy is not None:
                self._values.append(SavedValues(name, value, copy, None))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.size <= self._room:
                self._room -= value.size
                self._follow_array(name, value)
        elif isinstance(value, nn.Module):
            self._read_module(name, value, inside=False)
        elif isinstance(value, types.FunctionType):
            self._follow_function(name, value)
        elif isinstance(value, types.MethodType):
            if isinstance(value.__func__, types.FunctionType):
                self._functions.append(value.__func__)
            self._enqueue([(name, value.__func__), (name, value.__self__)])
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType):  # for example a list's `append`
                self._enqueue([(name, value.__self__)])
        elif isinstance(value, functools.partial):
            self._enqueue(
                (name, part) for part in (value.func, *value.args, *value.keywords.values())
            )
        elif isinstance(value, functools._lru_cache_wrapper):
            self._follow_cached_function(name, value)
        elif isinstance(value, functools.cached_property):
            self._enqueue([(name, value.func)])
        elif isinstance(value, staticmethod | classmethod):
            self._enqueue([(name, value.__func__)])
        elif isinstance(value, property):
            self._enqueue((name, part) for part in (value.fget, value.fset))
        elif isinstance(value, tuple | frozenset):
            self._enqueue((item_name(name, index), part) for index, part in enumerate(value))
        elif isinstance(value, type):
            if is_foreign(value):
                self._read_class(value)
        else:
            self._follow_object(name, value)

    def _follow_attributes_of_tensor(self, name: str, tensor: Tensor) -> None:
        """Save the attributes that code has set on a tensor, and add their values to the queue of
        values to save.

        Args:
            name: the tensor's name in messages.
            tensor: the tensor [...].
        """
        parts = self._save_container(name, tensor, TENSOR_ATTRIBUTES)
        self._enqueue((attribute_name(name, key), part) for key, part in parts.items())

    def _follow_array(self, name: str, value: np.ndarray[Any, Any]) -> None:
        """Save the elements of a NumPy array. Elements that are Python objects are added to the
        queue of values to save.

        Args:
            name: the array's name in messages.
            value: the array [...].
        """
        if value.dtype == object:
            parts = self._save_container(name, value, ELEMENTS)
            self._enqueue((item_name(name, index), part) for index, part in parts.items())
        else:
            self._values.append(SavedValues(name, value, value.copy(), None))

    def _follow_object(self, name: str, value: Any) -> None:
        """Save the content of a container or the attributes of an object, and add the values inside
        to the queue of values to save. Objects of known libraries are left out.

        Args:
            name: the object's name in messages.
            value: the container or object.
        """
        for container, kind in CONTAINER_TYPES:
            if isinstance(value, container):
                parts = self._save_container(name, value, kind)
                self._enqueue((item_name(name, key), part) for key, part in parts.items())
                break
        value_type = type(value)
        if not (is_foreign(value_type) or isinstance(value, PreTrainedConfig | threading.local)):
            if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                self._iterators[id(value)] = name
            return
        if isinstance(getattr(value, "__dict__", None), dict):
            parts = self._save_container(name, value.__dict__, ATTRIBUTES)
            for key, part in parts.items():
                if isinstance(part, Iterator):
                    self._attributes[id(part)] = key
            self._enqueue((attribute_name(name, key), part) for key, part in parts.items())
        if any("__slots__" in vars(base) for base in value_type.__mro__):
            self._enqueue(
                (attribute_name(name, key), part)
                for key, part in self._save_container(name, value, SLOTS).items()
            )
        if value_type.__module__ not in FOLLOWED_MODULES:
            self._read_class(value_type)

    def _follow_cached_function(
        self, name: str, function: functools._lru_cache_wrapper[Any]
    ) -> None:
        """Save the results that a third-party function with `functools.lru_cache` has stored. Queue
        the function inside the decorator, so that its closure, defaults and globals are saved too.
        Skip a library's function.

        Args:
            name: the function's name, with which the names of changed values in reports begin.
            function: the decorated function.
        """
        if not is_foreign(function.__wrapped__):
            return
        if function.cache_parameters()["maxsize"] is None:
            # Among the referents are the dict of results and the function's attributes.
            self._enqueue((name, part) for part in gc.get_referents(function) if type(part) is dict)
        else:
            self._save_container(name, function, CACHED_CALLS)
        self._enqueue([(name, function.__wrapped__)])

    def _follow_function(self, name: str, function: types.FunctionType) -> None:
        """Save a function's closure and attributes, and the globals that the function's code names.
        Add the values inside to the queue of values to save.

        Args:
            name: the function's name in messages.
            function: the function.
        """
        if function not in self._methods.get(function.__name__, ()):
            self._functions.append(function)
        for variable, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._enqueue(
                (f"{variable} in {name}", content)
                for content in self._save_container(f"{variable} in {name}", cell, CELL).values()
            )
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._enqueue((f"a default of {name}", value) for value in defaults)
        if function.__dict__ or is_foreign(function):
            self._enqueue(
                (attribute_name(name, key), v)
                for key, v in self._save_container(name, function.__dict__, ATTRIBUTES).items()
            )
        if is_foreign(function):
            self._save_container(name, function, CODE)
            names = tuple(dict.fromkeys(_names_in(function.__code__)))
            kind = ContainerType(
                functools.partial(read_globals, names),
                functools.partial(refill_globals, names),
                lambda _, key: key,
            )
            named_globals = self._save_container(name, function.__globals__, kind)
            # Global iterators number objects as a rule, and no forward advances them.
            self._enqueue(
                item for item in named_globals.items() if not isinstance(item[1], Iterator)
            )
            for (
                part
            ) in named_globals.values():  # the names also include attributes of these modules
                if isinstance(part, types.ModuleType):
                    parts = self._save_container(part.__name__, vars(part), kind)
                    if part.__name__.partition(".")[0] not in KNOWN_MODULES:
                        self._enqueue(parts.items())
                    elif parts.get("environ") is os.environ:
                        self._enqueue([("os.environ", os.environ)])

    def _copy_parameter(self, name: str, parameter: Tensor) -> None:
        """Copy a parameter's values, unless the parameter is a large matrix. Only third-party code
        writes to a large matrix in a forward. If the snapshot finds such code, the matrix is copied
        before the first write.

        Args:
            name: the parameter's name in messages.
            parameter: the parameter [...].
        """
        if id(parameter) in self._parameters:
            return
        self._parameters.add(id(parameter))
        self._objects[id(parameter)] = parameter
        if parameter.dim() < 2 or parameter.numel() <= MAX_COPIED_MATRIX:
            self._copy(name, parameter)
        elif can_be_copied(parameter):
            self._weights.append((name, parameter))

    def _copy(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor's values. If all copies together would exceed `MAX_COPIED_ELEMENTS`
        elements, add the tensor to `large` instead; its values are then copied before the first
        write.

        Args:
            name: the tensor's name in messages.
            tensor: the tensor [...].
        """
        if not can_be_copied(tensor):
            return
        if tensor.numel() > self._room:
            self.large.append((name, tensor))
            return
        self._room -= tensor.numel()
        self._values.append(save_values(name, tensor))


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the globals and attributes that a function's code and its inner functions name, and
    whose values a snapshot may have to save."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def is_foreign(code: Any) -> bool:
    """True if a class or a function is third-party: its package is none of those that streambp
    knows (the standard library, torch, transformers and so on). A snapshot follows references into
    third-party classes and functions alone."""
    if isinstance(code, types.FunctionType):
        home = code.__globals__.get("__name__")
    else:
        home = code.__module__
    return str(home).partition(".")[0] not in KNOWN_MODULES


class StateRestorer:
    """Context manager around a test of a module. The end of the context restores the Python state
    of the module and of the code that it runs: attributes, containers, closures and values of
    tensors. [Note: a trial leaves nothing]

    Between two runs of the module in the test, methods restore this state, and find the values that
    a run has changed.

    Args:
        module: the module.
        buffers: the module's buffers, which copies replace during the test.
    """

    def __init__(self, module: nn.Module, buffers: Buffers) -> None:
        self.module = module
        self.buffers = buffers
        self._first: dict[str, Change] = {}
        self._end_of_first_run: Snapshot | None = None

    def __enter__(self) -> StateRestorer:
        self._snapshot = Snapshot(self.module)
        self._writes = CopyOnWrite(self._snapshot.large) if self._snapshot.large else None
        if self._writes is not None:
            self._writes.__enter__()
        return self

    @property
    def has_foreign_code(self) -> bool:
        """True if third-party code may run in the module."""
        return self._snapshot.has_foreign_code

    def changes(self) -> list[str]:
        """Return the names of the module's attributes and other values that differ from those at
        the start of the test."""
        return list(self._changes())

    def _changes(self) -> dict[str, Change]:
        """Return the values that differ from those at the start of the test, as a dict from a
        value's name to its new value (`Change`)."""
        changes = self._snapshot.changes()
        if self._writes is not None:
            for values in changed_values(self._writes.copies):
                changes[values.name] = Change(_copy_value(values.holder))
        return changes

    def rewind(self) -> None:
        """Restore the values that the module had at the start of the test, before its next run.
        Hooks, and train or eval mode, stay unchanged."""
        self._snapshot.restore(structure=False)
        self._put_back()

    def _put_back(self) -> None:
        """Restore the large tensors that a run of the module has written to. `CopyOnWrite` has
        copied their values before the first write."""
        if self._writes is not None:
            for values in changed_values(self._writes.copies):
                restore_values(values)

    def end_run(self) -> None:
        """Record the values that differ from those at the start of the test. Call this method after
        the first run of the module, because `values_set_once` and `values_set_again` compare later
        runs with the record."""
        self._first = self._changes()
        self._end_of_first_run = Snapshot(self.module) if self._first else None
        if self._writes is not None:
            self._writes.names.clear()

    def values_set_once(self) -> list[str]:
        """Return the names of the values that the first run of the test changed and later runs did
        not change. The module may compute such a value, for example a scale, from its first input
        alone. `end_run` marks the end of the first run."""
        if self._end_of_first_run is None:
            return []
        later_changes = self._end_of_first_run.changes()
        if self._writes is not None:
            later_changes |= dict.fromkeys(self._writes.names, Change(None))
        grown = {change.grown_dict for change in later_changes.values()} - {""}
        changed_names = [
            name for name, change in self._first.items() if change.grown_dict not in grown
        ]
        return [name for name in changed_names if not _is_changed(name, later_changes)]

    def values_set_again(self) -> list[str]:
        """Return the names of the values that the first run set, and that the latest run, on other
        tokens, did not set to the same value. Such a value depends on the tokens, and all other
        values of the first run are constants. Call `rewind` before the latest run."""
        changes = self._changes()
        return [
            name
            for name, change in self._first.items()
            if name not in changes or not _values_equal(change.value, changes[name].value)
        ]

    def __exit__(self, *error: Any) -> None:
        if self._writes is not None:
            self._writes.__exit__(*error)
        self._snapshot.restore()
        self._put_back()


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) and not value.is_meta else value


def _values_equal(value: Any, other_value: Any) -> bool:
    """True if two values, which two runs of a test have stored, are the same number, or tensors and
    containers of the same numbers."""
    if value is other_value:
        return True
    if type(value) is not type(other_value):
        return False
    if isinstance(value, Tensor):
        return (
            value.shape == other_value.shape
            and value.dtype == other_value.dtype
            and bool(torch.equal(value, other_value))
        )
    if isinstance(value, np.ndarray):
        return bool(np.array_equal(value, other_value))
    if isinstance(value, dict):
        return value.keys() == other_value.keys() and all(
            _values_equal(part, other_value[key]) for key, part in value.items()
        )
    if isinstance(value, list | tuple | collections.deque):
        return len(value) == len(other_value) and all(map(_values_equal, value, other_value))
    if isinstance(value, set | frozenset):
        return len(value) == len(other_value) and all(
            type(part) in ATOMIC_TYPES and part in other_value for part in value
        )
    return type(value) in ATOMIC_TYPES and bool(value == other_value)


def _is_changed(name: str, changed_names: Iterable[str]) -> bool:
    """True if the value `name` is among the changed values of a test run, or if a value inside is,
    such as a['b'] inside a.

    Args:
        name: the value's name, such as "a".
        changed_names: the names of the changed values, such as "a['b']".
    """
    return any(
        changed_name == name or changed_name.startswith((f"{name}.", f"{name}["))
        for changed_name in changed_names
    )
