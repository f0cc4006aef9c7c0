"""Logits that a model returns without computing them.

A streamed model that is called without labels, by a program that computes its loss from logits, returns `LazyLogits`. What
the program makes of them row by row is remembered (`row_rules`); what it takes of each row, a log-probability, a logsumexp,
an entropy, an argmax, is computed block by block (`head`). Any other operation builds the real tensor and goes on with
it, exact, at the memory cost that the unpatched model has; the operation's name is kept, for `describe`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from streambp.errors import StreamBPError
from streambp.head.recipe import HeadRequest
from streambp.lazy.deferred import Deferred
from streambp.lazy.head import Hub
from streambp.lazy.loss_rules import cross_entropy, kl_div, nll_loss
from streambp.lazy.row_rules import DIM, along_rows, elementwise, scale
from streambp.lazy.tensor import LazyRows
from streambp.lazy.token_rules import TOKEN_RULES, to
from streambp.nested import tensors_in
from streambp.torchs_own import method


class LazyLogits(LazyRows):
    """Rows of logits, or of what was made of them."""

    @classmethod
    def of(cls, deferred: Deferred, request: HeadRequest) -> LazyRows:
        """What a model's forward has made of its deferred hidden states, for its caller.

        request: its outcome tells what became of them.
        """
        source = deferred.source.reshape(-1, deferred.source.shape[-1])
        hub = Hub(source, dataclasses.replace(deferred.recipe, request=request))
        reading = hub.read(source, deferred.shape[:-1], deferred.recipe.places)
        made = cls.make(reading, hub.vocabulary, deferred.dtype, torch.is_grad_enabled())
        made.followed = deferred.recipe.request.outcome is not request.outcome  # by the model's own loss
        return made

    @classmethod
    def by_rule(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a rule gives; NotImplemented where there is none."""
        if name in ROW_RULES:
            found = ROW_RULES[name](name, func, args, kwargs)
            if found is not NotImplemented:
                return found
        if isinstance(args[0] if args else None, LazyRows) and args[0].classes is not None and name not in ANY_SHAPE:
            return NotImplemented
        return super().by_rule(func, name, args, kwargs)

    def write(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An operation that changes this one in place: it becomes another function of rows, or real.

        Under no_grad torch keeps the place in the graph of a tensor that is written to, as no other function would.

        Raises:
            StreamBPError: the operation changes the shape.
        """
        before = self.current()
        if name == "detach_":
            before.become(before.build().detach())
            return self
        rows = tensors_in((args, kwargs), LazyRows)
        follow = all(x.follows_rules() for x in rows)
        if follow and (torch.is_grad_enabled() or not before.graded):
            plain = plain_name(name)
            out_of_place = method(plain)
            made = NotImplemented
            if out_of_place is not None and plain in ROW_RULES:
                made = self.by_rule(out_of_place, plain, args, kwargs)
            if isinstance(made, LazyRows) and _alike(made, before):
                before.become(made)
                return self
        before.note(name)
        real = {id(leaf): leaf.build() for leaf in rows}
        if not before.graded:
            # Not as a view of something made under no_grad, which forbids writes.
            real[id(before)] = real[id(before)].detach()
        before.become(real[id(before)])
        args, kwargs = tree_map_only(LazyRows, lambda leaf: real[id(leaf)], (args, kwargs))
        result = func(*args, **kwargs)
        if real[id(before)].shape != self.shape:
            raise StreamBPError(
                f"{name} changes the shape of logits in place, which a tensor that stands for them cannot. Use "
                f"{plain_name(name)} or StreamConfig(lazy_logits=False)."
            )
        before.memory.watch(real[id(before)])
        return self if result is real[id(before)] else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """C++ that does not ask for rules. What autograd does with it was settled before it came here."""
        if func._schema.is_mutable:
            raise StreamBPError(f"{func} would write to logits that do not exist. Use StreamConfig(lazy_logits=False).")

        def real(x: LazyRows) -> Tensor:
            x = x.latest(str(func))
            x.note(str(func))
            with torch.no_grad():
                return x.values() if x.written is None else x.written.detach()

        args, kwargs = tree_map_only(LazyRows, real, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


def plain_name(name: str) -> str:
    """add_ -> add, __iadd__ -> __add__."""
    return f"__{name[3:-2]}__" if name.startswith("__i") else name[:-1]


def _alike(made: LazyRows, before: LazyRows) -> bool:
    return made.shape == before.shape and made.dtype == before.dtype and made.graded == before.graded


ELEMENTWISE = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "neg", "negative", "abs", "absolute", "sigmoid", "logsigmoid",
    "tanh", "square", "sqrt", "rsqrt", "reciprocal", "relu", "softplus", "clamp", "clamp_min", "clamp_max", "clip", "pow",
    "xlogy", "nan_to_num", "masked_fill", "where", "add", "sub", "subtract", "rsub", "float_power", "isnan", "isinf",
    "isfinite", "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "maximum", "minimum",
    "logaddexp",
    "__neg__", "__abs__", "__add__", "__radd__", "__sub__", "__rsub__", "__rtruediv__", "__rdiv__", "__pow__", "__rpow__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__invert__", "__and__", "__or__",
)  # fmt: skip
SCALING = ("mul", "multiply", "div", "divide", "true_divide", "__mul__", "__rmul__", "__truediv__", "__div__")

# By name: of torch's functions and of the methods that are them. [Note: torch's own functions]
ROW_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(SCALING, scale),
    **dict.fromkeys(DIM, along_rows),
    "kl_div": kl_div,
    "cross_entropy": cross_entropy,
    "nll_loss": nll_loss,
}
ANY_SHAPE = (
    "transpose",
    "permute",
    "swapaxes",
    "swapdims",
    "contiguous",
    "clone",
    "detach",
    "to",
    "float",
    "double",
    "register_hook",
)
LazyLogits.rules = TOKEN_RULES | {
    "clone": lambda x, *args, **kwargs: x.changed(),
    "detach": lambda x: x.changed(graded=False).sharing(x),  # writes to one show in the other
    "double": lambda x: to(x, torch.float64),
    "type_as": to,
    "register_hook": LazyRows.hook,
}
