"""Hidden states and logits that a model computes with, but that do not exist.

A model's own forward ends with: final norm, slice, `lm_head`, perhaps a scale or a softcap, the loss function. While a
streamed model computes a loss, its final norm returns a `Deferred` instead: a tensor without storage that remembers the
norm's input. Slicing it slices that input; `F.linear` turns it into deferred logits; multiplication, division and tanh
are remembered; `F.cross_entropy` finally computes the loss block by block. So no family's head is written again here.
Any other operation builds the real tensor and goes on with it: exact, at the memory cost that the unpatched model has;
the operation's name is kept, for `describe`. One that writes in place does so to the real tensor, which then stands for the
deferred one; through a slice or a view it is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from streambp.distributed.zero import full_shape
from streambp.errors import StreamBPError
from streambp.head.blocks import Projection, Wanted
from streambp.head.log_probs import BlockwiseLogProbs, TokenLogProbs, check_labels, make_inputs
from streambp.head.one_pass import OnePassNLL, Pending, can_run_in_one_pass


@dataclasses.dataclass
class HeadRecord:
    """What is wanted of one forward's deferred tensors, and what happened to them.

    wanted: per-token values are; None: the loss is enough.
    temperature: logits are divided by it. in_float32: their products are computed in float32.
    """

    pending: Pending
    wanted: Wanted | None = None
    temperature: float = 1.0
    in_float32: bool = False
    values: TokenLogProbs | None = None  # [N] each
    hidden_states: Tensor | None = None  # [N, h], what they were computed from
    norm: nn.Module | None = None  # and the norm that comes before the head
    num_items: Tensor | int | None = None  # what the model's loss will divide a sum by
    built_for: str | None = None  # the operation that needed a real tensor


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What stands between the stored hidden states and a deferred tensor's value."""

    record: HeadRecord
    norm: nn.Module | None = None
    scale_hidden: float = 1.0
    weight: Tensor | None = None
    bias: Tensor | None = None
    before: float = 1.0  # logits = after * tanh(before * product), or after * before * product without tanh
    tanh: bool = False
    after: float = 1.0
    head: nn.Module | None = None  # must be running where weight and bias are read

    def scaled(self, factor: float) -> Recipe:
        if self.weight is None:
            return dataclasses.replace(self, scale_hidden=self.scale_hidden * factor)
        if self.tanh:
            return dataclasses.replace(self, after=self.after * factor)
        return dataclasses.replace(self, before=self.before * factor)

    def projection(self) -> Projection:
        """The same in the terms of `Projection`: softcap(scale * product), softcap(z) = cap * tanh(z / cap)."""
        temperature = self.record.temperature
        if not self.tanh:
            return Projection(logit_scale=self.before, temperature=temperature)
        return Projection(logit_scale=self.before * self.after, softcap=self.after, temperature=temperature)


