"""Rules for operations on each row separately: recorded, or computed block by block.

A rule gets torch's own function. Running that function on samples, [0, W] tensors, determines its
result's width and dtype, autocast included, and raises torch's errors. Values are computed in
promote_types(dtype, float32) and rounded at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from streambp.foreign import torch_own
from streambp.head.log_probs import check_labels
from streambp.lazy.expression import (
    LogitsReading,
    Node,
    RecordedCall,
    TensorOperand,
    operation_names,
)
from streambp.lazy.head import FunctionCalculation, StatisticsCalculation
from streambp.lazy.tensor import LazyLogits, flatten_node
from streambp.tensors import tensors_in

ROW_OPERATIONS = frozenset({"log_softmax", "softmax", "softmin"})
# Operations with their `dim` as argument 1. DIM: operation -> index of `dim`.
DIM_FIRST_OPERATIONS = (
    "sum", "mean", "nansum", "nanmean", "logsumexp", "max", "min", "amax", "amin", "argmax", "argmin", "any", "all",
    "count_nonzero", "gather", "softmax", "log_softmax", "softmin",
)  # fmt: skip
DIM_ARGUMENT = dict.fromkeys(DIM_FIRST_OPERATIONS, 1) | {"topk": 2, "take_along_dim": 2, "norm": 2}
# Results that change if their inputs are rounded to half precision; lazy values are not rounded.
ROUNDING_SENSITIVE_OPERATIONS = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "isinf", "isfinite", "nan_to_num"}
)
# function of all entries -> function of the rows' results
FULL_REDUCTIONS = {"sum": "sum", "mean": "mean", "nansum": "nansum"}


def empty_sample(x: LazyLogits) -> Tensor:
    """Return an empty tensor [0, W] with the dtype and device of lazy logits x [*tokens, W]. A
    torch function is called with it to find the width and dtype of the function's result without
    computing values."""
    return torch.empty((0, x.width), dtype=x.dtype, device=x.device)


def record_elementwise(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Record an operation on lazy logits that computes each entry or each token alone, such as exp
    or log_softmax. Return lazy logits for the result, whose values are computed later, block by
    block.

    Return NotImplemented if the operation needs complete tensors: another tensor requires a
    gradient, shapes or devices do not fit, or rounding would change the result. The caller then
    computes these.

    Args:
        name: name of the operation, such as "exp".
        func: torch's function.
        args: positional arguments of the call, lazy logits among them.
        kwargs: keyword arguments of the call.
    """
    rows = tensors_in((args, kwargs), LazyLogits)
    if any(x.classes is not None for x in rows):
        return NotImplemented
    if name.strip("_") in ROUNDING_SENSITIVE_OPERATIONS and any(x.dtype.itemsize < 4 for x in rows):
        return NotImplemented
    first = rows[0]
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in rows)
    if any(x.tokens != first.tokens for x in rows):
        return NotImplemented
    width = max(x.width for x in rows)
    operands: dict[int, tuple[Any, Tensor]] = {}  # id of a tensor -> operand and sample
    for leaf in tree_leaves((args, kwargs)):
        if not isinstance(leaf, Tensor) or isinstance(leaf, LazyLogits):
            continue
        if leaf.requires_grad and torch.is_grad_enabled():
            return NotImplemented
        tensor = leaf.detach()
        if tensor.numel() <= first.tokens.numel() + width:
            tensor = tensor.clone()  # a cheap copy; later writes to the tensor are harmless
        if tensor.dim() == 0:
            operands[id(leaf)] = (
                TensorOperand.from_tensor(tensor.to(first.device).expand(*first.tokens, 1)),
                tensor,
            )
            continue
        if (
            tensor.dim() > first.dim()
            or tensor.shape[-1] not in (1, width)
            or tensor.device != first.device
        ):
            return NotImplemented
        try:
            expanded = tensor.expand(*first.tokens, tensor.shape[-1])
        except RuntimeError:
            return NotImplemented
        operands[id(leaf)] = (
            TensorOperand.from_tensor(expanded),
            expanded.reshape(-1, expanded.shape[-1])[:0],
        )
    plain_args, plain_kwargs = tree_map_only(
        Tensor,
        lambda t: empty_sample(t) if isinstance(t, LazyLogits) else operands[id(t)][1],
        (args, kwargs),
    )
    with torch.no_grad():
        sample = func(*plain_args, **plain_kwargs)
    if not isinstance(sample, Tensor) or sample.dim() != 2 or sample.shape[-1] != width:
        return NotImplemented
    node_args, node_kwargs = tree_map_only(
        Tensor,
        lambda t: (
            _node_with_gradient(t, graded) if isinstance(t, LazyLogits) else operands[id(t)][0]
        ),
        (args, kwargs),
    )
    return first.make(
        RecordedCall(func, node_args, node_kwargs, graded, name), width, sample.dtype, graded
    )


