"""Tables in which modules and objects store values: read and refill each kind.

A table is compared by the identity of its entries, and refilled only if it differs: no other code
finds it empty in between.
"""

from __future__ import annotations

import collections
import functools
import operator
import os
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from streambp.fingerprint.memory import stored_attributes
from streambp.instance_forward import PATCH_ATTRIBUTE, REDUCE_METHOD, WRAPPERS_ATTRIBUTE
from streambp.known_names import MODULE_TABLES

PATCH_ATTRIBUTES = (
    PATCH_ATTRIBUTE,
    WRAPPERS_ATTRIBUTE,
    REDUCE_METHOD,
)  # attributes that `patch` sets on modules


class ContainerType(NamedTuple):
    """Functions that save and restore one type of container (a dict, a list, a closure's cell)
    around a test run of a layer.

    Attributes:
        read: returns the container's content as a dict.
        refill: restores content that `read` returned earlier; gets the container and the content.
        entry_name: returns an entry's name from the container's name and the key; None: entries
            have no names.
        grows: True for dicts. Code may use a dict as a cache, to which each run adds entries under
            new keys. An entry that the first run has added is then no value that is set once for
            all runs.
        names_alone: True for a module's dicts of parameters and buffers. An entry counts as changed
            only if `is_replaced` is True. A test puts copies in place of parameters and buffers,
            and these count as unchanged.
    """

    read: Callable[[Any], dict[Any, Any]]
    refill: Callable[[Any, dict[Any, Any]], None]
    entry_name: Callable[[str, Any], str] | None
    grows: bool = False
    names_alone: bool = False


class SavedContainer(NamedTuple):
    """A container of Python values (a module's attributes, a dict, a list, a closure), and its
    saved content.

    Attributes:
        name: the container's name in messages.
        holder: the container.
        content: the saved content.
        kind: functions that read and refill the container.
        structure: True if the container holds a module's hooks, which test runs wrap.
    """

    name: str
    holder: Any
    content: dict[Any, Any]
    kind: ContainerType
    structure: bool = False


def _refill_dict(holder: dict[Any, Any], content: dict[Any, Any]) -> None:
    base: type[dict[Any, Any]] = (
        collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
    )
    for key in [key for key in holder if key not in content]:
        base.__delitem__(holder, key)
    for key, value in content.items():
        if key not in holder or base.__getitem__(holder, key) is not value:
            base.__setitem__(holder, key, value)
    if list(map(id, holder)) != list(map(id, content)):  # the order differs
        base.clear(holder)
        base.update(holder, content)


def _refill_attributes(holder: dict[str, Any], content: dict[str, Any]) -> None:
    for name in [name for name in holder if name not in content]:
        del holder[name]
    for name, value in content.items():
        if name not in holder or holder[name] is not value:
            holder[name] = value


def _read_attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in holder.items() if name not in PATCH_ATTRIBUTES}


def _refill_own(holder: dict[str, Any], content: dict[str, Any]) -> None:
    _refill_attributes(
        holder, {**content, **{name: holder[name] for name in PATCH_ATTRIBUTES if name in holder}}
    )


def is_replaced(saved: Any, current: Any) -> bool:
    """True if code of a module has replaced a parameter or buffer, and not only its values.
    Compared are the object before a test run of the module and the object now.

    A test itself replaces parameters by plain tensors and buffers by copies, and a sharding engine
    replaces parameters by distributed tensors. The result is True only if one of the objects is
    None, or if both are different plain parameters.

    Args:
        saved: the parameter or buffer before the test run; None: there was none.
        current: the parameter or buffer now.
    """
    if saved is None or current is None:
        return saved is not current
    return saved is not current and type(saved) is type(current) is nn.Parameter


def _refill_names(holder: dict[str, Any], content: dict[str, Any]) -> None:
    for name in [name for name in holder if name not in content]:
        del holder[name]
    for name, value in content.items():
        if name not in holder or is_replaced(value, holder[name]):
            holder[name] = value


def _read_own(holder: type) -> dict[str, Any]:
    return {name: value for name, value in vars(holder).items() if not name.startswith("__")}


def _refill_class(holder: type, content: dict[str, Any]) -> None:
    current = _read_own(holder)
    for name in [name for name in current if name not in content]:
        type.__delattr__(holder, name)
    for name, value in content.items():
        if name not in current or current[name] is not value:
            type.__setattr__(holder, name, value)


def _refill_list(holder: list[Any], content: dict[int, Any]) -> None:
    list.__setitem__(holder, slice(None), list(content.values()))


def _refill_deque(holder: collections.deque[Any], content: dict[int, Any]) -> None:
    holder.clear()
    holder.extend(content.values())


def _refill_set(holder: set[Any], content: dict[int, Any]) -> None:
    set.clear(holder)
    set.update(holder, content.values())


def _refill_environment(holder: os._Environ[str], content: dict[str, str]) -> None:
    for name in [name for name in holder if name not in content]:
        del holder[name]
    holder.update({name: value for name, value in content.items() if holder.get(name) != value})


def _read_calls(holder: functools._lru_cache_wrapper[Any]) -> dict[str, bool]:
    return {"filled": holder.cache_info().currsize > 0}


def _refill_calls(holder: functools._lru_cache_wrapper[Any], content: dict[str, bool]) -> None:
    """Clear an lru_cache after a test run of a layer, if the cache was empty before. A cache with
    entries stays unchanged, because single entries of a bounded cache cannot be removed.

    Args:
        holder: the function with the cache.
        content: {"filled": True} if the cache had entries before the test run, otherwise
            {"filled": False}.
    """
    if not content["filled"]:
        holder.cache_clear()


