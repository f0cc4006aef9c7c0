"""Deferred hidden states and logits: stand-ins in a model's own forward.

A model's own forward ends with: final norm, slice, `lm_head`, perhaps a scale or a softcap, the
loss function. While a streamed model computes a loss, its final norm returns a `LazyHidden`
instead: a tensor without storage that stores the norm's input. Slicing a `LazyHidden` slices that
input; `F.linear` returns deferred logits. Multiplication, division and tanh are recorded, and
`F.cross_entropy` computes the loss block by block. Each model family's own code for the head
therefore runs unchanged. An in-place operation writes to the real tensor, which then replaces the
deferred tensor. An in-place operation on a slice or a view raises.

Operations with a rule put the stored hidden states into autograd's graph, and never the stand-in.
Other code (an autograd.Function, a C++ extension) makes the stand-in itself an input. The gradient
would end there: the loss would be right, and no layer below would train. Therefore every stand-in
is an output of `GradientSink`, so each path to a parameter leads through this Function. The
Function read a real tensor that was built from the stored hidden states. The backward of
`GradientSink` builds that tensor again and differentiates it. A stand-in that was made under
no_grad has no gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streambp.device import has_data
from streambp.errors import BackwardError, StreamBPError
from streambp.head.blocks import Projection
from streambp.head.recipe import LogitsExpression, blockwise_loss
from streambp.known_names import TENSOR_HOOKS
from streambp.lazy.base import (
    METADATA_OPERATIONS,
    GradientSink,
    LazyTensor,
    MaterializeLazy,
    SharedWriteCount,
    note_use,
)
from streambp.lazy.row_rules import is_number
from streambp.lazy.token_rules import TOKEN_RULES
from streambp.tensors import tensors_in


class LazyHidden(LazyTensor):
    """Lazy tensor that replaces hidden states [..., h] or logits [..., V] inside of a model's own
    forward. The tensor has no storage; its values are computed on use, by applying `recipe` to
    `source`.

    `LazyHidden.make` creates the tensor.

    Attributes:
        source: [..., h], the input of the final norm.
        recipe: the operations from `source` to this tensor (final norm, output projection).
        made_without_grad: True if this tensor was made under no_grad from inputs that require a
            gradient. Operations in grad mode then use the complete tensor.
        made_of: the tensors from which this tensor is computed, each with its version counter.
        graph_node: the autograd node that `make` created.
    """

    config_hint = "StreamConfig(head=False) for this model"
    metadata = METADATA_OPERATIONS

    source: Tensor
    recipe: LogitsExpression
    made_without_grad: bool
    made_of: list[tuple[Tensor, int]]
    graph_node: Any

    @staticmethod
    def __new__(
        cls, source: Tensor, recipe: LogitsExpression, dtype: torch.dtype | None = None
    ) -> LazyHidden:
        width = source.shape[-1]
        if recipe.weight is not None:
            width = recipe.weight.shape[0]
        tokens = source.shape[:-1]
        if recipe.token_positions is not None:
            tokens = recipe.token_positions.shape
        shape = (*tokens, width)
        self: LazyHidden = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype or source.dtype, device=source.device, requires_grad=False
        )  # type: ignore[attr-defined]
        self.source = source
        self.recipe = recipe
        self.memory = SharedWriteCount()
        self.origin = source
        if recipe.token_positions is not None:
            self.origin = recipe.token_positions
        self.materialized_tensor = None
        self.is_view = False
        self.made_without_grad = False
        self.has_dependents = False
        self.graph_node = None
        self.made_of = [(x, x._version) for x in (source, *recipe.inputs()) if not x.is_inference()]
        return self

    @classmethod
    def make(
        cls, source: Tensor, recipe: LogitsExpression, dtype: torch.dtype | None = None
    ) -> LazyHidden:
        """Return the lazy result of applying `recipe` to source [..., h]. The result requires a
        gradient if the complete tensor would.

        Args:
            source: the input of the final norm.
            recipe: the operations from `source` to the result.
            dtype: dtype of the result; None: the dtype of `source`.
        """
        inputs = (source, *recipe.inputs())
        result: LazyHidden = GradientSink.apply(cls, (source, recipe, dtype), *inputs)
        result.made_without_grad = not torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in inputs
        )
        node: Any = result.grad_fn
        result.graph_node = node
        if node is not None:
            node.snapshot = recipe.snapshot(source)
        return result

    @classmethod
    def receive_gradient(cls, ctx: Any, gradient: Tensor | None) -> list[Tensor | None] | None:
        """Return the gradients of the tensors from which this lazy tensor is computed: `source`,
        and then the tensors of the recipe. None for a tensor that requires no gradient. Return None
        alone if `gradient` is None. Called in backward if other code, such as a user's
        autograd.Function, took the lazy tensor as input.

        Args:
            ctx: context of the lazy tensor's autograd node.
            gradient: gradient of the complete tensor, [..., h] or [..., V].

        Raises:
            BackwardError: the lazy tensor, or a tensor from which it is computed, was changed in
                place or moved since its creation.
        """
        if gradient is None:
            return None
        source, recipe, _ = ctx.made_of
        if ctx.passed_by or recipe.snapshot(source).versions != ctx.snapshot.versions:
            content = "logits" if recipe.logits else "hidden states"
            why = ctx.passed_by or "what they are computed from was changed since"
            raise BackwardError(
                f"A gradient arrived at {content} {ctx.shape}, which streambp does not compute, "
                f"from an autograd.Function or a kernel that took them. But {why}, so the gradient "
                "would be another model's. Use StreamConfig(head=False), which computes them, or "
                "leave the fused loss out: streamed models compute their loss without logits."
            )
        return recipe.gradients(source, gradient, ctx.snapshot.autocast)

    def build(self) -> Tensor:
        """Return the complete tensor [..., h] or [..., V]: a real tensor with all values. The
        result is differentiable, in any grad mode, if the lazy tensor requires a gradient."""
        if self.materialized_tensor is not None:
            return self.materialized_tensor
        with torch.set_grad_enabled(self.requires_grad):
            if self.has_own_node() or not self.requires_grad:
                return self.values()
            complete: Tensor = MaterializeLazy.apply(self.values, self)
            return complete

    def values(self) -> Tensor:
        """Compute the complete tensor [..., h] or [..., V] from `source`, and return it in this
        tensor's dtype. The result is differentiable in grad mode only. `build` also covers the
        other cases."""
        real = self.recipe.build(self.source)
        if real.dtype != self.dtype:
            real = real.to(self.dtype)
        return real

    def has_own_node(self) -> bool:
        """True if this tensor's `grad_fn` is still the autograd node from `make`. False if a user's
        autograd.Function has returned this tensor, because the Function's node, with a backward of
        its own, has replaced it. Operations on the tensor may be computed block by block only if
        this is True."""
        return self.grad_fn is self.graph_node

    def copy_with(
        self, recipe: LogitsExpression | None = None, dtype: torch.dtype | None = None
    ) -> LazyHidden:
        """Return a lazy tensor that is computed from the same `source`, by another recipe or in
        another dtype. The result shares no memory with this tensor.

        Args:
            recipe: the operations from `source` to the result; None: this tensor's.
            dtype: dtype of the result; None: this tensor's.
        """
        return LazyHidden.make(self.source, recipe or self.recipe, dtype or self.dtype)

    def with_tokens(
        self, change: Callable[[Tensor], Tensor], unique: bool = True, view: bool = True
    ) -> LazyHidden:
        """Return the lazy result of an operation on the token dimensions, such as an index or a
        reshape.

        The operation is applied to the hidden states `source`. If the recipe has `token_positions`,
        the index of each token's hidden state in `source`, the operation is applied to this index
        instead.

        Args:
            change: the operation: a function [*tokens, k] -> [*other tokens, k], for any k.
            unique: True if `change` repeats no token; not used by this class.
            view: True if the result shares this tensor's memory, as a slice or reshape does.
        """
        source = self.source
        recipe = self.recipe
        if recipe.token_positions is None:
            source = change(source)
        else:
            recipe = dataclasses.replace(
                recipe, token_positions=change(recipe.token_positions[..., None])[..., 0]
            )
        result = LazyHidden.make(source, recipe, self.dtype)
        if view:
            result.is_view = True
            result.memory = self.memory
        return result

    def casts_to(self, dtype: torch.dtype) -> bool:
        """True if a cast to `dtype` gives a lazy tensor again: `dtype` is no narrower than the
        dtype of `source`. The cast then changes no values that losses use, because losses compute
        in float32 or wider. False: the cast runs on the complete tensor."""
        return torch.promote_types(dtype, self.source.dtype) == dtype

    def check(self, operation: str) -> None:
        """Raise `StreamBPError` if this tensor's values can no longer be computed. Either a tensor
        from which they are computed was changed in place, for example by optimizer.step(), or the
        values' own memory was. Every operation on the tensor calls this method first.

        Args:
            operation: name of the operation, for the error's message.
        """
        super().check(operation)
        for tensor, version in () if self.materialized_tensor is not None else self.made_of:
            if tensor._version != version:
                raise StreamBPError(
                    f"{operation} asks for logits or for the final norm's output after the weights "
                    f"or hidden states {list(tensor.shape)} that they are computed from changed, "
                    "as in optimizer.step(). Keep a copy (.clone()) of them before that, or use "
                    f"{self.config_hint}."
                )

    def follows_rules(self) -> bool:
        """True if operations on this tensor may be computed by the rules in `rules`, block by
        block. False: operations run on the complete tensor.

        False once a complete tensor, or the result of a user's autograd.Function, has replaced this
        tensor. Also False in grad mode for a tensor with `made_without_grad`.
        """
        return (
            self.materialized_tensor is None
            and self.has_own_node()
            and not (self.made_without_grad and torch.is_grad_enabled())
        )

    def write(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation that changes the tensor in place, and return the operation's result. The
        complete tensor is computed and changed, and then replaces the lazy tensor in all later
        operations.

        Args:
            func: torch's function.
            name: the function's name, such as "add_".
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Raises:
            StreamBPError: the lazy tensor is a slice or a view of another.
        """
        if self.is_view and name != "requires_grad_":
            raise StreamBPError(
                f"The model changes a part of its logits in place ({name}) while its loss is "
                "computed without them. Use StreamConfig(head=False) for this model."
            )
        if name != "requires_grad_":
            self.invalidate_node(f"{name} was called on them")
            self.materialized_tensor = self.build()
            self.memory.track_alias(self.materialized_tensor)
        result = self.run_on_complete(func, name, args, kwargs)
        note_use(tensors_in((args, kwargs), LazyHidden), result)
        return result

    def invalidate_node(self, why: str) -> None:
        """Mark this tensor's autograd node as invalid: a later gradient at the node would be wrong,
        because the tensor was changed or got a hook. `receive_gradient` then raises.

        Args:
            why: the reason, part of a sentence in the error's message.
        """
        if self.graph_node is not None:
            self.graph_node.passed_by = why

    @classmethod
    def run_on_complete(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation that has no rule in `rules`, with complete tensors in place of lazy
        arguments. Return the operation's result.

        `register_hook` and `retain_grad` thus act on the complete tensor. A gradient that arrives
        at the lazy tensor later would not pass that tensor, so it raises an error.

        Args:
            func: torch's function.
            name: the function's name.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        result = super().run_on_complete(func, name, args, kwargs)
        if name in TENSOR_HOOKS:
            for x in tensors_in((args, kwargs), cls):
                x.invalidate_node(f"{name} was called on them")
        return result

    def note(self, operation: str) -> None:
        """Record that `operation` needs the complete tensor, which costs memory.
        `streambp.describe` reports the operation's name."""
        request = self.recipe.request
        if self.recipe.logits or request.projecting:
            request.outcome.built_for = operation
        else:
            request.outcome.hidden_built_for = operation

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise StreamBPError(
            f"{func} got logits that do not exist, in a place where streambp cannot compute them. "
            "Use StreamConfig(head=False) for this model."
        )


def _scale_rule(x: LazyHidden, other: Any, *, over: bool = False) -> Any:
    """Return a lazy tensor multiplied by the number `other`, or divided by it if `over` is True.
    Called for `x * other` and `x / other` in a model's forward, for example by models with scaled
    logits. Return NotImplemented if `other` is zero or not a finite number; the operation then runs
    on the complete tensor.

    The argument is named like torch's, because programs may pass it by keyword.
    """
    if not is_number(other):
        return NotImplemented
    projection = x.recipe.projection
    factor = 1.0 / other if over else float(other)
    scaled = {"logit_scale": projection.logit_scale * factor}
    if projection.softcap is not None:
        softcap = projection.softcap * factor
        scaled = {"logit_scale": projection.slope * softcap, "softcap": softcap}
    return x.copy_with(
        dataclasses.replace(x.recipe, projection=dataclasses.replace(projection, **scaled))
    )


def _tanh_rule(x: LazyHidden) -> Any:
    projection = x.recipe.projection
    if x.recipe.weight is None or projection.softcap is not None:
        return NotImplemented
    projection = dataclasses.replace(projection, softcap=1.0, slope=projection.logit_scale)
    return x.copy_with(dataclasses.replace(x.recipe, projection=projection))


def _linear_rule(x: LazyHidden, weight: Any, bias: Any = None) -> Any:
    if x.recipe.weight is not None or (x.recipe.projection.logit_scale != 1.0 and bias is not None):
        return NotImplemented
    # A scale of the hidden states is one of the logits: (c * hidden) @ W^T = c * (hidden @ W^T).
    return LazyHidden.make(x.source, dataclasses.replace(x.recipe, weight=weight, bias=bias))


def _add_rule(x: LazyHidden, other: Any) -> Any:
    """Return lazy logits [..., V] with a bias added: one value for each vocabulary entry, as in
    BART and Marian. The bias is [V], or has leading dimensions of size 1.

    Return NotImplemented for hidden states, for logits with a bias, a scale or a softcap already,
    and for any other operand. The addition then runs on the complete tensor.
    """
    recipe = x.recipe
    if recipe.weight is None or recipe.bias is not None or recipe.projection != Projection():
        return NotImplemented
    if not isinstance(other, Tensor) or not other.is_floating_point() or other.dim() > x.dim():
        return NotImplemented
    if other.device != x.device or other.shape != (1,) * (other.dim() - 1) + x.shape[-1:]:
        return NotImplemented
    dtype = torch.promote_types(x.dtype, other.dtype)
    if not other.requires_grad and has_data(other) and not bool(other.any()):
        return x.copy_with(
            dtype=dtype
        )  # zeros, which BART has, would cost an addition in each block
    bias = other.reshape(-1)
    return x.copy_with(dataclasses.replace(recipe, bias=bias, adds_bias=True), dtype)


def _cross_entropy_rule(
    x: LazyHidden,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    unusual = (
        weight is not None
        or size_average is not None
        or reduce is not None
        or label_smoothing != 0.0
    )
    if (
        unusual
        or x.recipe.weight is None
        or x.dim() != 2
        or target.dim() != 1
        or target.is_floating_point()
    ):
        return NotImplemented
    return blockwise_loss(x.source, x.recipe, target, ignore_index, reduction)


# See `foreign.py`.
LazyHidden.rules = TOKEN_RULES | {
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _scale_rule),
    **dict.fromkeys(("div", "__truediv__"), functools.partial(_scale_rule, over=True)),
    "tanh": _tanh_rule,
    **dict.fromkeys(("add", "__add__"), _add_rule),
    "linear": _linear_rule,
    "cross_entropy": _cross_entropy_rule,
}
