"""Tensors in nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for the differentiable tensor of that number."""

    number: int


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every tensor and slot in its tuples, lists and mappings changed."""
    if isinstance(value, Tensor | Slot):
        return change(value)
    if isinstance(value, tuple | list):
        parts = [rebuilt(part, change) for part in value]
        return type(value)(parts) if type(value) in (tuple, list) else value
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        changed = copy.copy(value)
        for key, part in value.items():
            changed[key] = rebuilt(part, change)
        return changed
    return value
