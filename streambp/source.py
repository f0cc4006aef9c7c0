"""Find the source of a module's forward inside its decorators, and copy forwards with other
globals.
"""

from __future__ import annotations

import functools
import inspect
from types import CellType, FunctionType
from typing import Any

from torch import nn


def written_forward(module: nn.Module) -> Any:
    """Return the function that a module's class defines as `forward`, without decorators. None for
    a scripted module, whose class has no forward.

    Decorators made with `functools.wraps` are removed. A decorator of another kind, as around
    mixers in transformers up to 5.15, is removed if its closure holds a single function.
    """
    return undecorate(getattr(type(module), "forward", None))


@functools.lru_cache
def undecorate(decorated: Any) -> Any:
    """Return the function inside of a forward's decorators. Decorators made with `functools.wraps`
    are removed; other decorators are removed if their closure holds a single function."""
    forward: Any = inspect.unwrap(decorated)
    while isinstance(forward, FunctionType) and "<locals>" in forward.__qualname__:
        cells = [cell.cell_contents for cell in forward.__closure__ or ()]
        functions = [value for value in cells if isinstance(value, FunctionType)]
        if len(functions) != 1:
            break
        forward = inspect.unwrap(functions[0])
    return forward


def with_globals(space: dict[str, Any], decorated: Any) -> FunctionType:
    """Return a copy of a class's forward that looks up global variables in `space`. A function that
    the forward calls can thus be replaced for a single module.

    Decorators made with `functools.wraps` surround the copy as well, because some rename arguments;
    their own global variables are unchanged. Other decorators are removed, as by `undecorate`.

    Args:
        space: the global variables.
        decorated: the forward, as the class has it.
    """
    inner = getattr(decorated, "__wrapped__", None)
    if isinstance(decorated, FunctionType):
        cells = decorated.__closure__ or ()
    else:
        cells = ()
    if isinstance(inner, FunctionType) and any(_cell_content(cell) is inner for cell in cells):
        copy = with_globals(space, inner)
        closure = tuple(CellType(copy) if _cell_content(cell) is inner else cell for cell in cells)
        result = _copy_function(decorated, decorated.__globals__, closure)
        result.__dict__.update(vars(decorated), __wrapped__=copy)
        return result
    function = undecorate(decorated)
    return _copy_function(function, space, function.__closure__)


def _cell_content(cell: CellType) -> Any:
    """Return a closure cell's value; None for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _copy_function(
    function: FunctionType, space: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    """Return a copy of a function with the global variables `space` and the closure `closure`;
    None: no closure."""
    copied = FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__qualname__ = function.__qualname__
    return copied
