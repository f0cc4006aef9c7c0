"""Undo a `patch` that raises: the model is restored, with its previous patch or unpatched.

Errors come late, because kernels are chosen and foreign attention is detected on modules without
the previous patch. The previous patch is therefore removed first. `patch` and `unpatch` change
attributes of modules, a few tables among these attributes, and attributes of the previous patch's
objects. All of them are copied before, and restored after an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from streambp.instance_forward import PATCH_ATTRIBUTE, WRAPPERS_ATTRIBUTE
from streambp.known_names import KWARGS_HOOKS, MODULE_HOOKS
from streambp.model.state import PatchState

CHANGED_TABLES = (
    WRAPPERS_ATTRIBUTE,
    KWARGS_HOOKS,
    *MODULE_HOOKS,
)  # attributes of modules that are changed in place


@contextlib.contextmanager
def restore_on_error(model: nn.Module) -> Iterator[None]:
    """Context manager around `patch`: if the body raises, the model and its previous patch are
    restored to their state at the beginning.

    Args:
        model: the model that is patched.
    """
    states = [
        module.__dict__[PATCH_ATTRIBUTE]
        for module in model.modules()
        if PATCH_ATTRIBUTE in module.__dict__
    ]
    noted = [AttributeCopy(attributes) for attributes in _attributes(model, states)]
    try:
        yield
    except BaseException:
        for copied in noted:
            copied.restore()
        raise


def _attributes(model: nn.Module, states: list[PatchState]) -> Iterator[dict[str, Any]]:
    """Yield each attribute dictionary (`__dict__`) that patching may change: those of the model's
    modules, and those of the objects of a previous patch. `restore_on_error` copies these
    dictionaries.

    Args:
        model: the model.
        states: states of the patches that the model has already.
    """
    modules = dict.fromkeys(model.modules())
    for state in states:
        if state.root is not None:  # a shallow copy of the model shares the patch
            modules.update(dict.fromkeys(state.root.modules()))
        for owner in (
            state,
            state.weights,
            getattr(state.weights, "ranges", None),
            *state.wrappers,
        ):
            if owner is not None:
                yield vars(owner)
    for module in modules:
        yield module.__dict__


class AttributeCopy:
    """Copy of an object's attributes (`__dict__`), from which they can be restored. Some attributes
    are dictionaries or lists that `patch` changes in place, such as tables of hooks. The contents
    of these are copied too.

    Args:
        attributes: the object's `__dict__`.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.live_attributes, self.attributes = attributes, dict(attributes)
        self.tables = [
            (attributes[name], attributes[name].copy())
            for name in CHANGED_TABLES
            if name in attributes
        ]

    def restore(self) -> None:
        """Restore the object's attributes, and the contents of those that are changed in place, in
        their previous order."""
        self.live_attributes.clear()
        self.live_attributes.update(self.attributes)
        for table, contents in self.tables:
            table.clear()
            if isinstance(table, list):
                table.extend(contents)
            else:
                table.update(contents)
