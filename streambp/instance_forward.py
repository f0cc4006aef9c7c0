"""Wrappers that replace one module's forward and can be removed again.

A wrapper is a plain object stored as `module.forward`. The wrapper refers to its module. Copying or
pickling the module includes the wrapper, which then refers to the copy. A closure would still run
the original, and a bound method that the class lacks cannot be pickled. Some libraries split a
bound method and bind its function again, inside wrappers of their own. These libraries get an
`UnboundForward`, which finds the wrapper of the module in its call. A wrapper called with a module
as first argument acts in the same way, as if it were the function.

`module.__call__` and all hooks do not change. The class and its name do not change, so that code
that searches layers by class finds them.

`torch.save` writes the unpatched module, because the reader may not have streambp. `pickle`, by
which processes send models to each other, and `copy` preserve the patch.

[Note: owner of a step] A streamed forward, and the backward of a layer, replace the layer's weights,
the model's settings and its output projection for a while. A second thread that calls the model
would compute with the replacements, and its gradients would be added to those of the first thread.
The model therefore has an owner from the beginning of a forward, or of a layer's backward, to its
end. A call by another thread raises. The owner is

    a thread      calls within calls, trials, recomputations of checkpoints
    a backward    autograd's threads, one for each device, work at one backward together
    a forward     a backward inside the forward runs in a thread of autograd

Threads that take turns never meet. Each forward may run in another thread, like its backward.

The wrappers of a patch share one state. A program may copy a part of the module that was given to
`patch` (an EMA of the model inside of DDP, a reference policy out of a wrapper of two models). The
copy includes the wrappers in that part, and their state. If the state held the other parts, the
copy would have them too, and the parts would stay alive. The state therefore refers to modules and
wrappers weakly (`WeakSequence`, `PatchedModuleRef`). A copied or pickled state refers to none, and
each copied wrapper enters itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.known_names import ACCELERATE_FORWARD, ACCELERATE_HOOK, ACCELERATE_ORIGINAL, FSDP_UNIT


@dataclasses.dataclass(eq=False)
class ModelAccess(contextlib.AbstractContextManager["ModelAccess"]):
    """Context manager for the time in which a thread computes with a patched model, in a forward or
    in a layer's backward. Created by `StepOwner.enter`. If the thread enters again meanwhile, the
    same object is used.

    Attributes:
        owner: the lock of the model.
        thread: identifier of the thread.
        task: autograd's id of the backward (graph task) in which the object was created; -1: the
            object was not created in a backward.
        depth: number of times the object was entered and not left yet.
    """

    owner: StepOwner
    thread: int
    task: int
    depth: int = 1

    def __exit__(self, *_: object) -> None:
        with self.owner.lock:
            self.depth -= 1


@dataclasses.dataclass(eq=False)
class StepOwner:
    """Lock of a patched model: one thread at a time may compute with the model. [Note: owner of a
    step]

    Attributes:
        lock: protects `current`; re-entrant, because a signal handler may acquire `lock` too.
        current: weak reference to the last `ModelAccess`; None: there was none. The model is in use
            while this object exists and its `depth` is above 0. If an exception left `depth` above
            0, the use ends when the exception's frames free the object.
    """

    lock: Any = dataclasses.field(default_factory=threading.RLock)
    current: weakref.ref[ModelAccess] | None = None

    def __reduce__(self) -> Any:
        """Return a new lock, not in use, for copy and pickle."""
        return StepOwner, ()

    def enter(self, began: weakref.ref[ModelAccess] | None = None) -> ModelAccess:
        """Return a context manager in which the calling thread may compute with the model.

        Args:
            began: weak reference to the `ModelAccess` of the forward, for a backward. Autograd may
                run backward in another thread, and the forward's thread still holds the lock. None
                in a forward.

        Raises:
            StreamBPError: another thread is computing with the model.
        """
        thread = threading.get_ident()
        task = torch._C._current_graph_task_id()
        with self.lock:
            use = None if self.current is None else self.current()
            if use is None or not use.depth:
                use = ModelAccess(self, thread, task)
                self.current = weakref.ref(use)
                return use
            if (
                use.thread == thread
                or (task != -1 and use.task == task)
                or (began is not None and began() is use)
            ):
                use.depth += 1
                return use
        raise StreamBPError(
            "Another thread is computing with this model; two at a time would put wrong numbers "
            "into each other's gradients. Let threads take turns (a lock around each forward and "
            "each backward), or give each a copy of its own (copy.deepcopy(model))."
        )


WRAPPERS_ATTRIBUTE = "_streambp_forwards"  # module attribute: its wrappers, outermost last
PATCH_ATTRIBUTE = "_streambp"  # attribute of the module given to `patch`, removed by `unpatch`
REDUCE_METHOD = "__reduce_ex__"  # set to `reduce_unpatched` on modules with either attribute


class UnboundForward:
    """Function of (module, *args) that calls the replaced forward of the module: the `__func__` of
    a patched forward, as a bound method has one.

    accelerate's mixed precision takes this function, wraps it, and binds the result to the module
    or to a copy of the module.

    Args:
        index: position of the replacement in the module's list of replacements (`InstanceForward`).
        signature: signature of the forward that was replaced, without the module.
    """

    def __init__(self, index: int, signature: inspect.Signature) -> None:
        self.index = index
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.forward_of(module)(*args, **kwargs)

    def forward_of(self, module: nn.Module) -> Any:
        """Return the object that replaces the module's forward (`InstanceForward`)."""
        return getattr(module, WRAPPERS_ATTRIBUTE)[self.index]


