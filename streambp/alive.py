"""References of a patch to the modules that it is on, which keep nothing alive and are not copied
along.

The wrappers of a patch share one state. Whoever copies a part of what was given to `patch` (an EMA
of the model inside of DDP, a reference policy out of a wrapper of two models) copies the wrappers
in that part, and their state with them. If the state held the other parts, the copy would have
them, too; and whoever lets go of a part would keep it. So the state refers to modules and wrappers
weakly. A copied or pickled state refers to none, and each copied wrapper enters itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import nn

T = TypeVar("T")


class Living(Sequence[T], Generic[T]):
    """Ordered sequence of weak references: iteration yields the objects that still exist. A copied
    or pickled sequence is empty."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = [weakref.ref(item) for item in items]

    def __iter__(self) -> Iterator[T]:
        for item in self._items:
            found = item()
            if found is not None:
                yield found

    def __len__(self) -> int:
        return sum(item() is not None for item in self._items)

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]

    def __reduce__(self) -> Any:
        return Living, ()

    def enter(self, item: T, order: Any) -> None:
        """Insert an object in order.

        Args:
            item: the object.
            order: sort key, a function of an object.
        """
        self._items = [weakref.ref(one) for one in sorted((*self, item), key=order)]


class Home:
    """Weak reference to the module that was passed to `patch`. If that module is deleted, the
    reference changes to the largest remaining patched module."""

    def __init__(self, given: nn.Module | None = None) -> None:
        self._given = None if given is None else weakref.ref(given)
        self._inside = Living[nn.Module]()

    def __call__(self) -> nn.Module | None:
        found = None if self._given is None else self._given()
        if found is None:
            found = max(self._inside, key=lambda module: len(list(module.modules())), default=None)
            self._given = None if found is None else weakref.ref(found)
        return found

    def __reduce__(self) -> Any:
        return Home, ()

    @property
    def known(self) -> bool:
        """True if the reference is set and its module still exists."""
        return self._given is not None and self._given() is not None

    def name(self, module: nn.Module) -> None:
        """Set the module that was passed to `patch`."""
        self._given = weakref.ref(module)

    def enter(self, module: nn.Module) -> None:
        """Add a patched module inside, which may take the place of a deleted outer module."""
        self._inside.enter(module, lambda _: 0)
