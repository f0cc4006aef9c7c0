"""Base class of stand-ins: tensors without storage, in place of hidden states or logits.

`LazyHidden` is a stand-in in a model's forward; `LazyLogits` are the logits that a model returns. A
stand-in has a shape, a dtype and a device. An operation with a rule returns another stand-in, or
computes its result without the real tensor. Every other operation builds the real tensor and runs
on the real tensor: exact, at the unpatched model's memory cost. The operation's name is recorded
for `describe`.

A real tensor that was built for an operation is freed afterwards; the next operation builds another
real tensor. The difference must not show. If the operation returns no tensor (a hook was
registered, a pointer taken), the real tensor replaces the stand-in from then on. If the result
shares memory with the real tensor (`detach`, `transpose`), the next real tensor would miss writes
to the result. The version of that memory is therefore recorded, and a stand-in of the same memory
raises when used after a write.

Results computed from a stand-in depend on the hidden states; their gradient does not pass through
the stand-in. A hook that is registered on a stand-in first builds the real tensor, and gets the
gradient. A hook registered after a result was computed would get no gradient. `has_dependents`
records such results; the hook then raises, and so does `torch.autograd.grad` with respect to the
stand-in. An engine's scaling hook never raises. Engines register the hook on all outputs of a
model, beside a loss computed from the logits with a hook of its own. The hook scales the gradients
of all results computed from then on."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import TensorBase
from torch.utils._pytree import tree_leaves

from streambp.errors import StreamBPError
from streambp.foreign import rule_name, tensor_method, torch_function_of, torch_own
from streambp.known_names import SCALING_HOOK, TENSOR_HOOKS
from streambp.tensors import change_arguments, tensors_in


@dataclasses.dataclass(eq=False)
class SharedWriteCount:
    """Counter of in-place writes to a lazy tensor, its slices and its views. A lazy tensor has no
    storage, because its values are computed on use. Real tensors would share storage; lazy tensors
    share this counter instead.

    Attributes:
        watched: pairs of an empty tensor and its version counter when `track_alias` was called. The
            empty tensor shares the version counter of a real tensor that holds the lazy tensor's
            values, and keeps no memory alive.
        writes: number of writes through the lazy tensor, its slices and its views.
    """

    watched: list[tuple[Tensor, int]] = dataclasses.field(default_factory=list)
    writes: int = 0

    def track_alias(self, tensor: Tensor) -> None:
        """Watch a real tensor [...] that holds the values of one of these lazy tensors, by storing
        its version counter. `LazyTensor.check` then detects later in-place writes to it. The real
        tensor's memory is not kept alive."""
        if type(tensor) is Tensor and not tensor.is_inference():
            # The detached tensor shares the version counter; assigning `data` drops its values.
            counter = torch_own.detach(tensor)
            counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self.watched.append((counter, counter._version))


class GradientSink(torch.autograd.Function):
    """Autograd function that makes a lazy tensor the output of an autograd node. A lazy tensor has
    no storage; its values are computed on use. The node's backward receives the gradient if a
    user's autograd.Function or a kernel takes the lazy tensor as input.

    See `lazy/lazy_hidden.py` and `lazy/tensor.py`.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: type[LazyTensor], made_of: tuple[Any, ...], *inputs: Tensor
    ) -> LazyTensor:
        """Return the lazy tensor kind(*made_of) [...] as the output of an autograd node.

        Args:
            kind: class of the lazy tensor.
            made_of: arguments of the constructor.
            inputs: tensors [...] that are the node's inputs. The lazy tensor requires a gradient if
                an input does. Backward passes each input the gradient that `kind.receive_gradient`
                has computed.
        """
        lazy = kind(*made_of)
        ctx.set_materialize_grads(False)
        ctx.kind = kind
        ctx.made_of = made_of
        ctx.shape = list(lazy.shape)
        ctx.passed_by = None
        return lazy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Pass the gradient [...] of the lazy tensor to `receive_gradient` of the lazy tensor's
        class. Return its results, the gradients [...] or None of forward's `inputs`, after None for
        `kind` and `made_of`."""
        gradients = ctx.kind.receive_gradient(ctx, gradient)
        return None, None, *(gradients or (None,) * (len(ctx.needs_input_grad) - 2))


