"""Stand-in for rows of logits, or for row-wise functions of logits, outside of the model's forward.

Operations with a rule read the hub's hidden states, and never the stand-in. Other code (an
autograd.Function, a kernel) takes the stand-in as an input, and sends the gradient of all values to
the node of that input. `GradientSink` leaves that gradient with the hub. A stand-in that an
autograd.Function returned is different: the Function's backward is unknown, so the values are
computed and their gradient goes through `MaterializeLazy`. Nodes that an engine inserts at a
model's outputs, and scaling hooks, change no values. Such nodes and hooks are recognized by name.

A stand-in that is written to becomes another function of rows (`div_`), or real. Stand-ins that
share its memory would have to change as well; using such a stand-in raises. Using the graph node
from before the write raises too, because the node means the old values. A write through a real
alias (of `numpy()`, `data_ptr()`) is found by the version counter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import TensorBase

from streambp.errors import BackwardError, StreamBPError
from streambp.foreign import tensor_method
from streambp.head.recipe import HeadRequest
from streambp.known_names import DDP_SINK, PRE_BACKWARD, RUNS_BEFORE_BACKWARD, TENSOR_HOOKS
from streambp.lazy.base import (
    METADATA_OPERATIONS,
    GradientSink,
    LazyTensor,
    MaterializeLazy,
    SharedWriteCount,
    is_scaling_hook,
)
from streambp.lazy.expression import LogitsReading, Node, inputs_of, map_tokens, readings, rebuild
from streambp.lazy.head import FunctionCalculation, LazyResult, RunInBackward, StatisticsCalculation
from streambp.tensors import change_arguments, tensors_in

ROW_METADATA_OPERATIONS = METADATA_OPERATIONS | {
    getattr(TensorBase, name).__get__ for name in ("is_nested", "is_quantized", "is_mps", "is_xla")
}


# Rules that also support rows with their entries in another dimension than the last.
ANY_SHAPE_RULES = (
    "transpose", "permute", "swapaxes", "swapdims", "contiguous", "clone", "detach", "to", "float", "double",
    "register_hook",
)  # fmt: skip


def flatten_node(node: Node) -> Node:
    """Return a recorded function of logits with its N tokens in one dimension. The result [*tokens,
    W] becomes [N, W], which a `FunctionCalculation` computes block by block."""
    return map_tokens(node, lambda x: x.reshape(-1, x.shape[-1]))


def drop_padding(node: Node, gradient: Tensor) -> tuple[Node, Tensor]:
    """Return a recorded function of logits and the gradient [N, W] of its result, both without the
    tokens that are padding. The hidden states of padding were not computed, so the gradient must be
    zero there. Called for gradients that arrive from other code, such as a user's
    autograd.Function.

    Raises:
        BackwardError: the gradient at padding is not zero.
    """
    late_readings = [
        candidate for candidate in readings(node) if candidate.head.recipe.late_padding is not None
    ]
    masks = [
        reading.head.recipe.late_padding.tokens(reading.positions) for reading in late_readings
    ]
    if not masks or gradient.is_meta or bool(torch.stack(masks).all()):
        return node, gradient
    is_token = torch.stack(masks).all(0)  # [N]
    if bool((gradient[~is_token] != 0).any()):
        raise BackwardError(
            "A gradient for logits at padding came from an autograd.Function or a kernel, in a "
            "batch that was computed without padding. Leave padding out of that loss, or set "
            "StreamConfig(rows='as_given')."
        )
    return map_tokens(node, lambda x: x[is_token]), gradient[is_token]


class LazyLogits(LazyTensor):
    """Logits [*tokens, W] of a model as a lazy tensor, or a recorded function of logits, which is
    computed on use. Results are computed block by block. Uses without a rule build the complete
    tensor.

    `LazyLogits.make` creates the tensor.

    Attributes:
        row_rules: dict from an operation's name to its rule, for operations on each token alone.
        node: the recorded function.
        width: W.
        tokens: [*tokens], the shape without W.
        request: record of the model call, in which `streambp.describe` reads how the logits were
            used.
        write_count: number of writes to this tensor's memory that its values already include.
        successor: the lazy logits that replaced this tensor in an in-place operation; None: none
            did.
        graph_node: the autograd node that `make` created.
        follows_engine: True if `follow_engine_node` has made backward run an engine's autograd node.
    """

    config_hint = "StreamConfig(lazy_logits=False)"
    metadata = ROW_METADATA_OPERATIONS
    has_rule = ("label_smoothing",)
    row_rules: ClassVar[Mapping[str, Callable[..., Any]]]

    node: Node
    width: int
    tokens: torch.Size
    request: HeadRequest
    write_count: int
    successor: LazyLogits | None
    graph_node: Any
    follows_engine: bool

    @staticmethod
    def __new__(
        cls, node: Node, width: int, dtype: torch.dtype, classes: int | None = None
    ) -> LazyLogits:
        reading = readings(node)[0]
        shape = list(reading.positions.shape)
        shape.insert(len(shape) if classes is None else classes, width)
        self: LazyLogits = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=reading.head.hidden.device, requires_grad=False
        )  # type: ignore[attr-defined]
        self.node = node
        self.width = width
        self.classes = classes
        self.origin = reading.positions
        self.tokens = reading.positions.shape
        self.request = reading.head.recipe.request
        self.memory = SharedWriteCount()
        self.write_count = 0
        self.graph_node = None
        self.materialized_tensor = None
        self.is_view = False
        self.successor = None
        self.follows_engine = False
        self.has_dependents = False
        return self

    @classmethod
    def make(
        cls, node: Node, width: int, dtype: torch.dtype, graded: bool, classes: int | None = None
    ) -> LazyLogits:
        """Return lazy logits with the values [*tokens, W] of a recorded function.

        Args:
            node: the recorded function.
            width: W.
            dtype: dtype of the values.
            graded: True if the result requires a gradient whenever grad mode is on and an input
                requires one.
            classes: the dimension of size W; None: the last.
        """
        if not graded:
            return cls(node, width, dtype, classes)
        logits: LazyLogits = GradientSink.apply(
            cls, (node, width, dtype, classes), *inputs_of(node)
        )
        logits.graph_node = logits.grad_fn
        return logits

    @classmethod
    def receive_gradient(cls, ctx: Any, gradient: Tensor | None) -> None:
        """Store a gradient of the complete tensor, [*tokens, W], until the gradients of the weights
        are computed.

        Args:
            ctx: context of the autograd node.
            gradient: the gradient, from a user's autograd.Function for example.

        Raises:
            BackwardError: the lazy logits were written to or got a hook since their creation, so
                that the gradient belongs to other values.
        """
        if gradient is None:
            return
        if ctx.passed_by:
            raise BackwardError(
                "A gradient for the logits came from an autograd.Function or a kernel that read "
                f"the model's own logits. But {ctx.passed_by} the logits, so the gradient belongs "
                "to other values. Use StreamConfig(lazy_logits=False)."
            )
        node, width, _, classes = ctx.made_of
        of_rows = gradient
        if classes is not None:
            of_rows = gradient.movedim(classes, -1)
        node, of_rows = drop_padding(flatten_node(node), of_rows.reshape(-1, width))
        FunctionCalculation(node).store_gradients([of_rows])

    def share_memory_with(self, base: LazyLogits) -> LazyLogits:
        """Mark this tensor, made by an operation whose result shares memory in torch, as a view of
        `base`, and return it."""
        self.memory = base.memory
        self.write_count = base.write_count
        self.is_view = True
        return self

    def copy_with(
        self, node: Node | None = None, dtype: torch.dtype | None = None, graded: bool = True
    ) -> LazyLogits:
        """Return lazy logits that share no memory with these, with another recorded function, dtype
        or gradient flag.

        Args:
            node: the recorded function; None: that of these logits.
            dtype: dtype of the values; None: that of these logits.
            graded: True: the result requires a gradient if these logits do; False: the result
                requires no gradient.
        """
        graded = graded and self.requires_grad
        return self.make(node or self.node, self.width, dtype or self.dtype, graded, self.classes)

    def with_tokens(
        self, change: Callable[[Tensor], Tensor], unique: bool = True, view: bool = True
    ) -> LazyLogits:
        """Return the lazy result of an operation on the tokens, such as an index or a reshape:
        [*tokens, W] -> [*other tokens, W].

        Args:
            change: function [*tokens, k] -> [*other tokens, k], for any k, such as an index.
            unique: True if `change` repeats no token.
            view: True if the result shares this tensor's memory.
        """
        result = self.copy_with(map_tokens(self.node, change, unique))
        if view:
            return result.share_memory_with(self)
        return result

    def with_classes(self, classes: int | None) -> LazyLogits:
        """Return a view whose W entries are in dimension `classes` (None: the last), for losses
        that expect [B, V, T].

        Returns the tensor itself if the entries are in that dimension already.
        """
        if classes == self.classes:
            return self
        return self.make(
            self.node, self.width, self.dtype, self.requires_grad, classes
        ).share_memory_with(self)

    def casts_to(self, dtype: torch.dtype) -> bool:
        """True if a cast to `dtype` can stay lazy: `dtype` has all values of this tensor's dtype,
        and is not float64.

        False for integers and bools. A lazy cast does not change the operations that are computed
        later, and 1 + 1 differs from True + True.
        """
        wider = torch.promote_types(dtype, self.dtype) == dtype
        return self.dtype.is_floating_point and wider and dtype != torch.float64

    def current(self) -> LazyLogits:
        """Return the lazy logits with the current values: this tensor, or the result of the last
        in-place operation on it."""
        if self.successor is None:
            return self
        return self.successor.current()

    def latest(self, operation: str) -> LazyLogits:
        """Return the lazy logits with the current values, like `current`.

        Args:
            operation: name of the operation that uses them, for the error.

        Raises:
            StreamBPError: a user's autograd.Function has changed the logits in place.
        """
        by_others = (
            self.successor is not None or self.materialized_tensor is not None
        ) and not self.has_own_node()
        if by_others and operation != "__set__":  # an engine sets an attribute
            function = type(self.grad_fn).__name__.removesuffix("Backward")
            raise StreamBPError(
                f"Logits were changed in place by {function}, an autograd.Function that marks them "
                f"dirty, and then used ({operation}): its gradient would not be asked for. Return "
                "a new tensor there, or use StreamConfig(lazy_logits=False)."
            )
        return self.current()

    def note(self, operation: str) -> None:
        """Record, for the report of `streambp.describe`, that `operation` needs the complete
        tensor. Only the first such operation is recorded."""
        self.request.outcome.built_for = self.request.outcome.built_for or operation

    @classmethod
    def run_on_complete(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation that has no rule, with complete tensors in place of lazy arguments.
        Return the operation's result.

        If the operation is `register_hook` or `retain_grad`, the hook is on the complete tensor. A
        later gradient at the lazy tensor's own autograd node would bypass the hook, and raises.

        Args:
            func: torch's function.
            name: the function's name.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        result = super().run_on_complete(func, name, args, kwargs)
        for x in tensors_in((args, kwargs), cls) if name in TENSOR_HOOKS else ():
            if x.graph_node is not None:
                x.graph_node.passed_by = f"a hook ({name}) was put on"
        return result

    def follows_rules(self) -> bool:
        """True if operations on this tensor may be computed by rules, which need no complete
        tensor. False once a complete tensor, or the result of a user's autograd.Function, has
        replaced this tensor."""
        return self.materialized_tensor is None and self.has_own_node()

    def check(self, operation: str) -> None:
        """Raise `StreamBPError` if the logits were changed in place through another view. Otherwise
        make backward run the autograd node that DDP or ZeRO-3 may have inserted after the logits
        (`follow_engine_node`). `operation` is the name of the operation that uses the logits, for
        the error."""
        super().check(operation)
        if self.write_count != self.memory.writes:
            raise StreamBPError(
                "Logits were changed in place through a view, and then another view of the logits "
                f"was used ({operation}). The logits are computed at each use, so the second view "
                f"would miss the change. Use {self.config_hint}."
            )
        self.follow_engine_node()

    def follow_engine_node(self) -> None:
        """Make backward run the autograd node that an engine (DDP, ZeRO-3) has inserted after these
        logits, although no gradient of the logits reaches that node. The node tells ZeRO-3 that
        the model's backward begins, and DDP's late reductions wait for the node. All results that
        are computed from now on run the node."""
        node_name = type(self.grad_fn).__name__
        if self.follows_engine or not torch.is_grad_enabled():
            return
        anchor: Tensor | None = None
        if node_name == DDP_SINK:
            anchor = RunInBackward.apply(None, self)
        if node_name == PRE_BACKWARD and not self.request.beside_loss:
            # ZeRO-3's node signals the start of the model's backward. The anchor replaces a
            # gradient [*tokens, V], without which the node would not run.
            node: Any = self.grad_fn
            begin = lambda: getattr(node, RUNS_BEFORE_BACKWARD)(node.module)  # noqa: E731
            anchor = RunInBackward.apply(begin, torch.zeros(1, requires_grad=True))
        if anchor is not None:
            self.node = rebuild(
                self.node,
                lambda leaf: (
                    dataclasses.replace(leaf, anchor=anchor)
                    if isinstance(leaf, LogitsReading)
                    else leaf
                ),
            )
            self.follows_engine = True

    def hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register DeepSpeed's tensor hook that scales gradients, for the gradients of all results
        computed from now on.

        Args:
            hook: takes a gradient, of this shape or a single number [1], and returns the scaled
                gradient or None. `is_scaling_hook` recognizes DeepSpeed's hook by its name.

        Returns:
            The hook's handle; NotImplemented for hooks of other code.
        """
        if not is_scaling_hook(hook):
            return NotImplemented

        def scaled(leaf: Node) -> Node:
            if not isinstance(leaf, LogitsReading):
                return leaf
            handle = RunInBackward.apply(
                functools.partial(leaf.head.scale_stored_gradients, hook), leaf.handle
            )
            return dataclasses.replace(leaf, handle=handle, hooks=(*leaf.hooks, hook))

        self.node = rebuild(self.node, scaled)
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.register_hook(self, hook)  # serves a Function with this input

    def has_own_node(self) -> bool:
        """True if this tensor's `grad_fn` is the autograd node from `make`, or an engine's node
        inserted behind it. Another node is that of a user's autograd.Function, so rules no longer
        apply."""
        grad_fn = self.grad_fn
        return grad_fn is self.graph_node or type(grad_fn).__name__ in (PRE_BACKWARD, DDP_SINK)

    def compute(
        self, calculation: StatisticsCalculation | FunctionCalculation
    ) -> tuple[Tensor, ...]:
        """Return the results of a calculation from these logits, [N, ...] each for N tokens.

        The results are differentiable in grad mode if these logits require a gradient.
        """
        graded = self.requires_grad and torch.is_grad_enabled()
        graded = graded and not torch.is_inference_mode_enabled()
        graded = graded and any(tensor.requires_grad for tensor in inputs_of(self.node))
        with torch.set_grad_enabled(graded):
            calculation = calculation.with_padding()
            if not graded:
                return calculation.run()
            values: tuple[Tensor, ...] = LazyResult.apply(calculation, *calculation.inputs())
            return values

    def values(self) -> Tensor:
        """Return the complete tensor [*tokens, W], in grad mode differentiable up to hidden states
        and weights."""
        (values,) = self.compute(FunctionCalculation(flatten_node(self.node)))
        real = values.to(self.dtype).view(*self.tokens, self.width)
        return real if self.classes is None else real.movedim(-1, self.classes)

    def build(self) -> Tensor:
        """Return the complete tensor [*tokens, W], differentiable if the lazy logits are, in any
        grad mode."""
        if self.materialized_tensor is not None:
            return self.materialized_tensor
        with torch.set_grad_enabled(self.requires_grad):
            if self.has_own_node() or not self.requires_grad:
                return self.values()
            complete: Tensor = MaterializeLazy.apply(self.values, self)
            return complete

    def become(self, result: LazyLogits | Tensor) -> None:
        """Record the result of an in-place operation: this tensor has the values of `result`
        [*tokens, W] from now on."""
        self.memory.writes += 1
        if self.graph_node is not None:
            self.graph_node.passed_by = "something was written to"
        if isinstance(result, LazyLogits):
            self.successor = result
            result.memory = self.memory
            result.is_view = self.is_view
            result.write_count = self.memory.writes
        else:
            self.materialized_tensor = result
            self.memory.track_alias(result)
        self.write_count = self.memory.writes

    @classmethod
    def apply_rule(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation by its rule, a function that needs no complete tensor, and return the
        operation's result. Return NotImplemented if the operation has no rule in `row_rules` or
        `rules`.

        Args:
            func: torch's function.
            name: the function's name, the key of its rule.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        if name in cls.row_rules:
            result = cls.row_rules[name](name, func, args, kwargs)
            if result is not NotImplemented:
                return result
        if (
            isinstance(args[0] if args else None, LazyLogits)
            and args[0].classes is not None
            and name not in ANY_SHAPE_RULES
        ):
            return NotImplemented
        return super().apply_rule(func, name, args, kwargs)

    def write(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation that changes these logits in place, and return these logits or the
        operation's result. The logits become another recorded function, or the complete tensor.

        Under no_grad, torch keeps the autograd node of a tensor that an operation writes to. No
        rule can do the same, so the complete tensor is written to.

        Args:
            func: torch's function.
            name: the function's name, such as "add_".
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Raises:
            StreamBPError: the operation changes the shape.
        """
        current = self.current()
        if name == "detach_":
            current.become(current.build().detach())
            return self
        # add_ -> add, __iadd__ -> __add__
        plain = f"__{name[3:-2]}__" if name.startswith("__i") else name[:-1]
        rows = tensors_in((args, kwargs), LazyLogits)
        follow = all(x.follows_rules() for x in rows)
        if follow and (torch.is_grad_enabled() or not current.requires_grad):
            out_of_place = tensor_method(plain)
            replacement = NotImplemented
            if out_of_place is not None and plain in self.row_rules:
                replacement = self.apply_rule(out_of_place, plain, args, kwargs)
            has_same_form = isinstance(replacement, LazyLogits) and (
                replacement.shape,
                replacement.dtype,
            ) == (
                current.shape,
                current.dtype,
            )
            if has_same_form and replacement.requires_grad == current.requires_grad:
                current.become(replacement)
                return self
        current.note(name)
        real = {id(leaf): leaf.build() for leaf in rows}
        if not current.requires_grad:
            # torch forbids writes to a view of a tensor that was made under no_grad.
            real[id(current)] = real[id(current)].detach()
        current.become(real[id(current)])
        args, kwargs = change_arguments(args, kwargs, LazyLogits, lambda leaf: real[id(leaf)])
        result = func(*args, **kwargs)
        if real[id(current)].shape != self.shape:
            raise StreamBPError(
                f"{name} changes the shape of logits in place, but these logits have no memory of "
                f"their own yet. Use {plain} or StreamConfig(lazy_logits=False)."
            )
        current.memory.track_alias(real[id(current)])
        if result is real[id(current)]:
            return self
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator of torch's dispatcher on complete tensors. Such calls come from C++ code,
        which bypasses the rules. An operator that writes to its arguments raises `StreamBPError`.

        Autograd has already recorded the operator, so the complete tensors have no graph.
        """
        if func._schema.is_mutable:
            raise StreamBPError(
                f"{func} would write to logits that do not exist. Use "
                "StreamConfig(lazy_logits=False)."
            )

        def real(x: LazyLogits) -> Tensor:
            x = x.latest(str(func))
            x.note(str(func))
            with torch.no_grad():
                if x.materialized_tensor is None:
                    return x.values()
                return x.materialized_tensor.detach()

        args, kwargs = change_arguments(args, kwargs or {}, LazyLogits, real)
        return func(*args, **kwargs)
