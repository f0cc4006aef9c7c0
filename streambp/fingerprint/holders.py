"""Record the content of containers in which code can store values, and restore it later."""

from __future__ import annotations

import contextvars
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

MAX_RECORDED_VALUES = 64  # recorded plain values of a long container, counted from its end
MAX_RESTORED_LENGTH = 20_000  # largest length of a container whose entries are all restored
MISSING_ENTRY = object()
Content = dict[Any, Any]


class Holder:
    """A Python object in which code can store values (a dict, a closure's cell, an object with
    attributes), and a record of its content. `restore` resets the object to the record, for example
    after a test run of a layer.

    Args:
        owner: the object.
        read: returns the object's current content as a dict.
        write: sets an entry of the object to a value; gets the key and the value.
        delete: removes an entry of the object; gets the key.

    Attributes:
        content: the recorded content, from the time when the `Holder` was made.
    """

    def __init__(
        self,
        owner: Any,
        read: Callable[[], Content],
        write: Callable[[Any, Any], None],
        delete: Callable[[Any], None],
    ) -> None:
        self.owner = owner
        self._read = read
        self._write = write
        self._delete = delete
        self.content = read()

    def restore(self) -> None:
        """Restore the recorded content: delete entries that were added, and write back entries that
        were replaced or deleted."""
        current = self._read()
        for key in current.keys() - self.content.keys():
            self._delete(key)
        for key, value in self.content.items():
            if current.get(key, MISSING_ENTRY) is not value:
                self._write(key, value)


class EntryHolder(Holder):
    """Holder of a list, a deque or a set: records its entries and can restore them. A list or deque
    of more than `MAX_RESTORED_LENGTH` entries is not restored fully: `restore` only removes
    appended entries."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.length = len(owner)
        self.short = self.length <= MAX_RESTORED_LENGTH or isinstance(owner, set)
        tail = (
            list(owner)
            if self.short
            else list(itertools.islice(reversed(owner), MAX_RECORDED_VALUES))[::-1]
        )
        start = self.length - len(tail)
        self.content = {start + index: value for index, value in enumerate(tail)}

    def restore(self) -> None:
        """Set the container's entries to the recorded entries. A list or deque of more than
        `MAX_RESTORED_LENGTH` entries is only cut to its recorded length, because not all of its
        entries were recorded."""
        if not self.short:
            while len(self.owner) > self.length:
                self.owner.pop()
            return
        current = list(self.owner)
        recorded = list(self.content.values())
        if len(current) != len(recorded) or any(map(_is_replaced, current, recorded)):
            self.owner.clear()
            if isinstance(self.owner, set):
                self.owner.update(recorded)
            else:
                self.owner.extend(recorded)


def _is_replaced(current: Any, recorded: Any) -> bool:
    return current is not recorded


def attributes_of(owner: Any, left_out: Callable[[str], bool]) -> Holder:
    """Return a `Holder` that records an object's attributes and can restore them.

    Args:
        owner: the object.
        left_out: function that returns True for the name of an attribute to leave out.
    """
    table = owner.__dict__

    def read() -> Content:
        return {name: value for name, value in table.items() if not left_out(str(name))}

    return Holder(owner, read, table.__setitem__, table.__delitem__)


def parameters_of(module: nn.Module) -> Holder:
    """Return a `Holder` that records a module's parameters and can restore them.

    Only plain parameters and None are recorded and replaced. Engines (DeepSpeed, FSDP) and streamed
    layers put other tensors in a parameter's place for a while, and remove these tensors
    themselves.
    """
    table = module._parameters

    def read() -> Content:
        return {
            name: parameter
            for name, parameter in table.items()
            if parameter is None or type(parameter) is nn.Parameter
        }

    def write(name: Any, parameter: Any) -> None:
        current = table.get(name)
        if current is None or type(current) is nn.Parameter:
            table[name] = parameter

    return Holder(module, read, write, table.__delitem__)


def value_of_context(variable: contextvars.ContextVar[Any]) -> Holder:
    """Return a `Holder` that records the value of a context variable (contextvars.ContextVar) and
    can restore it. A variable without a value has no content."""

    def read() -> Content:
        value = variable.get(MISSING_ENTRY)
        return {} if value is MISSING_ENTRY else {"": value}

    def write(_: Any, value: Any) -> None:
        variable.set(value)

    return Holder(variable, read, write, lambda key: write(key, None))


def entries_of(table: dict[Any, Any], names: Iterable[Any] | None = None) -> Holder:
    """Return a `Holder` that records entries of a dictionary and can restore them.

    Args:
        table: the dictionary.
        names: keys of the recorded entries; None: all entries.
    """
    keys = None if names is None else list(names)

    def read() -> Content:
        if keys is None:
            return dict(table)
        return {name: table[name] for name in keys if name in table}

    return Holder(table, read, table.__setitem__, table.__delitem__)


def attributes_of_class(owner: type) -> Holder:
    """Return a `Holder` that can restore the attributes and methods of a class. Inherited
    attributes and methods are not recorded. Names with two leading underscores are left out, except
    `__call__`."""

    def read() -> Content:
        table = vars(owner).items()
        return {
            name: value for name, value in table if not name.startswith("__") or name == "__call__"
        }

    return Holder(owner, read, functools.partial(setattr, owner), functools.partial(delattr, owner))


def slots_of_class(base: type) -> list[str]:
    """Return the names of the attributes that a class stores in slots (`__slots__`), without those
    of its bases. Such attributes are missing in an object's `__dict__`. Names that begin with two
    underscores are left out."""
    slots = vars(base).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [name for name in names if not name.startswith("__")]