class MaterializeLazy(torch.autograd.Function):
    """Autograd function from a lazy tensor, which has no storage, to the complete tensor with its
    values. Used for a lazy tensor that a user's autograd.Function returned: the gradient must pass
    through the backward of that Function. See `lazy/tensor.py`."""

    @staticmethod
    def forward(ctx: Any, values: Callable[[], Tensor], stand_in: Tensor) -> Tensor:
        """Return the complete tensor [...] with a lazy tensor's values.

        Args:
            values: computes the complete tensor.
            stand_in: the lazy tensor [...], which receives the gradient in backward; its values are
                not read.
        """
        return values()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
        """Return the gradient of the complete tensor [...] unchanged, as the gradient of the lazy
        tensor, and None for `values`."""
        return None, upstream


class LazyTensor(Tensor):
    """Tensor subclass [*tokens, W] without storage, whose values are computed on use. Subclasses
    define rules for operations that need no complete tensor, and the methods that raise
    NotImplementedError here. The complete tensor is a real tensor with these values. W is the
    hidden size of hidden states, or the vocabulary size of logits.

    Attributes:
        memory: counts writes; shared with the slices and views of this tensor.
        materialized_tensor: the complete tensor, once an in-place operation has replaced this
            tensor by it; None before.
        is_view: True if this tensor is a slice or view of another lazy tensor.
        has_dependents: True if a result that requires a gradient was computed from this tensor.
        classes: the dimension of size W; None: the last.
        origin: a tensor [*tokens, ...] that is contiguous if the complete tensor would be, such as
            the token positions.
        config_hint: the setting that makes a model return the complete tensor, for error messages.
        metadata: torch's functions that need only a shape, a dtype and a device.
        rules: a dict from an operation's name to its rule, which takes the operation's arguments.
        has_rule: names of arguments of torch's losses that the rules support, such as
            "label_smoothing".
    """

    config_hint: ClassVar[str]
    metadata: ClassVar[frozenset[Any]]
    rules: ClassVar[Mapping[str, Callable[..., Any]]]
    has_rule: ClassVar[tuple[str, ...]] = ()  # arguments of torch's losses

    memory: SharedWriteCount
    materialized_tensor: Tensor | None
    is_view: bool
    has_dependents: bool
    classes: int | None = None
    origin: Tensor

    def build(self) -> Tensor:
        """Return the complete tensor [*tokens, W]: a real tensor with all values. The result is
        differentiable, in any grad mode, if the lazy tensor requires a gradient."""
        raise NotImplementedError

    def note(self, operation: str) -> None:
        """Record that `operation` needed the complete tensor, which costs memory.
        `streambp.describe` reports the operation's name."""
        raise NotImplementedError

    def follows_rules(self) -> bool:
        """True if operations on this tensor may be computed by the rules in `rules`, block by
        block. False: operations run on the complete tensor."""
        raise NotImplementedError

    def write(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation that changes the tensor in place, and return the operation's result.

        Args:
            func: torch's function.
            name: the function's name, such as "add_".
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        raise NotImplementedError

    def with_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Return the lazy result of an operation on the token dimensions, such as an index or a
        reshape. Subclasses define the arguments. The first argument is the operation: a function
        [*tokens, k] -> [*other tokens, k], for any k."""
        raise NotImplementedError

    def copy_with(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy of this lazy tensor with some properties changed, such as the dtype. The
        result shares no memory with this tensor. Subclasses define the arguments."""
        raise NotImplementedError

    def casts_to(self, dtype: torch.dtype) -> bool:
        """True if a cast to `dtype` gives a lazy tensor again. False: the cast builds a real tensor
        with all values."""
        raise NotImplementedError

    @classmethod
    def receive_gradient(cls, ctx: Any, gradient: Tensor | None) -> Any:
        """Receive the gradient of the complete tensor in backward, and return the gradients of the
        autograd node's inputs: a list, or None for no gradients.

        Args:
            ctx: context of the autograd node (`GradientSink`).
            gradient: gradient [*tokens, W] of the complete tensor; None: there is none.
        """
        raise NotImplementedError

    def with_classes(self, classes: int | None) -> Any:
        """Return a lazy view of this tensor [*tokens, W] with the dimension of size W at another
        place. torch's losses expect it second, as in [B, W, T]. Return NotImplemented if the class
        has no such view.

        Args:
            classes: index of the dimension of size W in the view; None: the last.
        """
        return NotImplemented

    def check(self, operation: str) -> None:
        """Raise `StreamBPError` if this tensor's values can no longer be computed: a tensor from
        which they are computed was changed in place, or the values' own memory was. Every operation
        on a lazy tensor calls this method first.

        Args:
            operation: name of the operation, for the error's message.
        """
        for counter, version in () if self.materialized_tensor is not None else self.memory.watched:
            if counter._version != version:
                raise StreamBPError(
                    "The logits were changed in place through another tensor that shares their "
                    f"memory, and then used again ({operation}), while the loss is computed "
                    f"without them. Use {self.config_hint}."
                )

    def latest(self, operation: str) -> LazyTensor:
        """Return the lazy tensor to use in place of this one, which has its current values. After
        an in-place operation such as `div_`, this is another lazy tensor.

        Args:
            operation: name of the operation that will use the values, for an error's message.
        """
        return self

    @classmethod
    def apply_rule(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Compute an operation on a lazy tensor by its rule in `rules`: a function that gives the
        result without building a tensor with all values. Return NotImplemented if the operation has
        no rule, or if another argument than the first is lazy.

        Args:
            func: torch's function.
            name: the function's name, the key in `rules`.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        rule = cls.rules.get(name)
        if (
            rule is None
            or not isinstance(args[0] if args else None, cls)
            or tensors_in((args[1:], kwargs), cls)
        ):
            return NotImplemented
        try:
            signature_of(rule).bind(*args, **kwargs)
        except TypeError:  # the rule lacks these arguments
            return NotImplemented
        return rule(*args, **kwargs)

    @classmethod
    # Compiled code would trace the rules with a stand-in's shape as its value.
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        func = torch_function_of(func)
        if func in cls.metadata:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = rule_name(func)
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if isinstance(kwargs.get("out"), cls):
            raise StreamBPError(
                f"{name} would write to logits that do not exist. Use {cls.config_hint}."
            )
        first_argument = args[0] if args else None
        stand_ins: list[LazyTensor] = []

        def latest(x: LazyTensor) -> LazyTensor:
            stand_ins.append(x.latest(name))
            return stand_ins[-1]

        args, kwargs = change_arguments(args, kwargs, cls, latest)
        for x in stand_ins:
            x.check(name)
        # A hook on a stand-in that was used already would get no gradient.
        differentiated = stand_ins
        second = args[1] if len(args) > 1 else None
        if name == "grad" and getattr(func, "__module__", None) == torch.autograd.__name__:
            grad_inputs = tree_leaves(kwargs.get("inputs", second))
            differentiated = [x for x in stand_ins if any(leaf is x for leaf in grad_inputs)]
        elif name not in TENSOR_HOOKS or is_scaling_hook(kwargs.get("hook", second)):
            differentiated = []
        if any(x.has_dependents and x.materialized_tensor is None for x in differentiated):
            raise StreamBPError(
                f"{name} comes after a loss or a part was computed from these logits or hidden "
                "states, so the hook would miss that gradient. Call register_hook or retain_grad "
                f"before anything is computed from them, or use {cls.config_hint}."
            )
        in_place = name.endswith("_") and not name.endswith("__")
        if isinstance(first_argument, cls) and (
            in_place or name in IN_PLACE_OPERATIONS or kwargs.get("inplace") is True
        ):
            return first_argument.write(func, name, args, kwargs)
        result = NotImplemented
        if kwargs.get("out") is None and all(x.follows_rules() for x in stand_ins):
            result = cls.apply_rule(func, name, args, kwargs)
        if result is NotImplemented:
            result = cls.run_on_complete(func, name, args, kwargs)
        note_use(stand_ins, result)
        return result

    @classmethod
    def run_on_complete(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation that has no rule in `rules`. Each lazy argument is replaced by the
        complete tensor, a real tensor with all values, which costs memory. Return the operation's
        result.

        Args:
            func: torch's function.
            name: the function's name.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        built: dict[int, tuple[LazyTensor, Tensor]] = {}
        # `describe` names a loss of torch together with the arguments that prevented its rule.
        arguments = dict(zip(LOSS_PARAMETERS.get(name, ()), args, strict=False)) | (
            kwargs if name in LOSS_PARAMETERS else {}
        )
        reasons = []
        if isinstance(arguments.get("target"), Tensor) and arguments["target"].is_floating_point():
            reasons.append("target=...")  # probabilities of all classes
        for parameter in ("weight", "size_average", "reduce", "label_smoothing"):
            value = arguments.get(parameter)
            is_zero = isinstance(value, float | int) and not isinstance(value, bool) and value == 0
            if parameter not in cls.has_rule and value is not None and not is_zero:
                reasons.append(f"{parameter}=...")
        call_text = f"{name}({', '.join(reasons)})" if reasons else name
        for x in tensors_in((args, kwargs), cls):
            if id(x) not in built:
                x.note(call_text)
                built[id(x)] = x, x.build()
        args, kwargs = change_arguments(args, kwargs, cls, lambda x: built[id(x)][1])
        result = func(*args, **kwargs)
        tensors = tensors_in(result, Tensor)
        for x, real in built.values():
            if not tensors:
                x.materialized_tensor = real
            aliases = [tensor for tensor in tensors if torch._C._is_alias_of(tensor, real)]  # type: ignore[attr-defined]
            for tensor in (real, *aliases) if aliases or not tensors else ():
                x.memory.track_alias(tensor)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


# Positional parameters of torch's losses.
LOSS_PARAMETERS = {
    "cross_entropy": (
        "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
    ),
    "nll_loss": ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
}  # fmt: skip


METADATA_OPERATIONS = frozenset(
    {
        *(tensor_method(name) for name in ("size", "dim", "numel", "element_size",
                "is_floating_point", "stride", "__len__",
                                    "nelement", "ndimension", "get_device", "is_complex", "is_inference", "is_contiguous")),
        torch_own.numel, torch_own.is_floating_point, torch_own.is_complex,
        *(getattr(TensorBase, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda",
                                                     "is_cpu", "is_meta", "layout", "is_leaf", "grad_fn", "is_sparse",
                                                     "itemsize", "nbytes")),
    }
)  # fmt: skip


IN_PLACE_OPERATIONS = frozenset(
    {
        "__setitem__",
        *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")),
    }
)


signature_of = functools.cache(inspect.signature)  # called with rules of a class


def note_use(stand_ins: Sequence[Any], result: Any) -> None:
    """Set `has_dependents` to True on the lazy tensors `stand_ins` if `result`, which was computed
    from these tensors, requires a gradient. Registering a gradient hook on one of the tensors later
    then raises, because the hook would miss the gradient of `result`."""
    results = [result] if isinstance(result, Tensor) else tensors_in(result, Tensor)
    for stand_in in stand_ins:
        stand_in.has_dependents |= any(
            leaf is not stand_in and leaf.requires_grad for leaf in results
        )


def is_scaling_hook(hook: Any) -> bool:
    """True if a tensor hook is DeepSpeed's hook that scales gradients and signals the start of
    backward, by the hook's qualified name. Such a hook may be registered on a lazy tensor after
    results were computed from the tensor. Registering any other hook raises then."""
    return SCALING_HOOK in getattr(hook, "__qualname__", "")
