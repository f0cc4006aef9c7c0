"""The source of a module's forward, below what decorates it."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any

from torch import nn


def written_forward(module: nn.Module) -> Any:
    """The function that stands in the class of a module as its forward.

    Decorators that say what they wrap (`functools.wraps`) are followed, and so are those that do not (transformers up to
    5.15 has one around its mixers): functions made inside another one, whose closure holds a single function. None for a
    scripted module, whose class has none.
    """
    return written(getattr(type(module), "forward", None))


@functools.lru_cache
def written(decorated: Any) -> Any:
    """The same of a forward as it stands in a class."""
    forward: Any = inspect.unwrap(decorated)
    while isinstance(forward, FunctionType) and "<locals>" in forward.__qualname__:
        cells = [cell.cell_contents for cell in forward.__closure__ or ()]
        functions = [value for value in cells if isinstance(value, FunctionType)]
        if len(functions) != 1:
            break
        forward = inspect.unwrap(functions[0])
    return forward
