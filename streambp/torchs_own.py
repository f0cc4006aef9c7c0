"""Torch's own functions, even if a program has replaced them.

[Note: torch's own functions] A program may replace a torch function by a wrapper (a z-loss around
`F.cross_entropy`, a counter). When the wrapper calls torch's function, torch looks up the name for
`__torch_function__` and passes the wrapper. Code that calls the wrapper then applies it twice. The
function is therefore found by its caller: by the code of the frame that called
`handle_torch_function`. For a call from C, it is found by the wrapper's name in `torch.Tensor`.
Functions are stored by name when streambp is imported. A function that was wrapped before is
rebuilt from its code. streambp's own arithmetic on logits uses `torch_own` and `nn_own`, which no
program replaces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor
from torch._C import TensorBase
from torch._C import _nn as nn_own
from torch._C import _VariableFunctions as torch_own
from torch.overrides import handle_torch_function

from streambp.errors import StreamBPError

__all__ = ["asked_of", "method", "nn_own", "rule_name", "torch_own"]

OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)
HOMES = (torch.nn.functional, torch.functional, torch._tensor, torch.autograd)


# Torch's Python functions and methods that no program replaced, by module and name.
KEPT = {
    (home.__name__, value.__name__): value
    for home in HOMES
    for value in (*vars(home).values(), *vars(Tensor).values())
    if isinstance(value, FunctionType)
    and value.__globals__ is vars(home)
    and not value.__code__.co_freevars
}
OF_PYTHON = vars(torch._tensor)
METHODS = {
    name: value
    for name, value in vars(Tensor).items()
    if getattr(value, "__globals__", None) is OF_PYTHON
}


def asked_of(func: Any) -> Any:
    """Return torch's own function for a call of `__torch_function__`, even if a program has
    replaced `torch.name` by a function of its own. [Note: torch's own functions]

    Call it directly in `__torch_function__`.

    Args:
        func: the argument of `__torch_function__`, which may be the program's function.

    Raises:
        StreamBPError: `func` replaces several methods of `torch.Tensor`, and torch does not report
            which was called.
    """
    if isinstance(func, OF_C):
        return func
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        "torch._dynamo"
    ):
        frame = frame.f_back  # the frame of `torch.compiler.disable`
    if frame.f_code is handle_torch_function.__code__ and frame.f_back is not None:
        code = frame.f_back.f_code
        names = frame.f_back.f_globals
        if getattr(func, "__code__", None) is code or func not in (
            names.get(code.co_name),
            vars(Tensor).get(code.co_name),
        ):
            return func  # an inner function, or a call in another function's name
        kept = KEPT.get((names["__name__"], code.co_name))
        # The function was wrapped before the import. Torch passes all arguments, so defaults are
        # not needed.
        return kept or FunctionType(code, names, code.co_name)
    stands_for = []
    for name, value in vars(Tensor).items():
        if value is func and hasattr(TensorBase, name):
            stands_for.append(name)
    if len(stands_for) > 1:
        raise StreamBPError(
            f"{getattr(func, '__qualname__', func)} replaces several methods of torch.Tensor "
            f"({', '.join(stands_for)}), and was called with logits that do not exist yet. Write a "
            "function for each method, or use StreamConfig(head=False)."
        )
    if stands_for:
        return getattr(TensorBase, stands_for[0])
    return func


def rule_name(func: Any) -> str:
    """Return the name by which the rules of lazy tensors are looked up for a torch function.

    Other functions (custom operators) get a name that has no rule.
    """
    if isinstance(func, OF_C) or any(
        getattr(func, "__globals__", None) is vars(home) for home in HOMES
    ):
        return str(func.__name__)
    return f"{getattr(func, '__module__', None)}.{getattr(func, '__qualname__', func)}"


def method(name: str) -> Callable[..., Any] | None:
    """Return torch's own method `name` of a tensor, even if a program has replaced it; None if
    there is no such method."""
    found: Callable[..., Any] | None = METHODS.get(name) or getattr(TensorBase, name, None)
    return found
