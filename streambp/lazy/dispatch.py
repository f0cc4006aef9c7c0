"""Logits that a model returns without computing them.

A streamed model that is called without labels returns `LazyLogits`. The program computes its loss
from the logits. Row-wise functions are recorded (`row_rules`). Values of each row, such as a
log-probability, a logsumexp, an entropy or an argmax, are computed block by block (`head`). Every
other operation builds the real tensor and runs on the real tensor: exact, at the unpatched model's
memory cost. The operation's name is recorded for `describe`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from streambp.foreign import torch_own
from streambp.head.recipe import HeadRequest
from streambp.lazy.head import LazyHead
from streambp.lazy.lazy_hidden import LazyHidden
from streambp.lazy.loss_rules import kl_div, label_loss
from streambp.lazy.row_rules import DIM_ARGUMENT, apply_along_rows, record_elementwise, scale
from streambp.lazy.tensor import LazyLogits
from streambp.lazy.token_rules import TOKEN_RULES, to


def lazy_logits(deferred: LazyHidden, request: HeadRequest) -> LazyLogits:
    """Return the logits that a model call returns to the user's code: `LazyLogits`, whose values
    are computed on use.

    Args:
        deferred: the lazy tensor that the model's own forward returned in place of logits.
        request: record of the model call. `streambp.describe` reads there how the logits were used.
    """
    source = deferred.source.reshape(-1, deferred.source.shape[-1])
    hub = LazyHead(source, dataclasses.replace(deferred.recipe, request=request))
    reading = hub.read(source, deferred.shape[:-1], deferred.recipe.token_positions)
    logits = LazyLogits.make(reading, hub.vocabulary, deferred.dtype, torch.is_grad_enabled())
    logits.has_dependents = (
        deferred.recipe.request is not request
    )  # the model's own loss used the logits
    return logits


ELEMENTWISE_OPERATIONS = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "neg", "negative", "abs", "absolute", "sigmoid", "logsigmoid",
    "tanh", "square", "sqrt", "rsqrt", "reciprocal", "relu", "softplus", "clamp", "clamp_min", "clamp_max", "clip", "pow",
    "xlogy", "nan_to_num", "masked_fill", "where", "add", "sub", "subtract", "rsub", "float_power", "isnan", "isinf",
    "isfinite", "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "maximum", "minimum",
    "logaddexp",
    "__neg__", "__abs__", "__add__", "__radd__", "__sub__", "__rsub__", "__rtruediv__", "__rdiv__", "__pow__", "__rpow__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__invert__", "__and__", "__or__",
)  # fmt: skip
SCALING_OPERATIONS = (
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "__mul__",
    "__rmul__",
    "__truediv__",
    "__div__",
)

# Names of torch's functions and of equal methods. See `foreign.py`.
ROW_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(ELEMENTWISE_OPERATIONS, record_elementwise),
    **dict.fromkeys(SCALING_OPERATIONS, scale),
    **dict.fromkeys(DIM_ARGUMENT, apply_along_rows),
    "cross_entropy": lambda name, func, args, kwargs: label_loss(name, func, *args, **kwargs),
    "nll_loss": lambda name, func, args, kwargs: label_loss(name, func, *args, **kwargs),
    # `torch.kl_div` takes reductions as integers.
    "kl_div": lambda _, func, args, kwargs: (
        NotImplemented if func is torch_own.kl_div else kl_div(func, *args, **kwargs)
    ),
}
LazyLogits.row_rules = ROW_RULES
LazyLogits.rules = TOKEN_RULES | {
    "clone": lambda x, *args, **kwargs: x.copy_with(),
    "detach": lambda x: x.copy_with(graded=False).share_memory_with(x),  # both share memory
    "double": lambda x: to(x, torch.float64),
    "type_as": to,
    "register_hook": LazyLogits.hook,
}