def check_is_module(model: Any) -> None:
    """Raise if the argument `model` of a public function is no `nn.Module`.

    Raises:
        UnsupportedModelError: the argument is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"This is a {type(model).__name__}; pass a model, such as "
            "AutoModelForCausalLM.from_pretrained(...) returns."
        )


def forwards(module: nn.Module) -> Iterator[Any]:
    """Yield all callables that are set in place of a module's own forward, outermost first:
    streambp's objects (`InstanceForward`), and wrappers of other libraries that refer to the
    wrapped function."""
    forward: Any = module.__dict__.get(_forward_attribute(module))
    while forward is not None:
        if isinstance(forward, MethodType):
            forward = forward.__func__
        if isinstance(forward, UnboundForward):
            forward = forward.forward_of(module)
        yield forward
        if isinstance(forward, InstanceForward):
            wrapped = None
        else:
            wrapped = getattr(forward, "__wrapped__", None)
        forward = wrapped or getattr(forward, "previous", None)


def has_backward_hooks(module: nn.Module) -> bool:
    """True if the module has backward hooks, or global backward hooks exist. Torch then wraps the
    module's call in an autograd Function, which needs real tensors and not lazy ones."""
    everywhere = torch.nn.modules.module
    hooks = (
        module._backward_hooks,
        module._backward_pre_hooks,
        everywhere._global_backward_hooks,
        everywhere._global_backward_pre_hooks,
    )
    return any(hooks)


def is_fsdp_unit(module: nn.Module) -> bool:
    """True if `fully_shard` (FSDP2) was applied to the module itself, and not only to a module
    around or inside the module."""
    return FSDP_UNIT in map(operator.attrgetter("__name__"), type(module).__mro__)


def _forward_attribute(module: nn.Module) -> str:
    """Return the name of the attribute by which a module's forward is replaced on the instance:
    "forward", or accelerate's inner `_old_forward` if accelerate has wrapped the forward
    (device_map)."""
    if ACCELERATE_HOOK in module.__dict__:
        return ACCELERATE_FORWARD
    return "forward"


