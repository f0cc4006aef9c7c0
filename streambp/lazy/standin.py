"""What tensors have in common that stand for others which do not exist.

They are hidden states and logits in a model's forward (`Deferred`), and logits that it returns (`LazyLogits`). A stand-in
has a shape, a dtype and a device, and no storage. An operation on it follows a rule, which gives another stand-in or needs
no real tensor. Any other operation builds the real tensor and goes on with it: exact, at the memory cost that the unpatched
model has. The operation's name is kept, for `describe`.

[Note: stand-ins and memory] A real tensor that was built for an operation is let go after it, and the next operation builds
another. That must not show. If the operation returns no tensor (a hook was registered, a pointer taken), the real one stays
in the stand-in's place. If what it returns shares memory with the real one (`detach`, `transpose`), a write to it would
be missed by the next; so its version is remembered, and a stand-in of the same memory that is used after a write refuses.

What was made of a stand-in holds the hidden states, and passes its gradient by. A hook that is
put on a stand-in first makes it real, and sees the gradient; one that comes after something was made of it would see
nothing, and change nothing. So `followed` is remembered, and such hooks are refused, as is `torch.autograd.grad` with
respect to it. An engine's hook that scales is never refused: engines put it on all that a model returns, beside a loss that
was made of the logits and has a hook of its own. It scales what is made of them from then on.
"""

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
from streambp.known_names import SCALING_HOOK, TENSOR_HOOKS
from streambp.nested import changed_arguments, tensors_in
from streambp.torchs_own import asked_of, method, rule_name, torch_own


@dataclasses.dataclass(eq=False)
class SharedMemory:
    """What a stand-in, its slices and its views would share; writes: to any of them. [Note: stand-ins and memory]"""

    watched: list[tuple[Tensor, int]] = dataclasses.field(default_factory=list)
    writes: int = 0

    def watch(self, tensor: Tensor) -> None:
        """Remember the version of a tensor [...] that shares this memory; the tensor's values are not kept alive."""
        if type(tensor) is Tensor and not tensor.is_inference():
            counter = torch_own.detach(tensor)  # shares the version counter, and with the next line nothing else
            counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self.watched.append((counter, counter._version))


class Place(torch.autograd.Function):
    """A stand-in's place in the graph, where a gradient ends. [Note: stand-ins in a graph] [Note: lazy rows in a graph]"""

    @staticmethod
    def forward(ctx: Any, kind: type[StandIn], made_of: tuple[Any, ...], *inputs: Tensor) -> StandIn:
        """kind(*made_of), a stand-in [...]; inputs [...] are what its gradient would go through."""
        made = kind(*made_of)
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.made_of, ctx.shape, ctx.passed_by = kind, made_of, list(made.shape), None
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Leaves a gradient of the stand-in's shape [...] to its class, which may give those of the inputs [...]."""
        found = ctx.kind.arrived(ctx, gradient)
        return None, None, *(found or (None,) * (len(ctx.needs_input_grad) - 2))


class Taken(torch.autograd.Function):
    """A stand-in that an autograd.Function returned -> its values. [Note: lazy rows in a graph]"""

    @staticmethod
    def forward(ctx: Any, values: Callable[[], Tensor], stand_in: Tensor) -> Tensor:
        """The real tensor [...] that `values` computes for the stand-in."""
        return values()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
        """The gradient of the values [...] is the stand-in's."""
        return None, upstream


