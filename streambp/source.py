"""The source of a module's forward, below what decorates it, and copies of it with other globals."""

from __future__ import annotations

import functools
import inspect
from types import CellType, FunctionType
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


def with_globals(space: dict[str, Any], decorated: Any) -> FunctionType:
    """A copy of a forward as it stands in a class, in which the written function has other globals. Decorators that say
    what they wrap stand around the copy as they do around the original: they rename arguments, for instance.

    Args:
        space: the globals.
    """
    inner = getattr(decorated, "__wrapped__", None)
    cells = decorated.__closure__ or () if isinstance(decorated, FunctionType) else ()
    if isinstance(inner, FunctionType) and any(_content(cell) is inner for cell in cells):
        copy = with_globals(space, inner)
        around = tuple(CellType(copy) if _content(cell) is inner else cell for cell in cells)
        found = _copied(decorated, decorated.__globals__, around)
        found.__dict__.update(vars(decorated), __wrapped__=copy)
        return found
    function = written(decorated)
    return _copied(function, space, function.__closure__)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty as yet
        return None


def _copied(function: FunctionType, space: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    found = FunctionType(function.__code__, space, function.__name__, function.__defaults__, closure)
    found.__kwdefaults__, found.__qualname__ = function.__kwdefaults__, function.__qualname__
    return found
