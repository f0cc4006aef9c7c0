"""Standing in for one module's forward, and being taken off again.

[Note: instance forward] A wrapper is a plain object stored as `module.forward`. It refers to its module, and copying or
pickling the module carries it along, pointing at the copy; a closure would go on running the original, and a bound method
of a function that the class does not have cannot be pickled. Libraries that take a bound method apart and bind its function
again, inside of wrappers of their own, get an `Unbound`, which finds the wrapper of the module that it is called with.
A wrapper that is called with a module first was bound to it as if it were a function, and does the same.
`module.__call__` and all hooks stay as they are. The class and its name stay, so that everything that looks for layers by
class finds them.

`torch.save` writes the unpatched module: where the file is read there may be no streambp. `pickle`,
by which processes send models to each other, and `copy` keep the patch.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from streambp.known_names import ACCELERATE_FORWARD, ACCELERATE_HOOK, ACCELERATE_ORIGINAL, FSDP_UNIT

WRAPPERS = "_streambp_forwards"  # a module's attribute: its wrappers, outermost last
PATCH = "_streambp"  # what `unpatch` takes off, on the module that was given to `patch`
REDUCES = "__reduce_ex__"  # on modules that have one of these: `as_unpatched`


class Unbound:
    """A wrapper as a function that takes the module first. [Note: instance forward]

    accelerate's mixed precision wraps it and binds the result to the module; a copy of the module is bound anew.
    """

    def __init__(self, index: int, signature: inspect.Signature) -> None:
        self.index = index
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
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
        within = None if isinstance(forward, InstanceForward) else getattr(forward, "__wrapped__", None)
        forward = within or getattr(forward, "previous", None)


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


def as_unpatched(module: nn.Module, protocol: Any) -> Any:
    """In the place of a patched module's `__reduce_ex__`, as a partial of the module: what its class has; in a file of
    `torch.save` without what `patch` put on the module."""
    made: Any = type(module).__reduce_ex__(module, protocol)
    if sys._getframe(1).f_globals.get("__name__") != torch.serialization.__name__:
        return made
    own = {name: value for name, value in made[2].items() if name not in (PATCH, REDUCES)}
    for wrapper in reversed(own.pop(WRAPPERS, ())):
        wrapper.leave(own)
    return (*made[:2], own, *made[3:])


def unmark(module: nn.Module) -> None:
    """A module on which nothing of ours is left is written to files as it is."""
    if WRAPPERS not in module.__dict__ and PATCH not in module.__dict__:
        module.__dict__.pop(REDUCES, None)


class InstanceForward:
    """Base of the wrappers: stands in for `module.forward` and can be taken off again. [Note: instance forward]

    A wrapper says what it does in `call`.

    order: by which a patch puts its wrappers on.
    retired: it was to be taken off while another library's wrapper stood around it, as accelerate's does under mixed
        precision. It stays there, and passes every call on to the original.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.slot = _slot(module)
        self.stood: Callable[..., Any] | None = module.__dict__.get(self.slot)
        self.unwrapped: Any = module.__dict__.get(ACCELERATE_ORIGINAL)
        self.retired = False
        self.index = self.order = 0

    def __setstate__(self, own: dict[str, Any]) -> None:
        """A copied or pickled wrapper enters itself in the state that its patch shares."""
        self.__dict__.update(own)
        enter = getattr(own.get("state"), "enter", None)
        if enter is not None:
            enter(self)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound_to = args[0] if args and isinstance(args[0], nn.Module) else None
        if bound_to is self.module:
            return self.call(*args[1:], **kwargs)
        if bound_to is not None and WRAPPERS in bound_to.__dict__:  # a copy
            return bound_to.__dict__[WRAPPERS][self.index].call(*args[1:], **kwargs)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What stands in for the forward."""
        raise NotImplementedError

    @property
    def previous(self) -> Callable[..., Any] | None:
        """What stood there before: another's forward on the instance. If that is accelerate's mixed precision, and
        `unwrap_model` was to take it off since, what stood inside."""
        if self.unwrapped is not None and self.module.__dict__.get(ACCELERATE_ORIGINAL) is not self.unwrapped:
            self.stood, self.unwrapped = self.unwrapped, None
        return self.stood

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call what this wrapper stands in for: a forward that was set on the module before, or its class's."""
        previous = self.stood if self.unwrapped is None else self.previous
        if previous is not None:
            return previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The original's: Trainer, peft and generate look at the parameters of a model's forward."""
        return inspect.signature(self.previous or type(self.module).forward.__get__(self.module))

    @property
    def __func__(self) -> Unbound:
        return Unbound(self.index, self.__signature__)

    __wrapped__ = __func__  # for libraries that follow it to the innermost function, and bind that

    def install(self) -> None:
        """Stand in for the module's forward from now on; the module's list of wrappers gets this one."""
        wrappers = self.module.__dict__.setdefault(WRAPPERS, [])
        self.index = len(wrappers)
        wrappers.append(self)
        setattr(self.module, self.slot, self)
        self.module.__dict__.setdefault(REDUCES, functools.partial(as_unpatched, self.module))

    def stands_as(self, forward: Any) -> bool:
        """Whether a module's forward is this wrapper, be it bound to the module."""
        if isinstance(forward, MethodType):
            return isinstance(forward.__func__, Unbound | InstanceForward) and forward.__func__.index == self.index
        return forward is self

    def leave(self, own: dict[str, Any]) -> None:
        """Take what it has put on its module off a copy's attributes."""
        if self.stands_as(own.get(self.slot)):
            own.pop(self.slot)
            own |= {} if self.previous is None else {self.slot: self.previous}

    def remove(self) -> None:
        """Put back what stood there before. If another forward stands there now, as Liger's may, retire instead."""
        if not self.stands_as(self.module.__dict__.get(self.slot)):
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
        unmark(self.module)