def reduce_unpatched(module: nn.Module, protocol: Any) -> Any:
    """Return the result of `__reduce_ex__` for a patched module. `torch.save` gets the module
    without the patch, so that the file loads without streambp. Copies and other pickles include the
    patch.

    Set as `__reduce_ex__` on the instances of patched modules, as a partial with the module.

    Args:
        module: the patched module.
        protocol: the pickle protocol.
    """
    state_parts: Any = type(module).__reduce_ex__(module, protocol)
    if sys._getframe(1).f_globals.get("__name__") != torch.serialization.__name__:
        return state_parts
    attributes = {
        name: value
        for name, value in state_parts[2].items()
        if name not in (PATCH_ATTRIBUTE, REDUCE_METHOD)
    }
    for wrapper in reversed(attributes.pop(WRAPPERS_ATTRIBUTE, ())):
        wrapper.remove_from_attributes(attributes)
    return (*state_parts[:2], attributes, *state_parts[3:])


def unmark(module: nn.Module) -> None:
    """Remove the attribute `__reduce_ex__` that `patch` has set on a module. Do nothing while the
    module still has a replaced forward, or is the module that was passed to `patch`."""
    if WRAPPERS_ATTRIBUTE not in module.__dict__ and PATCH_ATTRIBUTE not in module.__dict__:
        module.__dict__.pop(REDUCE_METHOD, None)


class InstanceForward:
    """Base class of objects that replace a module's forward. `install` sets the object as
    `module.forward` on the instance, and `remove` restores the previous forward.

    Subclasses implement `call`.

    Attributes:
        module: the module.
        slot: name of the replaced attribute, usually "forward".
        replaced_forward: the forward that was set on the instance before; None: the class's
            forward.
        unwrapped: the forward inside of `replaced_forward`, if `replaced_forward` is the wrapper of
            accelerate's mixed precision; None: it is no such wrapper.
        order: this object's position among all replacements in the same patched model.
        retired: True if `remove` was called while another library's wrapper, such as accelerate's
            mixed precision, was around this forward. This object then stays inside of the wrapper
            and calls the original forward.
        index: this object's position in the module's list of replacements.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.slot = _forward_attribute(module)
        self.replaced_forward: Callable[..., Any] | None = module.__dict__.get(self.slot)
        self.unwrapped: Any = module.__dict__.get(ACCELERATE_ORIGINAL)
        self.retired = False
        self.index = self.order = 0

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Set the attributes of a copied or unpickled replacement, and register the replacement
        with the state of its patch."""
        self.__dict__.update(attributes)
        enter = getattr(attributes.get("state"), "enter", None)
        if enter is not None:
            enter(self)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):
            bound_to = args[0]
        else:
            bound_to = None
        if bound_to is self.module:
            return self.call(*args[1:], **kwargs)
        # the argument is a copy of the module
        if bound_to is not None and WRAPPERS_ATTRIBUTE in bound_to.__dict__:
            return bound_to.__dict__[WRAPPERS_ATTRIBUTE][self.index].call(*args[1:], **kwargs)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the forward in place of the module's own; each subclass implements this
        method."""
        raise NotImplementedError

    @property
    def previous(self) -> Callable[..., Any] | None:
        """Return the forward that this object replaced; None: the class's forward, because none was
        set on the instance.

        If accelerate's mixed precision had set that forward, and `unwrap_model` has removed the
        mixed precision since, return the forward inside.
        """
        if (
            self.unwrapped is not None
            and self.module.__dict__.get(ACCELERATE_ORIGINAL) is not self.unwrapped
        ):
            self.replaced_forward = self.unwrapped
            self.unwrapped = None
        return self.replaced_forward

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replaced forward: the one that was set on the instance before, or the
        class's."""
        if self.unwrapped is None:
            previous = self.replaced_forward
        else:
            previous = self.previous
        if previous is not None:
            return previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the replaced forward, because Trainer, peft and `generate`
        inspect the parameters of a forward."""
        return inspect.signature(self.previous or type(self.module).forward.__get__(self.module))

    @property
    def __func__(self) -> UnboundForward:
        return UnboundForward(self.index, self.__signature__)

    __wrapped__ = __func__  # for libraries that bind the innermost wrapped function

    def install(self) -> None:
        """Replace the module's forward, and append this object to the module's list of
        replacements."""
        wrappers = self.module.__dict__.setdefault(WRAPPERS_ATTRIBUTE, [])
        self.index = len(wrappers)
        wrappers.append(self)
        setattr(self.module, self.slot, self)
        self.module.__dict__.setdefault(
            REDUCE_METHOD, functools.partial(reduce_unpatched, self.module)
        )

    def is_replacement(self, forward: Any) -> bool:
        """True if `forward`, the value of a module's attribute, is this object, or a method that
        calls this object."""
        if isinstance(forward, MethodType):
            return (
                isinstance(forward.__func__, UnboundForward | InstanceForward)
                and forward.__func__.index == self.index
            )
        return forward is self

    def remove_from_attributes(self, attributes: dict[str, Any]) -> None:
        """Remove this object from a copy of the module, by changing the copy's attributes. The copy
        gets the forward that this object replaced.

        Args:
            attributes: the copy's `__dict__`.
        """
        if self.is_replacement(attributes.get(self.slot)):
            attributes.pop(self.slot)
            attributes |= {} if self.previous is None else {self.slot: self.previous}

    def remove(self) -> None:
        """Restore the replaced forward of the module. If another library has wrapped this object
        since, the wrapper cannot be removed. This object then stays inside, and only calls the
        original forward (`retired`)."""
        if not self.is_replacement(self.module.__dict__.get(self.slot)):
            self.retired = True
            return
        if self.previous is None:
            del self.module.__dict__[self.slot]
        else:
            setattr(self.module, self.slot, self.previous)
        wrappers = self.module.__dict__[WRAPPERS_ATTRIBUTE]
        # retired wrappers after it do not move: an `UnboundForward` may hold their index
        if wrappers[-1] is self:
            wrappers.pop()
        if not wrappers:
            del self.module.__dict__[WRAPPERS_ATTRIBUTE]
        unmark(self.module)


T = TypeVar("T")


class WeakSequence(Sequence[T], Generic[T]):
    """Sequence of weak references, which behaves like a sequence of the referenced objects that
    still exist. A copied or pickled sequence is empty."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = [weakref.ref(item) for item in items]

    def __iter__(self) -> Iterator[T]:
        referents = [item() for item in self._items]
        return iter([referent for referent in referents if referent is not None])

    def __len__(self) -> int:
        return sum(item() is not None for item in self._items)

    def __getitem__(self, index: Any) -> Any:
        return list(iter(self))[index]

    def __reduce__(self) -> Any:
        return WeakSequence, ()

    def enter(self, item: T, order: Any) -> None:
        """Insert an object, and sort the sequence by `order`.

        Args:
            item: the object.
            order: function from an object to its sort key.
        """
        self._items = [weakref.ref(member) for member in sorted((*self, item), key=order)]


