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
    """Return a recorded function whose result is [N, W] in place of [*tokens, W]: the token
    dimensions are merged into one. A recorded function consists of operations on logits that the
    program has called, and that run later, block by block of the N tokens."""
    return map_tokens(node, lambda x: x.reshape(-1, x.shape[-1]))


def drop_padding(node: Node, gradient: Tensor) -> tuple[Node, Tensor]:
    """Remove padding from a recorded function and from the gradient of its result, and return both.
    A recorded function consists of operations on logits that run later. Padding has no hidden
    states in a batch that was computed without padding, so no gradient can be computed there.

    Called for gradients of logits that come from other code, such as a user's autograd.Function.

    Args:
        node: the recorded function of N tokens.
        gradient: gradient [N, W] of the function's result.

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
    """Lazy tensor for a model's logits [*tokens, V], or for the result [*tokens, W] of operations
    on them. The tensor has no storage. Elementwise operations are recorded; sums and losses are
    computed block by block. An operation for which `rules` and `row_rules` have no rule gets the
    complete tensor, which costs memory.

    `LazyLogits.make` creates the tensor.

    Attributes:
        row_rules: rules by operation name, for operations that compute each token alone.
        node: the recorded function: the logits, and the operations on them that were recorded so
            far.
        width: W.
        tokens: [*tokens], the shape without W.
        request: record of the model call, in which `streambp.describe` reads how the logits were
            used.
        write_count: value of the counter of in-place writes (`memory.writes`) when this tensor was
            last up to date. A higher counter means a write through another view.
        successor: the lazy logits with the result of the last in-place operation on this tensor;
            None: there was none, or its result is a complete tensor.
        graph_node: the autograd node that `make` created.
        follows_engine: True if `follow_engine_node` has made backward run the autograd node that
            DDP or ZeRO-3 has inserted after the model's logits.
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
        """Return lazy logits for the result [*tokens, W] of a recorded function. A recorded
        function consists of operations on logits that the program has called, and that run later,
        block by block.

        Args:
            node: the recorded function.
            width: W.
            dtype: dtype of the values.
            graded: True: the result requires a gradient if grad mode is on and hidden states or
                weights require one. False: the result requires no gradient.
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
        """Store a gradient of these logits that other code has computed, for example the backward
        of a user's autograd.Function. The backward of `HeadHandle` later computes the gradients of
        hidden states and weights from it.

        Args:
            ctx: context of the logits' autograd node.
            gradient: gradient of the complete tensor, [*tokens, W]; None: nothing is stored.

        Raises:
            BackwardError: the lazy logits were changed in place or got a hook since their creation,
                so the gradient belongs to other values.
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
        """Mark this tensor as a view of `base`, and return this tensor. Called for the results of
        operations whose results share memory with their input in torch, such as slices. The two
        tensors then share a counter of in-place operations."""
        self.memory = base.memory
        self.write_count = base.write_count
        self.is_view = True
        return self

    def copy_with(
        self, node: Node | None = None, dtype: torch.dtype | None = None, graded: bool = True
    ) -> LazyLogits:
        """Return lazy logits like these, but with another recorded function, dtype or gradient
        flag. The result shares no memory with these logits.

        Args:
            node: the recorded function: operations on logits that run later. None: the function of
                these logits.
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
        """Return a view of these logits with the dimension of size W at another place. torch's
        losses expect the vocabulary second, as in [B, V, T]. Return these logits themselves if the
        dimension is at that place already.

        Args:
            classes: index of the dimension of size W in the view; None: the last.
        """
        if classes == self.classes:
            return self
        return self.make(
            self.node, self.width, self.dtype, self.requires_grad, classes
        ).share_memory_with(self)

    def casts_to(self, dtype: torch.dtype) -> bool:
        """True if a cast to `dtype` gives lazy logits again: `dtype` can represent all values of
        this tensor's dtype, and is not float64. False: the cast runs on the complete tensor.

        False for integers and bools as well. The recorded operations would still run in the
        original dtype, and for bools 1 + 1 is another value than True + True.
        """
        wider = torch.promote_types(dtype, self.dtype) == dtype
        return self.dtype.is_floating_point and wider and dtype != torch.float64

    def current(self) -> LazyLogits:
        """Return the lazy logits that have the values of this tensor after all in-place operations.
        This is the tensor itself if there were none."""
        if self.successor is None:
            return self
        return self.successor.current()

    def latest(self, operation: str) -> LazyLogits:
        """Return the lazy logits that have the values of this tensor after all in-place operations.

        Args:
            operation: name of the operation that will use the logits, for the error's message.

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
        """Record that `operation` needs the complete tensor, which costs memory.
        `streambp.describe` reports the name of the first such operation."""
        self.request.outcome.built_for = self.request.outcome.built_for or operation

    @classmethod
    def run_on_complete(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation that has no rule, with complete tensors in place of lazy arguments.
        Return the operation's result.

        `register_hook` and `retain_grad` thus act on the complete tensor. A gradient that arrives
        at the lazy tensor later would not pass that tensor, so it raises an error.

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
        """True if operations on this tensor may be computed by rules, block by block. False once a
        complete tensor, or the result of a user's autograd.Function, has replaced this tensor:
        operations then run on the complete tensor."""
        return self.materialized_tensor is None and self.has_own_node()

    def check(self, operation: str) -> None:
        """Raise `StreamBPError` if the logits were changed in place through another view. Otherwise
        call `follow_engine_node`. Every operation on the logits calls this method first.

        Args:
            operation: name of the operation, for the error's message.
        """
        super().check(operation)
        if self.write_count != self.memory.writes:
            raise StreamBPError(
                "Logits were changed in place through a view, and then another view of the logits "
                f"was used ({operation}). The logits are computed at each use, so the second view "
                f"would miss the change. Use {self.config_hint}."
            )
        self.follow_engine_node()

    def follow_engine_node(self) -> None:
        """Make backward run the autograd node that an engine (DDP, ZeRO-3) has inserted after a
        model's logits. The node tells ZeRO-3 that the model's backward begins; DDP's late
        reductions wait for it. The node would not run otherwise, because no gradient of the logits
        exists.

        All results that are computed from these logits from now on run the node.
        """
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
        """Register DeepSpeed's tensor hook that scales gradients. The hook then scales the
        gradients of all results that are computed from these logits from now on, because the logits
        themselves get no gradient.

        Args:
            hook: takes a gradient, of this shape or a single number [1], and returns the scaled
                gradient or None. `is_scaling_hook` recognizes DeepSpeed's hook by its name.

        Returns:
            The hook's handle; NotImplemented for hooks of other code, which need the complete
                tensor.
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
        """True if this tensor's `grad_fn` is still the autograd node from `make`, or a node that
        DDP or ZeRO-3 has inserted behind it. False if a user's autograd.Function has returned this
        tensor and so replaced the node. Operations on the tensor may be computed block by block
        only if this is True."""
        grad_fn = self.grad_fn
        return grad_fn is self.graph_node or type(grad_fn).__name__ in (PRE_BACKWARD, DDP_SINK)

    def compute(
        self, calculation: StatisticsCalculation | FunctionCalculation
    ) -> tuple[Tensor, ...]:
        """Run a calculation from these logits, and return its results for N tokens, [N, ...] each.

        The results are differentiable in grad mode if these logits require a gradient.

        Args:
            calculation: computes softmax statistics or a recorded function, block by block.
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
        """Compute the complete tensor [*tokens, W] and return it. The result is differentiable in
        grad mode, up to hidden states and weights."""
        (values,) = self.compute(FunctionCalculation(flatten_node(self.node)))
        real = values.to(self.dtype).view(*self.tokens, self.width)
        return real if self.classes is None else real.movedim(-1, self.classes)

    def build(self) -> Tensor:
        """Return the complete tensor [*tokens, W]: a real tensor with all values. The result is
        differentiable, in any grad mode, if these lazy logits require a gradient."""
        if self.materialized_tensor is not None:
            return self.materialized_tensor
        with torch.set_grad_enabled(self.requires_grad):
            if self.has_own_node() or not self.requires_grad:
                return self.values()
            complete: Tensor = MaterializeLazy.apply(self.values, self)
            return complete

    def become(self, result: LazyLogits | Tensor) -> None:
        """Replace this tensor's values by new ones after an in-place operation.

        Args:
            result: lazy logits or a complete tensor [*tokens, W] with the new values. All later
                operations on this tensor use `result`.
        """
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
        """Compute an operation on lazy logits by a rule. A rule is a function that computes the
        result block by block, or records the operation, without building a tensor with all values.
        Return NotImplemented if neither `row_rules` nor `rules` has a rule for the operation.

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
        """Run an operation that changes these logits in place, such as `div_`. Return these logits,
        or the operation's result if it is another object.

        If the operation has a rule, it is recorded, and the logits stay lazy. Otherwise a complete
        tensor is changed, and replaces these logits in all later operations. This also holds under
        no_grad for logits that require a gradient: torch would keep their autograd node, which no
        rule can do.

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
        """Run an operator of torch's dispatcher with complete tensors in place of lazy logits. Only
        C++ code calls operators here; calls from Python arrive at `__torch_function__`. The
        complete tensors have no graph, because autograd has recorded the operator already.

        Raises:
            StreamBPError: the operator writes to one of its arguments.
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
