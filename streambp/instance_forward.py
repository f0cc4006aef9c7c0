"""Standing in for one module's forward, and being taken off again.

[Note: instance forward] A wrapper is a plain object stored as `module.forward`. It refers to its module, and copying or
pickling the module carries it along, pointing at the copy; a closure would go on running the original, and a bound method
of a function that the class does not have cannot be pickled. Libraries that take a bound method apart and bind its function
again, inside of wrappers of their own, get an `Unbound`, which finds the wrapper of the module that it is called with.
`module.__call__` and all hooks stay as they are. The class and its name stay, so that everything that looks for layers by
class finds them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from streambp.known_names import ACCELERATE_FORWARD, ACCELERATE_HOOK, FSDP_UNIT

WRAPPERS = "_streambp_forwards"  # a module's attribute: its wrappers, outermost last


class Unbound:
    """A wrapper as a function that takes the module first. [Note: instance forward]

    accelerate's mixed precision wraps it and binds the result to the module; a copy of the module is bound anew.
    """

    def __init__(self, index: int, signature: inspect.Signature) -> None:
        self.index = index
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.of(module)(*args, **kwargs)

    def of(self, module: nn.Module) -> Any:
        """The wrapper itself."""
        return getattr(module, WRAPPERS)[self.index]


def forwards(module: nn.Module) -> Iterator[Any]:
    """What stands in for a module's forward, outermost first: our wrappers, and others' that tell what they wrap."""
    forward: Any = module.__dict__.get(_slot(module))
    while forward is not None:
        if isinstance(forward, MethodType):
            forward = forward.__func__
        if isinstance(forward, Unbound):
            forward = forward.of(module)
        yield forward
        forward = getattr(forward, "__wrapped__", None) or getattr(forward, "previous", None)


def wants_gradients(module: nn.Module) -> bool:
    """Whether what goes in and out of a module must be real, with gradients: it has backward hooks, for which torch puts
    an autograd.Function around it, or it is an FSDP unit, which does the same."""
    return has_backward_hooks(module) or is_fsdp_unit(module)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether it has some, or all modules have."""
    everywhere = torch.nn.modules.module
    hooks = (
        module._backward_hooks,
        module._backward_pre_hooks,
        everywhere._global_backward_hooks,
        everywhere._global_backward_pre_hooks,
    )
    return any(hooks)


def is_fsdp_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the module itself."""
    return FSDP_UNIT in map(operator.attrgetter("__name__"), type(module).__mro__)


def _slot(module: nn.Module) -> str:
    """accelerate's hooks (device_map) stand in `forward` themselves and call `_old_forward`; we stay inside of them."""
    return ACCELERATE_FORWARD if ACCELERATE_HOOK in module.__dict__ else "forward"


class InstanceForward:
    """Base of the wrappers: stands in for `module.forward` and can be taken off again. [Note: instance forward]

    retired: it was to be taken off while another library's wrapper stood around it, as accelerate's does under mixed
        precision. It stays there, and passes every call on to the original.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.slot = _slot(module)
        self.previous: Callable[..., Any] | None = module.__dict__.get(self.slot)
        self.retired = False
        self.index = 0

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call what this wrapper stands in for: a forward that was set on the module before, or its class's."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The original's: Trainer, peft and generate look at the parameters of a model's forward."""
        return inspect.signature(self.previous or type(self.module).forward.__get__(self.module))

    @property
    def __func__(self) -> Unbound:
        return Unbound(self.index, self.__signature__)

    def install(self) -> None:
        """Stand in for the module's forward from now on; the module's list of wrappers gets this one."""
        wrappers = self.module.__dict__.setdefault(WRAPPERS, [])
        self.index = len(wrappers)
        wrappers.append(self)
        setattr(self.module, self.slot, self)

    @property
    def installed(self) -> bool:
        """False as well if another library set the module's forward afterwards, as Liger does."""
        forward = self.module.__dict__.get(self.slot)
        if isinstance(forward, MethodType) and isinstance(forward.__func__, Unbound):
            return forward.__func__.index == self.index
        return forward is self

    @property
    def reached(self) -> bool:
        """Whether a call of the module comes here, be it through wrappers of others."""
        return any(forward is self for forward in forwards(self.module))

    def remove(self) -> None:
        """Put back what stood there before. If another forward stands there now, retire instead."""
        if not self.installed:
            self.retired = True
            return
        if self.previous is None:
            del self.module.__dict__[self.slot]
        else:
            setattr(self.module, self.slot, self.previous)
        wrappers = self.module.__dict__[WRAPPERS]
        if wrappers[-1] is self:  # retired ones after it keep their places, which an `Unbound` may name
            wrappers.pop()
        if not wrappers:
            del self.module.__dict__[WRAPPERS]
