"""Find the values that third-party code inside a layer can store, and detect which of them a run
changed.

The search follows attributes of modules, classes, hooks and forwards. The closures, defaults and
globals of hooks and forwards are followed as well, and so are objects and containers reachable from
any of these. Each value has a path, such as `mlp.kept[3]`. Values of buffers, and objects of torch,
transformers and similar libraries are left out: these libraries store nothing of a batch. Programs
may store values in parameters, and as attributes of a model's config and of a parameter, so these
are included.

The search visits at most `MAX_VISITED_OBJECTS` objects, nearest first, and the last
`MAX_RECORDED_VALUES` plain values of a container. If a container has more than
`MAX_RESTORED_LENGTH` entries, only its last `MAX_RECORDED_VALUES` entries are visited.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import functools
import gc
import io
import itertools
import queue
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from streambp.fingerprint.holders import (
    MAX_RECORDED_VALUES,
    MAX_RESTORED_LENGTH,
    MISSING_ENTRY,
    Content,
    EntryHolder,
    Holder,
    attributes_of,
    attributes_of_class,
    entries_of,
    parameters_of,
    slots_of_class,
    value_of_context,
)
from streambp.fingerprint.observed_values import name_of
from streambp.fingerprint.snapshots import ENGINE_ATTRIBUTES, TORCH_ATTRIBUTES, Generator
from streambp.foreign import home_of, wrapped_functions
from streambp.instance_forward import InstanceForward, UnboundForward
from streambp.known_names import MODULES_ARE_HARMLESS, OBJECTS_ARE_KNOWN, PYTEST
from streambp.tensors import tensors_in

MAX_VISITED_OBJECTS = 4000
MAX_WAIT_SECONDS = 0.2  # seconds before a live tensor counts as stored
CONTAINER_TYPES = (list, set, dict, deque)
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
ARRAY_TYPES = (Tensor, np.ndarray)
BUFFER_TYPES = (memoryview, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
NUMBER_TYPES = (bool, int, float, complex, np.generic)
ENGINE_ATTRIBUTE_PREFIXES = ("ds_", "_")  # attributes of parameters that engines change
# The standard library's classes in which programs store values.
HOLDER_TYPES = (
    types.SimpleNamespace,
    threading.local,
    collections.ChainMap,
    collections.UserDict,
    collections.UserList,
    queue.Queue,
    queue.LifoQueue,
    queue.PriorityQueue,
)
WEAK_HOLDER_TYPES = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
HOLDER_TYPE_NAMES = frozenset(kind.__name__ for kind in (*HOLDER_TYPES, *WEAK_HOLDER_TYPES))
KNOWN_MODULES = frozenset(
    (
        *MODULES_ARE_HARMLESS,
        *OBJECTS_ARE_KNOWN,
        "numpy",
        # `typing_extensions.deprecated` wraps functions of torch.
        "typing_extensions",
        PYTEST,
        *sys.stdlib_module_names,
    )
)


def is_third_party(function: Any) -> bool:
    """True if a callable runs code outside of torch, transformers and similar libraries, itself or
    in a function that it wraps. Such code may store values. The method of a container, such as a
    list's `append`, counts as well, because the container stores its argument."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.BuiltinMethodType) and isinstance(
        function.__self__, CONTAINER_TYPES
    ):
        return True  # the method stores its argument
    return any(
        home_of(wrapped).partition(".")[0] not in KNOWN_MODULES
        for wrapped in wrapped_functions(function)
    )