class PatchedModuleRef:
    """Weak reference to the module that was passed to `patch`. Calling this object returns the
    module.

    `patch` also registers each module with a replaced forward, by the method `enter`. If the module
    that was passed to `patch` is deleted, calling this object returns the registered module with
    the most submodules. The call returns None if no registered module remains.

    Args:
        module: the module; None: the reference is empty, as in a copied or pickled patch. The
            method `name` sets the module later.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._reference = None if module is None else weakref.ref(module)
        self._inside = WeakSequence[nn.Module]()

    def __call__(self) -> nn.Module | None:
        root = None if self._reference is None else self._reference()
        if root is None:
            root = max(self._inside, key=lambda module: len(list(module.modules())), default=None)
            self._reference = None if root is None else weakref.ref(root)
        return root

    def __reduce__(self) -> Any:
        return PatchedModuleRef, ()

    @property
    def is_alive(self) -> bool:
        """True if the module of this reference was set and still exists."""
        return self._reference is not None and self._reference() is not None

    def name(self, module: nn.Module) -> None:
        """Change the reference to `module`, the module that was passed to `patch`."""
        self._reference = weakref.ref(module)

    def enter(self, module: nn.Module) -> None:
        """Register a module with a replaced forward. The reference may change to this module if the
        module that was passed to `patch` is deleted."""
        self._inside.enter(module, lambda _: 0)
