"""Undoing a `patch` that is refused: the model is what it was, patched as before or unpatched.

Errors come late: kernels are chosen, and foreign attention is looked for, on modules that the earlier patch has left. So
the earlier patch comes off first. What `patch` and `unpatch` change stands in attributes of modules, in a few tables among
these attributes, and in attributes of the earlier patch's own objects. All of them are noted before, and put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from streambp.instance_forward import PATCH, WRAPPERS
from streambp.known_names import MODULE_HOOKS, WITH_KWARGS
from streambp.model.state import PatchState

TABLES = (WRAPPERS, WITH_KWARGS, *MODULE_HOOKS)  # attributes of modules that are changed in place


@contextlib.contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Context manager that undoes what happens to a model within, and to its patch, if an error ends it."""
    states = [module.__dict__[PATCH] for module in model.modules() if PATCH in module.__dict__]
    noted = [Noted(own) for own in _attributes(model, states)]
    try:
        yield
    except BaseException:
        for one in noted:
            one.put_back()
        raise


def _attributes(model: nn.Module, states: list[PatchState]) -> Iterator[dict[str, Any]]:
    """The attributes of all modules, and of all objects of patches that `unpatch` changes."""
    modules = dict.fromkeys(model.modules())
    for state in states:
        if state.root is not None:  # a shallow copy of the model has the patch of the original
            modules.update(dict.fromkeys(state.root.modules()))
        for changed in (state, state.weights, getattr(state.weights, "ranges", None), *state.wrappers):
            if changed is not None:
                yield vars(changed)
    for module in modules:
        yield module.__dict__


class Noted:
    """An object's attributes, and the contents of those that are tables."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.own, self.attributes = own, dict(own)
        self.tables = [(own[name], own[name].copy()) for name in TABLES if name in own]

    def put_back(self) -> None:
        """Make all of them what they were, the same objects in the same order."""
        self.own.clear()
        self.own.update(self.attributes)
        for table, contents in self.tables:
            table.clear()
            if isinstance(table, list):
                table.extend(contents)
            else:
                table.update(contents)