class ReachableValues:
    """All values that code can reach from some objects, such as a layer's hooks, at the creation of
    this object. Comparing two of these objects shows what a run of a layer has stored.

    Args:
        roots: the objects, as (name, object).

    Attributes:
        values: dict from paths, such as "mlp.kept[3]", to plain values, tensors [...], NumPy arrays
            [...], and lengths of containers.
        holders: the containers on these paths, each with a copy of its content, to restore it.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self.values: dict[str, Any] = {}
        self.holders: list[Holder] = []
        self._visited: set[int] = set()
        self._waiting = deque(roots)
        self._references: list[Any] = []
        self._visits = 0
        while self._waiting and self._visits < MAX_VISITED_OBJECTS:
            self._visits += 1
            self._visit(*self._waiting.popleft())
        del self._waiting

    def restore(self) -> None:
        """Restore the content that the containers (attributes, lists, dicts) had at the creation of
        this object. Tensors with in-place writes are not restored."""
        for holder in self.holders:
            holder.restore()

    def changes_since(
        self, previous: ReachableValues, writes: InPlaceWrites | None = None
    ) -> dict[str, Any]:
        """Return a dict from paths to the values that differ from an earlier `ReachableValues`. The
        value `MISSING_ENTRY` stands for a path that exists only in the earlier object.

        Args:
            previous: the values at the earlier time.
            writes: the in-place writes to tensors since then; None: writes were not recorded.
        """
        changes = {}
        for path, value in self.values.items():
            previous_value = previous.values.get(path, MISSING_ENTRY)
            is_unchanged = value is previous_value or (
                isinstance(value, PLAIN_TYPES)
                and type(value) is type(previous_value)
                and value == previous_value
            )
            if not is_unchanged:
                changes[path] = value
            elif writes is not None and isinstance(value, ARRAY_TYPES) and writes.wrote_to(value):
                changes[path] = (
                    value.detach().clone() if isinstance(value, Tensor) else value.copy()
                )
        changes.update(dict.fromkeys(previous.values.keys() - self.values.keys(), MISSING_ENTRY))
        return changes

    def _note(self, path: str, value: Any) -> None:
        name = path
        number = 1
        while name in self.values:  # another function has a variable of that name
            number += 1
            name = f"{path} ({number})"
        self.values[name] = value

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, np.generic):  # a number of numpy, such as the result of np.mean
            value = value.item()
        if isinstance(value, (*PLAIN_TYPES, *ARRAY_TYPES)):
            self._note(path, value)
            return
        if id(value) in self._visited or isinstance(value, Generator):
            return
        self._visited.add(id(value))
        self._references.append(value)
        if isinstance(value, nn.Module):
            self._open(
                path,
                attributes_of(
                    value,
                    lambda name: name in TORCH_ATTRIBUTES or name.startswith(ENGINE_ATTRIBUTES),
                ),
            )
            for name, parameter in value._parameters.items():
                self._visit_parameter(f"{path}.{name}".removeprefix("."), parameter)
            self.holders.append(parameters_of(value))
        elif isinstance(value, dict):
            self._open_mapping(path, value)
        elif isinstance(value, (list, deque, set)):
            self._note(f"len({path})", len(value))
            self._open(path, EntryHolder(value), "[{}]".format, MAX_RECORDED_VALUES)
        elif isinstance(value, (array.array, bytearray)):
            self._visit_array(path, value)
        elif isinstance(value, BUFFER_TYPES):
            self._visit_memory(path, value)
        elif isinstance(value, (io.StringIO, io.BytesIO)):
            self._visit_text(path, value)
        elif isinstance(value, (tuple, frozenset)):
            if len(value) <= MAX_RECORDED_VALUES:
                self._waiting.extend((f"{path}[{index}]", part) for index, part in enumerate(value))
        elif isinstance(value, (InstanceForward, UnboundForward)):
            self._waiting.append((path, getattr(value, "previous", None)))
        elif isinstance(value, functools.partial):
            self._waiting.extend(((path, value.func), (path, value.args), (path, value.keywords)))
        elif isinstance(value, types.MethodType):
            self._waiting.extend(((path, value.__func__), (path, value.__self__)))
        # for example a list's `append`
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            if not isinstance(value.__self__, types.ModuleType):
                self._waiting.append((path, value.__self__))
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            self._waiting.extend([] if frame is None else frame.f_locals.items())
        elif isinstance(value, contextvars.ContextVar):
            self._open(value.name, value_of_context(value), "{}".format)
        elif isinstance(value, (staticmethod, classmethod)):
            self._waiting.append((path, value.__func__))
        elif isinstance(value, property):
            self._waiting.extend(
                (path, part) for part in (value.fget, value.fset) if part is not None
            )
        elif isinstance(value, types.FunctionType):
            self._visit_function(path, value)
        elif isinstance(value, type):
            if _package_of_class(value) not in KNOWN_MODULES:
                self._open(path, attributes_of_class(value))
        else:
            self._visit_object(path, value)

    def _visit_array(self, path: str, value: array.array[Any] | bytearray) -> None:
        def write(_: Any, content: Any) -> None:
            value[:] = content

        self.holders.append(Holder(value, lambda: {None: value[:]}, write, lambda _: None))
        self._note(f"len({path})", len(value))
        start = max(0, len(value) - MAX_RECORDED_VALUES)
        for index, number in enumerate(value[start:], start):
            self._note(f"{path}[{index}]", number)

    def _visit_memory(self, path: str, value: Any) -> None:
        """Add a block of memory to `values` and `holders`: a memoryview, or a number or array of
        ctypes. Read-only and large blocks are left out.

        Args:
            path: the object's path.
            value: the object.
        """
        if isinstance(value, ctypes.py_object):
            return
        view = memoryview(value)
        if view.readonly or not view.c_contiguous or view.nbytes > MAX_RESTORED_LENGTH:
            return
        in_bytes = view.cast("B")

        def write(_: Any, content: Any) -> None:
            in_bytes[:] = content

        self.holders.append(Holder(value, lambda: {None: bytes(in_bytes)}, write, lambda _: None))
        self._note(path, bytes(in_bytes))

    def _visit_text(self, path: str, file: io.StringIO | io.BytesIO) -> None:
        if file.closed:
            return

        def write(_: Any, content: Any) -> None:
            file.seek(0)
            file.truncate()
            file.write(content)

        self.holders.append(Holder(file, lambda: {None: file.getvalue()}, write, lambda _: None))
        self._note(f"len({path})", len(file.getvalue()))

    def _visit_parameter(self, path: str, parameter: nn.Parameter | None) -> None:
        """Add a parameter to `values`, and search its attributes that are numbers or tensors.
        Programs may store values in a parameter and in its attributes, such as a norm of inputs.

        Attributes of engines (DeepSpeed, FSDP) are left out. Tensors that engines and streamed
        layers put in a parameter's place are left out, too.

        Args:
            path: the parameter's path.
            parameter: the parameter; None if the module has none under this name.
        """
        if type(parameter) is nn.Parameter:
            self._note(path, parameter)
        if parameter is None or id(parameter) in self._visited:
            return
        self._visited.add(id(parameter))
        attributes = vars(parameter)

        def write(name: Any, value: Any) -> None:
            attributes[name] = value

        read = functools.partial(stored_attributes, parameter)
        self._open(path, Holder(parameter, read, write, attributes.__delitem__))

    def _visit_function(self, path: str, function: types.FunctionType) -> None:
        if not is_third_party(function):
            return
        name = function.__code__.co_name
        path = path or name
        for variable, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # the variable has no value yet
                self._visit_cell(f"{variable} of {name}", cell)
        self._waiting.append((path, function.__defaults__))
        self._waiting.append((path, function.__kwdefaults__))
        if function.__dict__:
            self._open(name, entries_of(function.__dict__), ".{}".format)
        if home_of(function).partition(".")[0] in KNOWN_MODULES:
            return  # a library's wrapper
        names = _names(function.__code__)
        namespace = function.__globals__
        read_names = [
            n
            for n in names
            if n in namespace
            and not (isinstance(namespace[n], types.ModuleType) and _is_known_module(namespace[n]))
        ]
        self._open(
            "",
            entries_of(
                namespace, [n for n in read_names if not isinstance(namespace[n], types.ModuleType)]
            ),
            "{}".format,
        )
        for name in read_names:
            if isinstance(namespace[name], types.ModuleType):
                self._open(name, entries_of(vars(namespace[name]), names), ".{}".format)

    def _visit_cell(self, path: str, cell: types.CellType) -> None:
        if id(cell) in self._visited:
            return
        self._visited.add(id(cell))

        def write(_: Any, value: Any) -> None:
            cell.cell_contents = value

        holder = Holder(cell, lambda: {"": cell.cell_contents}, write, lambda _: None)
        self._open(path, holder, "{}".format)

    def _open_mapping(self, path: str, table: dict[Any, Any]) -> None:
        self._note(f"len({path})", len(table))
        if len(table) <= MAX_RESTORED_LENGTH:
            self._open(
                path, entries_of(table), lambda key: f"[{_key_text(key)}]", MAX_RECORDED_VALUES
            )
            return
        length = len(table)
        last_entries = dict(itertools.islice(reversed(table.items()), MAX_RECORDED_VALUES))

        def delete(key: Any) -> None:
            if len(table) > length:
                table.pop(key)

        def read() -> Content:
            newest = itertools.islice(
                reversed(table.items()), MAX_RECORDED_VALUES + max(0, len(table) - length)
            )
            return dict(newest)

        holder = Holder(table, read, table.__setitem__, delete)
        holder.content = last_entries
        self._open(path, holder, lambda key: f"[{_key_text(key)}]")

    def _visit_object(self, path: str, value: Any) -> None:
        value_type = type(value)
        home = _package_of_class(value_type)
        of_library = home in sys.stdlib_module_names and value_type.__name__ in HOLDER_TYPE_NAMES
        if home in KNOWN_MODULES and not (of_library or isinstance(value, PreTrainedConfig)):
            return
        if isinstance(getattr(value, "__dict__", None), dict):
            self._open(path, attributes_of(value, lambda name: name.startswith(ENGINE_ATTRIBUTES)))
        slots = [n for base in value_type.__mro__ for n in slots_of_class(base)]
        if slots:

            def read() -> Content:
                return {n: getattr(value, n) for n in slots if hasattr(value, n)}

            self._open(
                path,
                Holder(
                    value,
                    read,
                    functools.partial(setattr, value),
                    functools.partial(delattr, value),
                ),
            )
        if home not in KNOWN_MODULES:
            self._waiting.extend(
                (base.__name__, base)
                for base in value_type.__mro__
                if _package_of_class(base) not in KNOWN_MODULES
            )

    def _open(
        self,
        path: str,
        holder: Holder,
        label_of: Callable[[Any], str] = ".{}".format,
        plain: int = sys.maxsize,
    ) -> None:
        """Record a container in `holders`, and add its entries to the queue of objects to visit.

        Args:
            path: the container's path.
            holder: record of the container and of its entries.
            label_of: returns the part of an entry's path that follows the container's path.
            plain: only the last `plain` entries are visited if their values are numbers, strings or
                other plain values. All other entries are visited.
        """
        self.holders.append(holder)
        first_plain = len(holder.content) - plain
        for index, (key, value) in enumerate(holder.content.items()):
            if index < first_plain and isinstance(value, PLAIN_TYPES):
                continue
            self._waiting.append((f"{path}{label_of(key)}".removeprefix("."), value))


def stored_attributes(parameter: Tensor) -> Content:
    """Return the attributes that programs have set on a tensor, by name, if the value is a number,
    a tensor [...] or a NumPy array. An example is a norm. Attributes of engines, with names that
    begin with "_" or "ds_", are left out.

    Args:
        parameter: the tensor, as a rule a parameter.
    """
    return {
        name: value
        for name, value in vars(parameter).items()
        if isinstance(value, (*NUMBER_TYPES, *ARRAY_TYPES))
        and not name.startswith(ENGINE_ATTRIBUTE_PREFIXES)
    }


class InPlaceWrites(TorchDispatchMode):
    """Torch dispatch mode that records in-place writes to the tensors of a `ReachableValues`. The
    values are copied before a write, so that `restore` can undo it. The mode also holds weak
    references to the results of operations, by which `shapes_outside` finds stored tensors."""

    supports_higher_order_operators = True

    def __init__(self, memory: ReachableValues) -> None:
        super().__init__()
        tensors = [x for x in memory.values.values() if isinstance(x, Tensor)]
        self._tensors = {_storage_key(x): x for x in tensors if _storage_key(x) is not None}
        self._copies: dict[Any, Any] = {}
        self._results: list[weakref.ref[Tensor]] = []
        self._arrays = [
            (x, x.copy())
            for x in memory.values.values()
            if isinstance(x, np.ndarray) and x.size <= 2**20
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema if isinstance(func, torch._ops.OpOverload) else None
        if self._tensors and schema is not None and schema.is_mutable:
            for index, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note(args[index] if index < len(args) else kwargs.get(argument.name))
        result = func(*args, **kwargs)
        self._results += [weakref.ref(x) for x in tensors_in(result, Tensor)]
        return result

    def shapes_outside(self, memory: ReachableValues) -> str:
        """Return the shapes, as text, of tensors from operations under this mode that are alive and
        missing in `memory`. Some code has stored these tensors in a place that `ReachableValues`
        does not search. "" if there are no such tensors.

        Args:
            memory: the values that `ReachableValues` finds after the run.
        """
        tensors = self._alive(memory)
        if tensors:
            del tensors
            gc.collect()  # frees graphs in reference cycles
        # Autograd's device thread may release its last references with a delay.
        deadline = time.monotonic() + MAX_WAIT_SECONDS
        while self._alive(memory) and time.monotonic() < deadline:
            time.sleep(0.001)
        return ", ".join(sorted(str(tuple(x.shape)) for x in self._alive(memory)))

    def _alive(self, memory: ReachableValues) -> list[Tensor]:
        """Return the tensors [...] that were made by operations under this mode, are still alive,
        and are not among the values of `memory`."""
        value_ids = {id(value) for value in memory.values.values()}
        return [
            x
            for x in (reference() for reference in self._results)
            if x is not None and id(x) not in value_ids
        ]

    def _note(self, argument: Any) -> None:
        """Copy the storage of a tensor before the first in-place write to the tensor. Only tensors
        of the `ReachableValues` are copied.

        Args:
            argument: a tensor [...] that an operation is about to write to, or a list of such
                tensors.
        """
        for x in argument if isinstance(argument, (list, tuple)) else (argument,):
            storage_key = _storage_key(x)
            if storage_key in self._tensors and storage_key not in self._copies:
                self._copies[storage_key] = self._tensors[storage_key].untyped_storage().clone()

    def wrote_to(self, value: Tensor | np.ndarray[Any, Any]) -> bool:
        """True if this tensor or array [...] was written to in place while the mode was active."""
        if isinstance(value, np.ndarray):
            return any(x is value and x.tobytes() != copied.tobytes() for x, copied in self._arrays)
        return _storage_key(value) in self._copies

    def restore(self) -> None:
        """Write back the values from before the recorded writes."""
        for storage_key, copied in self._copies.items():
            storage = self._tensors[storage_key].untyped_storage()
            if storage.nbytes() == copied.nbytes():  # a resized tensor has other bytes
                storage.copy_(copied)
        for x, values in self._arrays:
            if x.flags.writeable and self.wrote_to(x):
                x[...] = values
        self._copies = {}


@contextlib.contextmanager
def undo_changes(
    roots: Iterable[tuple[str, Any]],
) -> Iterator[tuple[ReachableValues, InPlaceWrites]]:
    """Context manager that leaves no trace of the code that runs inside: values reachable from some
    objects are restored at the end, also the contents of tensors. Yields (memory, writes): the
    values at the start, and the in-place writes recorded since.

    Args:
        roots: the objects, as (name, object).
    """
    memory = ReachableValues(roots)
    writes = InPlaceWrites(memory)
    try:
        with writes:
            yield memory, writes
    finally:
        writes.restore()
        memory.restore()


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function's code and in the code of its inner
    functions. `ReachableValues` visits the globals of these names, because the function may store
    values there."""
    codes = [code]
    for inner_code in codes:  # the loop appends to this list
        codes += [
            constant for constant in inner_code.co_consts if isinstance(constant, types.CodeType)
        ]
    return tuple(dict.fromkeys(name for inner_code in codes for name in inner_code.co_names))


def _key_text(key: Any) -> str:
    """Return the text for a dictionary's key in a path such as "cache['a']": the key's repr. A key
    whose repr may contain an address gets the name of its class, so that paths are the same in each
    run."""
    if isinstance(key, (str, int, float, tuple)):
        return repr(key)
    return name_of(type(key)).rpartition(".")[2]


def _package_of_class(cls: type) -> str:
    return str(cls.__module__).partition(".")[0]


def _is_known_module(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] in KNOWN_MODULES


def _storage_key(x: Any) -> Any:
    """Return a number that identifies a tensor's [...] storage, the same for all views of the
    tensor. None for meta and sparse tensors, and for tensor subclasses: writes to these are not
    recorded."""
    if (
        type(x) not in (Tensor, nn.Parameter)
        or x.layout != torch.strided
        or x.device.type == "meta"
    ):
        return None
    return x.untyped_storage()._cdata