class Deferred(Tensor):
    """Shape, dtype and device of a tensor [..., h] or [..., V]; `source` [..., h] and `recipe` say how to compute it.

    written: the real tensor, once an operation has written to it. derived: a slice or a view of another.
    """

    source: Tensor
    recipe: Recipe
    written: Tensor | None
    derived: bool

    @staticmethod
    def __new__(cls, source: Tensor, recipe: Recipe, dtype: torch.dtype | None = None) -> Deferred:
        width = source.shape[-1] if recipe.weight is None else full_shape(recipe.weight)[0]
        shape = (*source.shape[:-1], width)
        self: Deferred = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype or source.dtype, device=source.device, requires_grad=source.requires_grad
        )  # type: ignore[attr-defined]
        self.source, self.recipe = source, recipe
        self.written, self.derived = None, False
        return self

    def build(self) -> Tensor:
        """The real tensor, differentiable."""
        if self.written is not None:
            return self.written
        recipe, value = self.recipe, self.source
        if recipe.norm is not None:
            value = recipe.norm(value)
        if recipe.scale_hidden != 1.0:
            value = value * recipe.scale_hidden
        if recipe.weight is not None:
            value = F.linear(value, recipe.weight, recipe.bias)
            value = value * recipe.before if recipe.before != 1.0 else value
            value = torch.tanh(value) * recipe.after if recipe.tanh else value
        return value.to(self.dtype)

    def derive(self, source: Tensor | None = None, recipe: Recipe | None = None) -> Deferred:
        result = Deferred(self.source if source is None else source, recipe or self.recipe, self.dtype)
        result.derived = source is not None
        return result

    def write_for(self, operation: str) -> None:
        """Make the real tensor what this stands for, because `operation` is about to change it."""
        if self.derived:
            raise StreamBPError(
                f"The model changes a part of its logits in place ({operation}) while its loss is computed without them. "
                "Use StreamConfig(head=False) for this model."
            )
        self.written = self.build()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        rule = RULES.get(func) or METHODS.get(name)
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if args and isinstance(args[0], Deferred) and _writes(name):
            args[0].write_for(name)
        elif rule is not None and all(getattr(arg, "written", None) is None for arg in args):
            result = rule(*args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = torch.utils._pytree.tree_map_only(Deferred, lambda d: _build_for(d, name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise StreamBPError(f"{func} reached logits that do not exist. Ask for logits by calling the model without labels.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype})"


def _writes(operation: str) -> bool:
    """Whether a method of this name writes to its tensor: add_, __setitem__, __iadd__."""
    in_place = operation.endswith("_") and not operation.endswith("__") and operation != "requires_grad_"
    return in_place or operation in IN_PLACE


def _build_for(deferred: Deferred, operation: str) -> Tensor:
    deferred.recipe.record.built_for = operation
    return deferred.build()


METADATA = frozenset(
    {
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.is_floating_point, Tensor.stride, Tensor.__len__,
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda",
                                                     "is_meta", "layout", "is_leaf", "grad_fn", "is_sparse")),
    }
)  # fmt: skip


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
    return x.derive(x.source[index])


def _dims(part: Any) -> int:
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _whole(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _same(x: Deferred, *args: Any, **kwargs: Any) -> Any:
    return x


def _float(x: Deferred, *args: Any, **kwargs: Any) -> Any:
    wide = torch.promote_types(x.source.dtype, torch.float32)
    if wide == x.dtype:
        return x
    return Deferred(x.source, x.recipe, wide)


def _to(x: Deferred, *args: Any, **kwargs: Any) -> Any:
    """Only casts up and moves to where the tensor is; the loss is computed in float32 or wider anyway."""
    wanted = [*args, *kwargs.values()]
    dtypes = [w for w in wanted if isinstance(w, torch.dtype)]
    devices = [torch.device(w) for w in wanted if isinstance(w, str | torch.device)]
    if any(isinstance(w, Tensor) for w in wanted) or any(d.type != x.device.type for d in devices):
        return NotImplemented
    if any(torch.promote_types(d, x.source.dtype) != d for d in dtypes):
        return NotImplemented
    return Deferred(x.source, x.recipe, dtypes[0]) if dtypes and dtypes[0] != x.dtype else x


def _view(x: Deferred, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if isinstance(sizes, torch.dtype) or sizes[-1] not in (-1, x.shape[-1]):
        return NotImplemented
    if sizes[-1] == -1 and math.prod(sizes[:-1]) * x.shape[-1] != x.numel():  # tokens would end up in the last dimension
        return NotImplemented
    source = x.source.reshape(*sizes[:-1], x.source.shape[-1])
    return x.derive(source)


def _flatten(x: Deferred, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim in (-1, x.dim() - 1):
        return NotImplemented
    return x.derive(x.source.flatten(start_dim, end_dim))


def _multiply(x: Any, other: Any) -> Any:
    if isinstance(other, Deferred):
        x, other = other, x
    if isinstance(other, bool) or not isinstance(other, int | float):
        return NotImplemented
    return x.derive(recipe=x.recipe.scaled(float(other)))


def _divide(x: Any, other: Any, **kwargs: Any) -> Any:
    if kwargs or not isinstance(x, Deferred) or isinstance(other, bool) or not isinstance(other, int | float):
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
    return Deferred(x.source, recipe)


def _cross_entropy(
    x: Deferred,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    recipe = x.recipe
    unusual = weight is not None or size_average is not None or reduce is not None or label_smoothing != 0.0
    if unusual or recipe.weight is None or x.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return NotImplemented
    if target.shape[0] != x.shape[0]:
        raise StreamBPError(
            f"There are {target.shape[0]} labels for {x.shape[0]} positions. labels must be shaped like input_ids, [B, T], "
            "and shift_labels like labels."
        )
    check_labels(target, x.shape[-1], ignore_index)
    inputs = make_inputs(x.source, target, recipe.projection(), recipe.norm, ignore_index)
    inputs.in_float32 = recipe.record.in_float32
    record = recipe.record
    # No valid label: loss 0 and gradient 0, where torch gives NaN.
    labelled = (target != ignore_index).sum().clamp(min=1)
    one_pass = reduction != "none" and record.wanted is None and can_run_in_one_pass(x.source, record.pending)
    divisor = labelled if reduction == "mean" else (record.num_items or 1)

    def compute(source: Tensor, weight: Any, bias: Any) -> tuple[Tensor | None, ...]:
        values = (weight, bias, *inputs.norm_values())
        if not one_pass:
            return BlockwiseLogProbs.apply(inputs, record.wanted or Wanted(), source, *values)
        one = torch.ones((), dtype=torch.promote_types(source.dtype, torch.float32), device=x.device)
        return (OnePassNLL.apply(inputs, record.pending, one / divisor, source, *values),)

    if recipe.head is None:
        found = compute(x.source, recipe.weight, recipe.bias)
    else:
        found = _within(recipe.head, x.source, compute)
    if one_pass:
        total: Any = found[0]
    else:
        record.hidden_states, record.norm = x.source, recipe.norm
        record.values = TokenLogProbs(*found)  # type: ignore[arg-type]
        if reduction == "none":
            return -record.values.log_probs
        total = -record.values.log_probs.sum()
    return total if reduction == "sum" else total / labelled


Compute = Callable[[Tensor, Any, Any], tuple[Tensor | None, ...]]


def _within(head: nn.Module, source: Tensor, compute: Compute) -> tuple[Tensor | None, ...]:
    """`compute` with the weight and bias of `head`, as its forward: between the hooks that gather and release them."""
    before = head.__dict__.get("forward")
    head.forward = lambda source: compute(source, head.weight, head.bias)  # type: ignore[method-assign, assignment]
    try:
        result: tuple[Tensor | None, ...] = head(source)
        return result
    finally:
        del head.__dict__["forward"]
        if before is not None:
            head.forward = before  # type: ignore[method-assign]


RULES: dict[Any, Callable[..., Any]] = {
    torch.mul: _multiply,
    torch.div: _divide,
    torch.tanh: _tanh,
    F.linear: _linear,
    F.cross_entropy: _cross_entropy,
}

IN_PLACE = frozenset(
    {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod"))}
)

# By name: torch passes whatever stands under that name in `Tensor`, which others may have wrapped.
METHODS: dict[str, Callable[..., Any]] = {
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
}
