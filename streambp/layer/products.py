"""Linear products that a recomputation can leave out, because nobody reads them.

The refill of K and V computes the queries for nothing, and the recomputation of a chunk computes the layer's last Linear
for nothing: its backward wants its input and weight, not its output. On a Qwen3-8B layer these are 2.3 % and 6.5 % of a
step's Linear FLOPs. Which products are unread follows from the layer's own data flow, so it is traced, not listed
(`data_flow.py`). A product that is left out is filled with NaN, so that a wrong trace could not go unnoticed. What a trace
proposes is tried before it is used (`trials.py`). [Note: writes through pointers]
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from streambp.attention.indexers import indexers_of
from streambp.device import autocast_dtype
from streambp.distributed.engines import drops_masks
from streambp.foreign import compiled_inside
from streambp.known_names import GLOBAL_HOOKS, LORA_FACTORS, MODULE_HOOKS, MODULE_TABLES
from streambp.layer.shadows import GradientSum
from streambp.layer.witness import Witness, rows_of

PARAMETERS = MODULE_TABLES[0]
ADAPTED = "_streambp_adapted"  # of a module with adapters: what computes it at the time. [Note: adapters]
Labels = frozenset[str]


@dataclasses.dataclass(frozen=True)
class UnreadProducts:
    """Names, relative to the layer, of the Linears whose output is not needed in a refill or a recomputation.

    states: the states that a chunk ends with depend on something that is differentiated. [Note: states]
    """

    refill: Labels = frozenset()
    recompute: Labels = frozenset()
    states: bool = True


@dataclasses.dataclass(frozen=True)
class UnreadInHalves:
    """The same for a layer that is cut at its attention: Linears whose products are not needed for queries alone, for what
    the layer returns, or to differentiate either half. [Note: halves]"""

    for_queries: Labels = frozenset()
    for_output: Labels = frozenset()
    to_differentiate_before: Labels = frozenset()
    to_differentiate_after: Labels = frozenset()


def plain_linears(layer: nn.Module, adapted: Iterable[str] = ()) -> dict[str, nn.Linear]:
    """The layer's Linears that compute x @ W^T + b and nothing else, and those named here, whose adapters are computed with
    them: what is inside of these is not a Linear of its own.

    {} if anything watches the inside of the layer: a forward hook must see true values in recomputations too. Without those
    of indexers, which are called for a few queries at a time. [Note: indexers]
    Without those inside of compiled modules: a forward that changes between passes would be compiled anew for each.
    """
    inner = [module for module in layer.modules() if module is not layer]
    if any(not drops_masks(hook) for m in inner for table in MODULE_HOOKS for hook in getattr(m, table).values()):
        return {}
    apart = [*indexers_of(layer), *compiled_inside(layer)]
    inside = {id(module) for found in apart for module in found.modules()}
    known = set(adapted)
    for name in known:
        whole = layer.get_submodule(name)
        inside |= {id(module) for module in whole.modules() if module is not whole}
    return {
        name: module
        for name, module in layer.named_modules()
        if id(module) not in inside and (name in known or _is_plain(module))
    }


def _is_plain(module: nn.Module) -> bool:
    return computes_plainly(module) and "forward" not in module.__dict__ and type(module.weight) in PLAIN


def computes_plainly(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a Linear, or of a subclass that has a Linear's forward, and its weight and bias as they are: a subclass
    that computes in its own way (torchao's for quantisation in training) has gradients that its product does not tell."""
    kind = type(module)
    if kind is nn.Linear or not isinstance(module, nn.Linear):
        return kind is nn.Linear
    overridden = any(getattr(kind, name) is not getattr(nn.Linear, name) for name in ("forward", "__call__", "__getattr__"))
    return not overridden and not any(hasattr(kind, name) for name in ("weight", "bias"))


def hooked_everywhere() -> bool:
    """Whether torch's global hooks watch every module."""
    return any(map(vars(torch.nn.modules.module).__getitem__, GLOBAL_HOOKS))


PLAIN = (Tensor, nn.Parameter, FakeTensor)  # the last: a parameter of a model that is only counted