def _read_type(holder: Any) -> dict[None, type]:
    return {None: type(holder)}


def _refill_type(holder: Any, content: dict[None, type]) -> None:
    holder.__class__ = content[None]


def _read_code(holder: types.FunctionType) -> dict[str, Any]:
    return {name: getattr(holder, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}


def _refill_code(holder: types.FunctionType, content: dict[str, Any]) -> None:
    for name, value in content.items():
        setattr(holder, name, value)


def _refill_elements(holder: np.ndarray[Any, Any], content: dict[int, Any]) -> None:
    for index, value in content.items():
        holder.flat[index] = value


def _refill_on_tensor(holder: Tensor, content: dict[str, Any]) -> None:
    attributes = vars(holder)
    for name in [name for name in stored_attributes(holder) if name not in content]:
        del attributes[name]
    attributes.update(content)


def _read_cell(holder: types.CellType) -> dict[None, Any]:
    try:
        return {None: holder.cell_contents}
    except ValueError:  # the variable has no value yet
        return {}


def _refill_cell(holder: types.CellType, content: dict[None, Any]) -> None:
    if content:
        holder.cell_contents = content[None]
    else:
        del holder.cell_contents


def _read_slots(holder: Any) -> dict[str, Any]:
    names = (
        name for base in type(holder).__mro__ for name in _names(vars(base).get("__slots__", ()))
    )
    return {
        name: getattr(holder, name)
        for name in names
        if name != "__dict__" and hasattr(holder, name)
    }


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _refill_slots(holder: Any, content: dict[str, Any]) -> None:
    for name in _read_slots(holder):
        if name not in content:
            object.__delattr__(holder, name)
    for name, value in content.items():
        object.__setattr__(holder, name, value)


def read_globals(names: tuple[str, ...], holder: dict[str, Any]) -> dict[str, Any]:
    """Return those globals of a Python module whose names are in `names`, as a dict. A snapshot
    saves the globals that a function's code names, to restore them after a test run of a layer.

    Args:
        names: names in the function's code; some may not be globals.
        holder: the Python module's dict of globals.
    """
    return {name: holder[name] for name in names if name in holder}


def refill_globals(
    names: tuple[str, ...], holder: dict[str, Any], saved_values: dict[str, Any]
) -> None:
    """Restore the named globals in the dict `holder` after a test run of a layer, and remove named
    globals that did not exist before.

    Args:
        names: names of the globals.
        holder: a module's globals.
        saved_values: saved values by name, from `read_globals`.
    """
    for name in names:
        if name in saved_values:
            holder[name] = saved_values[name]
        else:
            holder.pop(name, None)


def attribute_name(name: str, key: Any) -> str:
    """Return the name, for messages, of the attribute `key` of an object with this name: "a.b" for
    attribute "b" of the object "a"."""
    return f"{name}.{key}" if name else str(key)


def item_name(name: str, key: Any) -> str:
    """Return the name, for messages, of the entry `key` of a container with this name: "a['b']", or
    "a[...]" for a key that is neither text nor an integer."""
    return f"{name}[{key!r}]" if isinstance(key, str | int) else f"{name}[...]"


OWN_ATTRIBUTES = ContainerType(_read_attributes, _refill_own, attribute_name)
ATTRIBUTES = ContainerType(dict, _refill_attributes, attribute_name)
PARAMETER_NAMES = ContainerType(dict, _refill_names, attribute_name, names_alone=True)
DICT = ContainerType(dict, _refill_dict, item_name, grows=True)
LIST = ContainerType(lambda holder: dict(enumerate(holder)), _refill_list, None)
DEQUE = ContainerType(LIST.read, _refill_deque, None)
SET = ContainerType(lambda holder: {value: value for value in holder}, _refill_set, None)
CLASS = ContainerType(_read_own, _refill_class, attribute_name)
CELL = ContainerType(_read_cell, _refill_cell, None)
CACHED_CALLS = ContainerType(_read_calls, _refill_calls, None)  # a bounded functools.lru_cache
TYPE = ContainerType(_read_type, _refill_type, None)
CODE = ContainerType(_read_code, _refill_code, attribute_name)
ELEMENTS = ContainerType(lambda holder: dict(enumerate(holder.flat)), _refill_elements, None)
TENSOR_ATTRIBUTES = ContainerType(stored_attributes, _refill_on_tensor, attribute_name)
SLOTS = ContainerType(_read_slots, _refill_slots, attribute_name)
MODULE_TABLE_TYPES = dict(
    zip(MODULE_TABLES, (PARAMETER_NAMES, PARAMETER_NAMES, ATTRIBUTES), strict=True)
)  # tables of a module
CONTAINER_TYPES: tuple[tuple[type, ContainerType], ...] = (
    (dict, DICT),
    (list, LIST),
    (collections.deque, DEQUE),
    (set, SET),
    (os._Environ, ContainerType(dict, _refill_environment, item_name)),
)


def same_entries(saved_entries: dict[Any, Any], entries: dict[Any, Any]) -> bool:
    """True if two dicts have the same keys in the same order, with identical objects (`is`). A
    container with such entries has not changed since the entries were saved."""
    if len(saved_entries) != len(entries):
        return False
    return all(map(operator.is_, saved_entries, entries)) and all(
        map(operator.is_, saved_entries.values(), entries.values())
    )