class StandIn(Tensor):
    """A tensor [*tokens, W] without storage. Its class says what a rule is, and how the real one is built.

    memory: shared with its slices and views. written: the real tensor, once it has taken this one's place.
    derived: it shares the memory of another. followed: something with a gradient was made of it.
    classes: the dimension of the W, if it is not the last.
    origin: [*tokens, ...], contiguous if its tokens are so in what it is a part of.
    instead: the setting with which the real tensor exists. metadata: operations that a shape, a dtype and a device answer.
    rules: what happens to it, by the operation's name; a rule takes the operation's arguments.
    """

    instead: ClassVar[str]
    metadata: ClassVar[frozenset[Any]]
    rules: ClassVar[Mapping[str, Callable[..., Any]]]
    has_rule: ClassVar[tuple[str, ...]] = ()  # arguments of torch's losses

    memory: SharedMemory
    written: Tensor | None
    derived: bool
    followed: bool
    classes: int | None = None
    origin: Tensor

    # What a class has to say of its own.
    build: Callable[[], Tensor]  # the real tensor, differentiable if this one is, whatever grad mode it is asked for in
    note: Callable[[str], None]  # this operation needs the real tensor, for `describe`
    follows_rules: Callable[[], bool]  # whether rules may take it
    write: Callable[[Any, str, Any, Any], Any]  # an operation that changes this one in place
    moved: Callable[..., Any]  # the same of other tokens, by a change [*tokens, k] -> [*other tokens, k] for any k
    changed: Callable[..., Any]  # another in memory of its own, in another dtype for example
    casts_to: Callable[[torch.dtype], bool]  # whether it may be in that dtype without being built
    arrived: Callable[..., Any]  # what becomes of a gradient at its `Place`, whose context it gets as well

    def with_classes(self, classes: int | None) -> Any:
        """The same with its W entries in that dimension (None: the last), as a view; NotImplemented if it cannot be."""
        return NotImplemented

    def check(self, operation: str) -> None:
        """Raise StreamBPError if it can no longer be computed as it was, or if what shares its memory was written to."""
        for counter, version in () if self.written is not None else self.memory.watched:
            if counter._version != version:
                raise StreamBPError(
                    "The logits were changed in place through another tensor that shares their memory, and then used again "
                    f"({operation}), while the loss is computed without them. Use {self.instead}."
                )

    def latest(self, operation: str) -> StandIn:
        """What stands for it now."""
        return self

    @classmethod
    def by_rule(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a rule gives; NotImplemented where there is none, or for other stand-ins beside the first argument."""
        rule = cls.rules.get(name)
        if rule is None or not isinstance(args[0] if args else None, cls) or tensors_in((args[1:], kwargs), cls):
            return NotImplemented
        try:
            signature_of(rule).bind(*args, **kwargs)
        except TypeError:  # arguments that the rule does not know
            return NotImplemented
        return rule(*args, **kwargs)

    @classmethod
    @torch.compiler.disable  # compiled code would trace the rules with a stand-in's shape for its value
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, func = dict(kwargs or {}), asked_of(func)
        if func in cls.metadata:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = rule_name(func)
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if isinstance(kwargs.get("out"), cls):
            raise StreamBPError(f"{name} would write to logits that do not exist. Use {cls.instead}.")
        given = args[0] if args else None
        stand_ins: list[StandIn] = []

        def latest(x: StandIn) -> StandIn:
            stand_ins.append(x.latest(name))
            return stand_ins[-1]

        args, kwargs = changed_arguments(args, kwargs, cls, latest)
        for x in stand_ins:
            x.check(name)
        # A gradient of a stand-in that is asked for too late would not be seen.
        asked, second = stand_ins, args[1] if len(args) > 1 else None
        if name == "grad" and getattr(func, "__module__", None) == torch.autograd.__name__:
            wanted = tree_leaves(kwargs.get("inputs", second))
            asked = [x for x in stand_ins if any(leaf is x for leaf in wanted)]
        elif name not in TENSOR_HOOKS or scales(kwargs.get("hook", second)):
            asked = []
        if any(x.followed and x.written is None for x in asked):
            raise StreamBPError(
                f"{name} comes after something was made of these logits or hidden states, a loss or a part of them, whose "
                "gradient it would not see: they are computed where they are used. Call register_hook or retain_grad "
                f"before anything is made of them, or use {cls.instead}."
            )
        in_place = name.endswith("_") and not name.endswith("__")
        if isinstance(given, cls) and (in_place or name in IN_PLACE or kwargs.get("inplace") is True):
            return given.write(func, name, args, kwargs)
        result = NotImplemented
        if kwargs.get("out") is None and all(x.follows_rules() for x in stand_ins):
            result = cls.by_rule(func, name, args, kwargs)
        if result is NotImplemented:
            result = cls.on_real(func, name, args, kwargs)
        note_use(stand_ins, result)
        return result

    @classmethod
    def on_real(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An operation without a rule, on real tensors."""
        built: dict[int, tuple[StandIn, Tensor]] = {}
        # `describe` names torch's losses with the arguments that are the reason.
        given = dict(zip(LOSSES.get(name, ()), args, strict=False)) | (kwargs if name in LOSSES else {})
        reasons = []
        if isinstance(given.get("target"), Tensor) and given["target"].is_floating_point():
            reasons.append("target=...")  # probabilities of all classes
        for parameter in ("weight", "size_average", "reduce", "label_smoothing"):
            value = given.get(parameter)
            is_zero = isinstance(value, float | int) and not isinstance(value, bool) and value == 0
            if parameter not in cls.has_rule and value is not None and not is_zero:
                reasons.append(f"{parameter}=...")
        needed = f"{name}({', '.join(reasons)})" if reasons else name
        for x in tensors_in((args, kwargs), cls):
            if id(x) not in built:
                x.note(needed)
                built[id(x)] = x, x.build()
        args, kwargs = changed_arguments(args, kwargs, cls, lambda x: built[id(x)][1])
        result = func(*args, **kwargs)
        tensors = tensors_in(result, Tensor)
        for x, real in built.values():  # [Note: stand-ins and memory]
            if not tensors:
                x.written = real
            aliases = [tensor for tensor in tensors if torch._C._is_alias_of(tensor, real)]  # type: ignore[attr-defined]
            for tensor in (real, *aliases) if aliases or not tensors else ():
                x.memory.watch(tensor)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


# The parameters of torch's losses that rules know.
LOSSES = {
    "cross_entropy": (
        "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
    ),
    "nll_loss": ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
}  # fmt: skip


METADATA = frozenset(
    {
        *(method(name) for name in ("size", "dim", "numel", "element_size", "is_floating_point", "stride", "__len__",
                                    "nelement", "ndimension", "get_device", "is_complex", "is_inference", "is_contiguous")),
        torch_own.numel, torch_own.is_floating_point, torch_own.is_complex,
        *(getattr(TensorBase, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda",
                                                     "is_cpu", "is_meta", "layout", "is_leaf", "grad_fn", "is_sparse",
                                                     "itemsize", "nbytes")),
    }
)  # fmt: skip


IN_PLACE = frozenset(
    {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod"))}
)


signature_of = functools.cache(inspect.signature)  # of one of a class's rules


def note_use(stand_ins: Sequence[Any], result: Any) -> None:
    """`result` was made of them."""
    made = [result] if isinstance(result, Tensor) else tensors_in(result, Tensor)
    for stand_in in stand_ins:
        stand_in.followed |= any(leaf is not stand_in and leaf.requires_grad for leaf in made)


def scales(hook: Any) -> bool:
    """Whether a tensor's hook is an engine's: it multiplies the gradient by a number, and tells the engine of backward."""
    return SCALING_HOOK in getattr(hook, "__qualname__", "")
