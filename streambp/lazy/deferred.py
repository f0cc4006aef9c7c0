"""Hidden states and logits that a model computes with, but that do not exist.

A model's own forward ends with: final norm, slice, `lm_head`, perhaps a scale or a softcap, the loss function. While a
streamed model computes a loss, its final norm returns a `Deferred` instead: a tensor without storage that remembers the
norm's input. Slicing it slices that input; `F.linear` turns it into deferred logits; multiplication, division and tanh
are remembered; `F.cross_entropy` finally computes the loss block by block. So no family's head is written again here.
An operation that writes in place does so to the real tensor, which then stands for the deferred one; through a slice or a
view it is refused.

[Note: stand-ins in a graph] What follows these rules takes the stored hidden states into autograd's graph, and never the
stand-in. Whoever does not (an autograd.Function, a C++ extension) makes the stand-in itself an input, where the gradient
would end: the loss right, and nothing below it trained. So a stand-in is the output of `NoGradientHere`, through which each
path from there to a parameter leads, and whose backward raises. One that was made under no_grad stays without a gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streambp.device import is_elsewhere
from streambp.errors import BackwardError, StreamBPError
from streambp.head.recipe import Recipe, blockwise_loss
from streambp.lazy.standin import METADATA, SharedMemory, StandIn, note_use, takes
from streambp.nested import tensors_in
from streambp.torchs_own import torch_own


class NoGradientHere(torch.autograd.Function):
    """A stand-in's place in the graph. [Note: stand-ins in a graph]"""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Deferred], *inputs: Tensor) -> Deferred:
        """make() gives the stand-in; inputs [...] are what it would be computed from."""
        result = make()
        ctx.what = f"{'logits' if result.recipe.logits else 'hidden states'} {list(result.shape)}"
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Never gives a gradient. [Note: stand-ins in a graph]

        Raises:
            BackwardError: always.
        """
        raise BackwardError(
            f"A gradient arrived at {ctx.what} that streambp keeps from being computed: something other than torch's own "
            "operations took them (an autograd.Function such as a fused loss, or a kernel), and from there it would not "
            "reach the model. Use StreamConfig(head=False), which computes them, or leave the fused loss out: streamed "
            "models compute theirs without logits."
        )


class Deferred(StandIn):
    """Shape, dtype and device of a tensor [..., h] or [..., V]; `source` [..., h] and `recipe` say how to compute it.

    Made by `Deferred.make`. cut: made under no_grad of what requires a gradient. made_of: what it is computed from, and the
    versions of that.
    """

    instead = "StreamConfig(head=False) for this model"
    metadata = METADATA

    source: Tensor
    recipe: Recipe
    cut: bool
    made_of: list[tuple[Tensor, int]]

    @staticmethod
    def __new__(cls, source: Tensor, recipe: Recipe, dtype: torch.dtype | None = None) -> Deferred:
        width = source.shape[-1] if recipe.weight is None else recipe.weight.shape[0]
        shape = (*(source.shape[:-1] if recipe.places is None else recipe.places.shape), width)
        self: Deferred = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype or source.dtype, device=source.device, requires_grad=False
        )  # type: ignore[attr-defined]
        self.source, self.recipe, self.memory = source, recipe, SharedMemory()
        self.written, self.derived, self.cut, self.followed = None, False, False, False
        self.made_of = [(x, x._version) for x in (source, *recipe.inputs()) if not x.is_inference()]
        return self

    @classmethod
    def make(cls, source: Tensor, recipe: Recipe, dtype: torch.dtype | None = None) -> Deferred:
        """One for source [..., h] that requires a gradient if what it stands for would; dtype: source's if None."""
        inputs = (source, *recipe.inputs())
        result: Deferred = NoGradientHere.apply(lambda: cls(source, recipe, dtype), *inputs)
        result.cut = not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        return result

    def build(self) -> Tensor:
        """The real tensor [..., h] or [..., V], differentiable if this one is, whatever grad mode it is asked for in."""
        if self.written is not None:
            return self.written
        with torch.set_grad_enabled(self.requires_grad):
            real = self.recipe.build(self.source)
            return real if real.dtype == self.dtype else real.to(self.dtype)

    @property
    def tokens(self) -> Tensor:
        """Each token's hidden states [..., h], or where they are: its place [..., 1]. [Note: places]"""
        return self.source if self.recipe.places is None else self.recipe.places[..., None]

    def derive(self, tokens: Tensor | None = None, recipe: Recipe | None = None) -> Deferred:
        """Another in its dtype: of other `tokens` [..., h or 1], as a slice or view of this one's, or by another recipe."""
        if tokens is None:
            return Deferred.make(self.source, recipe or self.recipe, self.dtype)
        result = Deferred.make(*self.recipe.of(self.source, tokens), self.dtype)
        result.derived, result.memory = True, self.memory
        return result

    def check(self, operation: str) -> None:
        """Raise StreamBPError if it can no longer be computed as it was, or if what shares its memory was written to."""
        super().check(operation)
        for tensor, version in () if self.written is not None else self.made_of:
            if tensor._version != version:
                raise StreamBPError(
                    f"{operation} asks for logits or for the final norm's output after the weights or hidden states "
                    f"{list(tensor.shape)} that they are computed from changed, as in optimizer.step(). Keep a copy "
                    f"(.clone()) of them before that, or use {self.instead}."
                )

    def follows_rules(self) -> bool:
        """Whether rules may take it: no real tensor has its place, and grad mode is off if it is `cut`."""
        return self.written is None and not (self.cut and torch.is_grad_enabled())

    def write(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An operation that changes this one in place: on the real tensor, which stands for it from then on.

        Raises:
            StreamBPError: it is a slice or a view of another.
        """
        if self.derived and name != "requires_grad_":
            raise StreamBPError(
                f"The model changes a part of its logits in place ({name}) while its loss is computed without them. "
                "Use StreamConfig(head=False) for this model."
            )
        if name != "requires_grad_":
            self.written = self.build()
            self.memory.watch(self.written)
        result = self.on_real(func, name, args, kwargs)
        note_use(tensors_in((args, kwargs), Deferred), result)
        return result

    def note(self, operation: str) -> None:
        """`operation` needs the real tensor, for `describe`."""
        self.recipe.note(operation)

    @classmethod
    def by_rule(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a rule gives; NotImplemented where there is none."""
        rule = RULES.get(name)
        if rule is None or (kwargs and not takes(rule, args, kwargs)):
            return NotImplemented
        return rule(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise StreamBPError(
            f"{func} reached logits that do not exist, from where no real ones can be given to it. Use "
            "StreamConfig(head=False) for this model."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype})"


def _slice(x: Deferred, index: Any) -> Any:
    """An index that leaves the last dimension whole applies to the source as well."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is None for part in parts):
        return NotImplemented
    ellipsis = any(part is Ellipsis for part in parts)
    consumed = sum(_dims(part) for part in parts if part is not Ellipsis)
    reaches_last = consumed == x.dim() or (ellipsis and parts[-1] is not Ellipsis)
    if reaches_last and not _whole(parts[-1]):
        return NotImplemented
    return x.derive(x.tokens[index])


def _dims(part: Any) -> int:
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _whole(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _take_along_dim(x: Deferred, indices: Any, dim: int | None = None) -> Any:
    """Positions [..., n, 1] of each row."""
    if dim is None or dim % x.dim() == x.dim() - 1 or indices.shape[-1] != 1:
        return NotImplemented
    return x.derive(torch_own.take_along_dim(x.tokens, indices, dim % x.dim()))


def _same(x: Deferred, *args: Any, **kwargs: Any) -> Any:
    return x


def _float(x: Deferred, *args: Any, **kwargs: Any) -> Any:
    wide = torch.promote_types(x.source.dtype, torch.float32)
    if wide == x.dtype:
        return x
    return Deferred.make(x.source, x.recipe, wide)


def _to(x: Deferred, *args: Any, **kwargs: Any) -> Any:
    """Only casts up and moves to where the tensor is; the loss is computed in float32 or wider anyway."""
    wanted = [*args, *kwargs.values()]
    dtypes = [w for w in wanted if isinstance(w, torch.dtype)]
    if any(isinstance(w, Tensor) for w in wanted) or is_elsewhere(x, wanted):
        return NotImplemented
    if any(torch.promote_types(d, x.source.dtype) != d for d in dtypes):
        return NotImplemented
    return Deferred.make(x.source, x.recipe, dtypes[0]) if dtypes and dtypes[0] != x.dtype else x


def _view(x: Deferred, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if isinstance(sizes, torch.dtype) or sizes[-1] not in (-1, x.shape[-1]):
        return NotImplemented
    if sizes[-1] == -1 and math.prod(sizes[:-1]) * x.shape[-1] != x.numel():  # tokens would end up in the last dimension
        return NotImplemented
    return x.derive(x.tokens.reshape(*sizes[:-1], x.tokens.shape[-1]))


def _flatten(x: Deferred, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim in (-1, x.dim() - 1):
        return NotImplemented
    return x.derive(x.tokens.flatten(start_dim, end_dim))


def _multiply(x: Any, other: Any) -> Any:
    if isinstance(other, Deferred):
        x, other = other, x
    if isinstance(other, bool) or not isinstance(other, int | float):
        return NotImplemented
    return x.derive(recipe=x.recipe.scaled(float(other)))


def _divide(x: Any, other: Any, **kwargs: Any) -> Any:
    if kwargs or not isinstance(x, Deferred) or isinstance(other, bool) or not isinstance(other, int | float) or not other:
        return NotImplemented
    return x.derive(recipe=x.recipe.scaled(1.0 / other))


def _tanh(x: Deferred) -> Any:
    if x.recipe.weight is None or x.recipe.tanh:
        return NotImplemented
    return x.derive(recipe=dataclasses.replace(x.recipe, tanh=True))


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(x, Deferred) or x.recipe.weight is not None or (x.recipe.scale_hidden != 1.0 and bias is not None):
        return NotImplemented
    recipe = dataclasses.replace(
        x.recipe, weight=weight, bias=bias, before=x.recipe.scale_hidden, scale_hidden=1.0
    )  # (c * hidden) @ W^T = c * (hidden @ W^T)
    return Deferred.make(x.source, recipe)


def _cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    unusual = weight is not None or size_average is not None or reduce is not None or label_smoothing != 0.0
    if not isinstance(x, Deferred) or isinstance(target, Deferred):  # soft targets
        return NotImplemented
    if unusual or x.recipe.weight is None or x.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return NotImplemented
    return blockwise_loss(x.source, x.recipe, target, ignore_index, reduction)


# By name: of torch's functions and of the methods that are them. [Note: torch's own functions]
RULES: dict[str, Callable[..., Any]] = {
    "__getitem__": _slice,
    "contiguous": _same,
    "float": _float,
    "to": _to,
    "view": _view,
    "reshape": _view,
    "flatten": _flatten,
    "mul": _multiply,
    "__mul__": _multiply,
    "__rmul__": _multiply,
    "div": _divide,
    "__truediv__": _divide,
    "tanh": _tanh,
    "take_along_dim": _take_along_dim,
    "linear": _linear,
    "cross_entropy": _cross_entropy,
}