def is_factor(name: str) -> bool:
    """Whether it is a Linear of an adapter, whose output takes as long to read as to compute again."""
    return not set(name.split(".")).isdisjoint(LORA_FACTORS)


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names, in order, that a glob matches; an adapter's base layer goes by the name of the module it stands in."""
    return [name for name in names if any(fnmatch.fnmatch(name.removesuffix(".base_layer"), glob) for glob in patterns)]


Add = Callable[[Tensor, Tensor], None]
Cast = Callable[[torch.dtype], Tensor]
See = Callable[[str, Tensor], None]


@dataclasses.dataclass(eq=False)
class _Replaced:
    """Within, these modules have these forwards; what was there comes back."""

    forwards: dict[nn.Linear, Callable[[Tensor], Tensor]]

    def __enter__(self) -> None:
        self.before: list[tuple[dict[str, Any], Any]] = []
        for module, forward in self.forwards.items():
            own = module.__dict__
            self.before.append((own, own.get("forward")))
            own["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for own, found in self.before:
            own.pop("forward", None)
            if found is not None:
                own["forward"] = found


def summed(
    linears: dict[str, nn.Linear], sums: GradientSum, unread: Labels, witness: Witness | None = None
) -> contextlib.AbstractContextManager[None]:
    """Within, the weight gradients of these Linears are added to their sums by the products that make them.
    [Note: sums inside products]

    Args:
        unread: the names of those that return NaN, as in `left_out`. witness: sees the inputs of these. [Note: witness]
    """
    forwards: dict[nn.Linear, Callable[[Tensor], Tensor]] = {}
    for name in unread.intersection(linears) if sums.alone else linears:
        module = linears[name]
        weight, _ = weights_of(module)
        add = sums.adder(weight)
        cast = None if add is None else functools.partial(sums.cast, weight)
        sees = witness if witness is not None and name in unread and name in witness.left_out else None
        if name in unread or add is not None:
            forwards[module] = _adding(module, UNREAD if name in unread else None, add, cast, sees, name)
    return _Replaced(forwards)


def weights_of(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """A Linear's weight [out, in] and bias [out], from their slots: `module.weight` looks everywhere else first, and each
    chunk asks. Of a module with adapters its base's."""
    if ADAPTED in module.__dict__:
        module = module.base_layer  # type: ignore[assignment]
    slots = module.__dict__[PARAMETERS]
    return (slots["weight"], slots["bias"]) if "weight" in slots and "bias" in slots else (module.weight, module.bias)


def _adding(
    module: nn.Linear, value: Unread | None, add: Add | None, cast: Cast | None, witness: Witness | None, name: str
) -> Callable[[Tensor], Tensor]:
    """`_product` of x, for as long as the module keeps its weight."""
    weight, bias = weights_of(module)
    kind = weight.device.type
    has_adapters = ADAPTED in module.__dict__
    may_cast = torch.amp.is_autocast_available(kind)

    def forward(x: Tensor) -> Tensor:
        nonlocal value
        if witness is not None:
            witness.see(name, x)
            value = rows_of(x.shape[-2]) if witness.last and x.dim() > 1 and x.shape[-2] else UNREAD
        if has_adapters or (may_cast and torch.is_autocast_enabled(kind)):
            return _product(module, value, add, cast, x)
        out: Tensor = LinearWithKnownOutput.apply(x, weight, bias, value, add)
        return out

    return forward


def left_out(linears: dict[str, nn.Linear], names: Labels) -> contextlib.AbstractContextManager[None]:
    """Within, these Linears return NaN and know their backward."""
    chosen = [linears[name] for name in names if name in linears]
    return _Replaced({module: functools.partial(_product, module, UNREAD, None, None) for module in chosen})


def computed(linears: dict[str, nn.Linear], names: Iterable[str]) -> contextlib.AbstractContextManager[None]:
    """Within, these Linears compute their products and have the backward of those that are left out."""
    modules = [linears[name] for name in names if name in linears]
    return _Replaced({module: functools.partial(_product, module, None, None, None) for module in modules})


def tapped(
    linears: dict[str, nn.Linear],
    names: Iterable[str],
    sink: See | None = None,
    see: See | None = None,
    source: Callable[[str], Tensor | None] | None = None,
    sums: GradientSum | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Within, what goes into and out of each of these Linears is seen, or given, by its name.

    Args:
        sink: is given its output [..., out]. see: is given its input [..., in].
        source: gives its output, of which it knows the backward then; None: the Linear computes.
        sums: as in `summed`.
    """
    forwards: dict[nn.Linear, Callable[[Tensor], Tensor]] = {}
    for name in names:
        if name in linears:
            module, add, cast = linears[name], None, None
            if sums is not None:
                weight, _ = weights_of(module)
                add = sums.adder(weight)
                cast = None if add is None else functools.partial(sums.cast, weight)
            forwards[module] = functools.partial(_tapped, name, module, sink, see, source, add, cast)
    return _Replaced(forwards)


def _tapped(
    name: str,
    module: nn.Linear,
    sink: See | None,
    see: See | None,
    source: Callable[[str], Tensor | None] | None,
    add: Add | None,
    cast: Cast | None,
    x: Tensor,
) -> Tensor:
    if see is not None:
        see(name, x)
    value = None if source is None else source(name)
    if value is None and add is None and ADAPTED not in module.__dict__:
        out: Tensor = type(module).forward(module, x)
    else:
        out = _product(module, value, add, cast, x)
    if sink is not None:
        sink(name, out)
    return out


Unread = slice  # in place of a product that nobody reads: its rows that are computed all the same. [Note: witness]
UNREAD = Unread(0)  # none


def _product(module: nn.Linear, value: Tensor | Unread | None, add: Add | None, cast: Cast | None, x: Tensor) -> Tensor:
    """The module's output for x [..., in], if `value` is not it already."""
    if (adaptation := module.__dict__.get(ADAPTED)) is not None:
        found: Tensor = adaptation.product(x, value, add, cast)
        return found
    weight, bias = weights_of(module)
    dtype = cast_to(x)
    if value is UNREAD and not torch.is_grad_enabled():
        # In the dtype that the Linear would give; no weight is cast for it.
        return x.new_full((*x.shape[:-1], module.out_features), torch.nan, dtype=dtype or x.dtype)
    if dtype is not None:
        weight = weight.to(dtype) if cast is None else cast(dtype)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    out: Tensor = LinearWithKnownOutput.apply(x, weight, bias, value, add)
    return out


def cast_to(x: Tensor) -> torch.dtype | None:
    """What autocast makes of x [...]; None where it is off: it leaves float64 alone."""
    return None if x.dtype == torch.float64 else autocast_dtype(x.device.type)


class LinearWithKnownOutput(torch.autograd.Function):
    """x [..., in] @ W^T + b, with a Linear's gradients backward.

    Args:
        value: [..., out], if it need not be computed; `UNREAD`: nobody reads it, so it is NaN.
        add: takes the factors of the weight's gradient, which is None then. The weight is an input all the same: without
            it, an x that wants no gradient would leave the output without a graph.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor | Unread | None, add: Any
    ) -> Tensor:
        """[..., out]: `value` as a view, NaN for `UNREAD`, the product for None."""
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)
        ctx.add = add
        if value is None:
            return torch.nn.functional.linear(x, weight, bias)
        if isinstance(value, Unread):
            out = x.new_full((*x.shape[:-1], weight.shape[0]), torch.nan)
            if value is not UNREAD:
                out[..., value, :] = torch.nn.functional.linear(x[..., value, :], weight, bias)
            return out
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x [..., in], weight [out, in] and bias [out], from grad [..., out].

        The weight's is None if there is an `add`, which gets its factors.
        """
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        d_x = None if weight is None else (flat @ weight).view(*grad.shape[:-1], weight.shape[-1])  # [..., in]
        d_bias = flat.sum(0) if ctx.needs_input_grad[2] else None  # [out]
        d_weight = None
        if x is not None and ctx.add is not None:
            ctx.add(flat.mT, x.flatten(0, -2))
        elif x is not None:
            d_weight = flat.mT @ x.flatten(0, -2)  # [out, in]
        return d_x, d_weight, d_bias, None, None