def _node_with_gradient(x: LazyLogits, graded: bool) -> Node:
    """Return the recorded function of lazy logits x, to be an argument of another recorded
    operation. A recorded function consists of operations on logits that run later, block by block.

    Args:
        x: the lazy logits.
        graded: True if an argument of the operation requires a gradient. If x requires none, a
            detach is added to the function, so that backward computes no gradient of x.
    """
    if graded and not x.requires_grad:
        return RecordedCall(torch_own.detach, (x.node,), {}, False, "detach")
    return x.node


def apply_along_rows(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation along the vocabulary dimension of lazy logits. Softmax and log_softmax are
    recorded, and their values are computed later. Operations with small results, such as sum,
    gather and topk, are computed at once, block by block.

    Args:
        name: name of the operation.
        func: torch's function.
        args: positional arguments of the call; the first is the lazy logits.
        kwargs: keyword arguments of the call.

    Returns:
        The operation's result. NotImplemented for another dimension or another lazy argument; the
            caller then computes complete tensors.
    """
    x = args[0]
    positional = list(args[1:])
    if not isinstance(x, LazyLogits):
        return NotImplemented
    if tensors_in((positional, kwargs), LazyLogits):
        return NotImplemented
    kwargs = dict(kwargs)
    at = DIM_ARGUMENT[name] - 1
    if "axis" in kwargs:
        kwargs["dim"] = kwargs.pop("axis")
    if len(positional) > at:
        dim = positional.pop(at)
    else:
        dim = kwargs.pop("dim", -1 if name == "topk" else None)
    if dim is None and name in FULL_REDUCTIONS:
        return reduce_all(name, func, x, positional, kwargs)
    if isinstance(dim, tuple | list):
        dim = dim[0] if len(dim) == 1 else None
    class_dim = x.dim() - 1 if x.classes is None else x.classes
    if isinstance(dim, bool) or not isinstance(dim, int) or dim % x.dim() != class_dim:
        return NotImplemented
    if name in ROW_OPERATIONS:
        # Further arguments of torch's function (dtype) or of F's (_stacklevel, dtype).
        kwargs.pop("_stacklevel", None)
        if dtypes := [value for value in positional if isinstance(value, torch.dtype)]:
            kwargs["dtype"] = dtypes[0]
        result = record_elementwise(name, func, (x.with_classes(None),), {**kwargs, "dim": -1})
        if x.classes is None:
            return result
        return result.make(result.node, result.width, result.dtype, result.requires_grad, x.classes)
    if x.classes is not None:
        return NotImplemented
    if name in ("gather", "take_along_dim"):
        index = positional[0] if positional else kwargs.get("index", kwargs.get("indices"))
        return gather(x, index)
    if name == "topk" and positional:
        kwargs["k"] = positional.pop(0)
    return _reduce(name, func, x, positional, kwargs)


def reduce_all(
    name: str,
    func: Callable[..., Any],
    x: LazyLogits,
    positional: list[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Reduce lazy logits to a scalar, for example by sum() without a dimension. Each token's
    entries are reduced block by block, and torch's own function reduces the results [*tokens].

    Return NotImplemented for further positional arguments, and for keepdim. The caller then
    computes the complete tensor.

    Args:
        name: name of the operation: "sum", "mean" or "nansum".
        func: torch's function.
        x: the lazy logits.
        positional: further positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    if positional or kwargs.get("keepdim"):
        return NotImplemented
    of_rows = _reduce(name, func, x, [], kwargs)
    return getattr(torch_own, FULL_REDUCTIONS[name])(of_rows)


def _reduce(
    name: str,
    func: Callable[..., Any],
    x: LazyLogits,
    positional: list[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Compute a reduction over each token's entries of lazy logits, such as sum or topk along the
    vocabulary, block by block. Return its result, or a tuple of results as torch's function does:
    [*tokens], [*tokens, 1] or [*tokens, K].

    Args:
        name: name of the operation.
        func: torch's function.
        x: the lazy logits [*tokens, W].
        positional: positional arguments of the call, without the tensor and the dimension.
        kwargs: keyword arguments of the call.
    """
    if name == "norm":
        kwargs = {"p": positional.pop(0) if positional else "fro", **kwargs}
    further = ("largest", "sorted") if name == "topk" else ("keepdim",)
    kwargs = {"dim": -1, **kwargs, **dict(zip(further, positional, strict=False))}
    with torch.no_grad():
        sample = func(empty_sample(x), **kwargs)
    log_probs = match_log_softmax(x.node)
    if name == "logsumexp" and isinstance(x.node, LogitsReading):
        values = x.compute(StatisticsCalculation(x.node, None, lse=True))
    elif (
        log_probs
        and name in ("sum", "mean")
        and kwargs.get("dtype") in (None, log_probs[0].head.wide)
    ):
        reading, sign = log_probs
        lse, mean = x.compute(StatisticsCalculation(reading, None, lse=True, mean=True))
        values = ((mean - lse) * (sign if name == "mean" else sign * x.width),)
    else:
        values = x.compute(
            FunctionCalculation(flatten_node(RecordedCall(func, (x.node,), kwargs, True, name)))
        )
    note(x, name)
    several = isinstance(sample, tuple | list)
    samples = sample if several else (sample,)
    shaped: list[Tensor] = []
    for value, like in zip(values, samples, strict=True):
        shaped.append(value.reshape((*x.tokens, *like.shape[1:])).to(like.dtype))
    if several:
        return type(sample)(shaped)
    return shaped[0]


def note(x: LazyLogits, name: str) -> None:
    """Record that the operation `name` on lazy logits was computed block by block, for the report
    of `streambp.describe`.

    Operations that were only recorded before, such as log_softmax, are computed together with this
    operation. The report therefore names them too, for example "log_softmax + gather".

    Args:
        x: the lazy logits on which the operation was called.
        name: name of the operation, such as "gather".
    """
    x.request.outcome.computed[" + ".join(dict.fromkeys([*operation_names(x.node), name]))] = None


def match_log_softmax(node: Node) -> tuple[LogitsReading, float] | None:
    """Return (logits, 1) if a recorded function is log_softmax of logits, and (logits, -1) if it is
    the negative of that. None for other functions. A recorded function consists of operations on
    logits that run later. Callers then compute entries of log_softmax from softmax statistics (the
    logsumexp, for example), which is cheaper."""
    if (
        isinstance(node, RecordedCall)
        and node.name in ("neg", "negative", "__neg__")
        and len(node.args) == 1
    ):
        inner = match_log_softmax(node.args[0])
        if inner is None:
            return None
        return inner[0], -inner[1]
    if (
        not isinstance(node, RecordedCall)
        or node.name != "log_softmax"
        or not isinstance(node.args[0], LogitsReading)
    ):
        return None
    reading = node.args[0]
    dtype = node.kwargs.get("dtype")
    if dtype is None or dtype == reading.head.wide:
        return reading, 1.0
    return None


def gather(x: LazyLogits, index: Any) -> Any:
    """Return the entries of lazy logits at given vocabulary indices, like torch.gather along the
    last dimension. The result [*tokens, K] is a real tensor in x's dtype.

    Return NotImplemented if `index` has another shape; the caller then computes the complete
    tensor.

    Args:
        x: the lazy logits [*tokens, W].
        index: vocabulary indices [*tokens, K].

    Raises:
        StreamBPError: an index is outside of the vocabulary.
    """
    if not isinstance(index, Tensor) or index.dim() != x.dim() or index.shape[:-1] != x.tokens:
        return NotImplemented
    index = index.detach()
    check_labels(index.reshape(-1), x.width, None)
    note(x, "gather")
    return gather_entries(x, index).to(x.dtype)


def gather_entries(x: LazyLogits, index: Tensor) -> Tensor:
    """Compute the entries [*tokens, K] of lazy logits at given vocabulary indices, block by block.
    The result is in promote_types(dtype, float32).

    Args:
        x: the lazy logits [*tokens, W].
        index: vocabulary indices [*tokens, K]; the caller has checked that they are valid.
    """
    labels = index.reshape(-1).clone()  # the program may write to `index`
    reading_and_sign = match_log_softmax(x.node)
    if index.shape[-1] == 1 and reading_and_sign is not None:
        reading, sign = reading_and_sign
        target, lse = x.compute(StatisticsCalculation(reading, labels, lse=True))
        return ((target - lse) * sign).view(index.shape)
    if index.shape[-1] == 1 and isinstance(x.node, LogitsReading):
        return x.compute(StatisticsCalculation(x.node, labels))[0].view(index.shape)
    node = RecordedCall(
        torch_own.gather, (x.node, -1, TensorOperand.from_tensor(index.clone())), {}, True, "gather"
    )
    return x.compute(FunctionCalculation(flatten_node(node)))[0].view(index.shape)


def scale(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Multiply or divide lazy logits, and return lazy logits. A number as the other factor changes
    the temperature with which the logits are computed, so no operation is recorded. All other cases
    are passed to `record_elementwise`, which returns NotImplemented if complete tensors are needed.

    Args:
        name: name of the operation, such as "mul".
        func: torch's function.
        args: positional arguments of the call: two factors, or dividend and divisor.
        kwargs: keyword arguments of the call.
    """
    x, operand = (*args, *kwargs.values(), None)[:2]
    multiplies = "mul" in name
    if multiplies and isinstance(operand, LazyLogits):
        x, operand = operand, x
    if (
        len(args) + len(kwargs) == 2
        and isinstance(x, LazyLogits)
        and isinstance(x.node, LogitsReading)
        and is_number(operand)
    ):
        projection = x.node.projection
        if multiplies:
            temperature = projection.temperature / operand
        else:
            temperature = projection.temperature * operand
        return x.copy_with(
            dataclasses.replace(
                x.node, projection=dataclasses.replace(projection, temperature=temperature)
            )
        )
    return record_elementwise(name, func, args, kwargs)


def is_number(value: Any) -> bool:
    """True if the value is a finite int or float other than zero. Lazy logits can be multiplied or
    divided by such a number by changing their temperature."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value != 0
    )
