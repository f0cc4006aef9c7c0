"""Torch's own functions, whatever stands under their names.

[Note: torch's own functions] A program may put a wrapper in the place of a function of torch (a z-loss around
`F.cross_entropy`, a counter). When torch's function runs inside of the wrapper, torch looks its name up again for
`__torch_function__`, and hands over the wrapper. Whoever calls that applies it twice. So the function is told by who asks:
by the code of the frame that called `handle_torch_function`, or, where C asks, by the name in `torch.Tensor` under which
the wrapper stands. Functions are kept by name when streambp is imported; one that was wrapped before is made anew of its
code. streambp's own arithmetic on logits goes to `torch_own` and `nn_own`, where nobody replaces anything.
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


# Torch's Python functions and methods whose place nobody has taken, by the module that wrote them and their name.
KEPT = {
    (home.__name__, value.__name__): value
    for home in HOMES
    for value in (*vars(home).values(), *vars(Tensor).values())
    if isinstance(value, FunctionType) and value.__globals__ is vars(home) and not value.__code__.co_freevars
}
OF_PYTHON = vars(torch._tensor)
METHODS = {name: value for name, value in vars(Tensor).items() if getattr(value, "__globals__", None) is OF_PYTHON}


def asked_of(func: Any) -> Any:
    """The function of torch that `__torch_function__` is asked about; called there. [Note: torch's own functions]

    Args:
        func: what torch looked up under its name.

    Raises:
        StreamBPError: `func` stands under several names of `torch.Tensor`, and C does not tell which one was called.
    """
    if isinstance(func, OF_C):
        return func
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch._dynamo"):
        frame = frame.f_back  # `torch.compiler.disable` around it
    if frame.f_code is handle_torch_function.__code__ and frame.f_back is not None:
        code, names = frame.f_back.f_code, frame.f_back.f_globals
        if getattr(func, "__code__", None) is code or func not in (names.get(code.co_name), vars(Tensor).get(code.co_name)):
            return func  # of a function inside of another, or of one that asks in another's name
        kept = KEPT.get((names["__name__"], code.co_name))
        # One that was wrapped before streambp was imported. Torch hands all arguments on: it needs no defaults.
        return kept or FunctionType(code, names, code.co_name)
    stands_for = [name for name, value in vars(Tensor).items() if value is func and hasattr(TensorBase, name)]
    if len(stands_for) > 1:
        raise StreamBPError(
            f"{getattr(func, '__qualname__', func)} stands in the place of several methods of torch.Tensor "
            f"({', '.join(stands_for)}), and was called with logits that do not exist yet. Give each method a function of "
            "its own, or use StreamConfig(head=False)."
        )
    return getattr(TensorBase, stands_for[0]) if stands_for else func


def rule_name(func: Any) -> str:
    """The name by which a function of torch has a rule; for all others (custom operators) one that no rule has."""
    if isinstance(func, OF_C) or any(getattr(func, "__globals__", None) is vars(home) for home in HOMES):
        return str(func.__name__)
    return f"{getattr(func, '__module__', None)}.{getattr(func, '__qualname__', func)}"


def method(name: str) -> Callable[..., Any] | None:
    """Torch's own method of a tensor."""
    found: Callable[..., Any] | None = METHODS.get(name) or getattr(TensorBase, name, None)
    return found
