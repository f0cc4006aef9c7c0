"""Linear outputs that a recomputation can skip because no operation reads their values.

The refill of K and V needs no queries. The recomputation of a chunk needs no output of the layer's
last Linear, because the Linear's backward reads its input and weight only. A Qwen3-8B layer saves
2.3 % and 6.5 % of a step's Linear FLOPs this way. The set of unread outputs follows from the
layer's own data flow, so it is traced, not listed (`data_flow.py`). A skipped output is filled with
NaN, so that a wrong trace is noticed. A trace's result is tested before use (`trials.py`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from streambp.accumulate import GradientSum
from streambp.attention.indexers import indexers_of
from streambp.device import autocast_dtype
from streambp.distributed.engines import drops_masks
from streambp.foreign import compiled_submodules
from streambp.known_names import GLOBAL_HOOKS, LORA_FACTORS, MODULE_HOOKS, MODULE_TABLES
from streambp.layer.witness import Witness, rows_of
from streambp.offload.decoded_weights import FORWARD
from streambp.tensors import strip_view

PARAMETERS_ATTRIBUTE = MODULE_TABLES[0]
# attribute of an adapted module for its `Adaptation`. [Note: adapters]
ADAPTATION_ATTRIBUTE = "_streambp_adapted"
LinearNames = frozenset[str]


@dataclasses.dataclass(frozen=True)
class UnreadProducts:
    """Names of the Linears of a layer whose outputs backward never reads, so that a recomputation
    need not compute these outputs. Names are relative to the layer.

    Attributes:
        refill: Linears to skip when only keys and values are recomputed.
        recompute: Linears to skip when a chunk is recomputed and differentiated. An example is the
            layer's last Linear, whose gradients follow from its input and weight.
        states: True if a chunk's recurrent end states depend on a tensor that needs a gradient, so
            that gradients must pass through states to earlier chunks.
    """

    refill: LinearNames = frozenset()
    recompute: LinearNames = frozenset()
    states: bool = True


@dataclasses.dataclass(frozen=True)
class UnreadInHalves:
    """Names of the Linears whose outputs are never read, for a layer whose sequence is split over
    ranks. Such a layer is computed in two halves, because ranks exchange keys and values in
    between. The first half computes queries, keys and values. The second half gets attention's
    output and computes the layer's output.

    Attributes:
        for_queries: Linears to skip when the first half computes the queries alone. If the layer's
            own code computes attention, the second half computes the queries. The names are then of
            Linears to skip when the first half computes keys and values.
        for_output: Linears to skip when the second half computes the layer's output, without a
            graph.
        to_differentiate_before: Linears to skip when the first half is recomputed and
            differentiated.
        to_differentiate_after: Linears to skip when the second half is recomputed and
            differentiated.
    """

    for_queries: LinearNames = frozenset()
    for_output: LinearNames = frozenset()
    to_differentiate_before: LinearNames = frozenset()
    to_differentiate_after: LinearNames = frozenset()


def plain_linears(layer: nn.Module, adapted: Iterable[str] = ()) -> dict[str, nn.Linear]:
    """Return the layer's Linears that compute x @ W^T + b and nothing else, by name. The outputs of
    these Linears may be saved or skipped, and their weight gradients may be summed over chunks.

    Linears of indexers (sparse attention) are left out, because indexers are called for a few
    queries at a time. [Note: indexers] Linears inside compiled modules are left out, because
    replacing a forward would recompile them. The result is {} if modules inside the layer have
    hooks, which must get true values in recomputations too.

    Args:
        layer: the decoder layer.
        adapted: names of LoRA Linears to include; the modules inside them are left out.
    """
    inner = [module for module in layer.modules() if module is not layer]
    if any(
        not drops_masks(hook)
        for m in inner
        for table in MODULE_HOOKS
        for hook in getattr(m, table).values()
    ):
        return {}
    excluded = [*indexers_of(layer), *compiled_submodules(layer)]
    inner_ids = {id(module) for excluded_module in excluded for module in excluded_module.modules()}
    adapted_names = set(adapted)
    for name in adapted_names:
        wrapper = layer.get_submodule(name)
        inner_ids |= {id(module) for module in wrapper.modules() if module is not wrapper}
    return {
        name: module
        for name, module in layer.named_modules()
        if id(module) not in inner_ids and (name in adapted_names or _is_plain(module))
    }


def _is_plain(module: nn.Module) -> bool:
    return (
        computes_plainly(module)
        and "forward" not in module.__dict__
        and type(module.weight) in TENSOR_TYPES
    )


def computes_plainly(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True if the module is an nn.Linear, or of a subclass with the same forward, weight and bias.
    Other subclasses, such as torchao's, have other gradients than x @ W^T + b. No output of such a
    module is saved or skipped."""
    kind = type(module)
    if kind is nn.Linear or not isinstance(module, nn.Linear):
        return kind is nn.Linear
    overridden = any(
        getattr(kind, name) is not getattr(nn.Linear, name)
        for name in ("forward", "__call__", "__getattr__")
    )
    return not overridden and not any(hasattr(kind, name) for name in ("weight", "bias"))


def has_global_hooks() -> bool:
    """True if hooks are registered with torch's `register_module_forward_hook` and its like, which
    apply to all modules. Such hooks may need every Linear's true output."""
    return any(map(vars(torch.nn.modules.module).__getitem__, GLOBAL_HOOKS))


TENSOR_TYPES = (Tensor, nn.Parameter, FakeTensor)  # FakeTensor: a model that is only counted


def is_factor(name: str) -> bool:
    """True if a Linear of this name is a LoRA adapter's `lora_A` or `lora_B`. `saves="auto"` does
    not save the outputs of these Linears, because reading an output would take as long as computing
    the product."""
    return not set(name.split(".")).isdisjoint(LORA_FACTORS)


def match_names(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return those of the Linears' `names` that one of the glob patterns in `patterns` matches, in
    the order of `names`. The base layer of a LoRA Linear is matched by the name of the LoRA Linear.

    Args:
        names: names of Linears in the layer.
        patterns: glob patterns from `StreamConfig.saves`.
    """
    return [
        name
        for name in names
        if any(fnmatch.fnmatch(name.removesuffix(".base_layer"), glob) for glob in patterns)
    ]


AddProduct = Callable[[Tensor, Tensor], None]
WeightCast = Callable[[torch.dtype], Tensor]
TensorCallback = Callable[[str, Tensor], None]


@contextlib.contextmanager
def swap_forwards(forwards: dict[nn.Linear, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Context manager that replaces the `forward` of Linears, and restores it at the end. The
    functions are set on the instances.

    Args:
        forwards: dict from a Linear to the function that replaces its forward. The function gets x
            [..., in] and returns the output [..., out].
    """
    changed_tables = list(map(vars, forwards))
    earlier = []
    for attributes in changed_tables:
        if FORWARD in attributes:
            earlier.append((attributes, FORWARD, attributes[FORWARD]))
    restore = itertools.chain(
        map(dict.pop, changed_tables, itertools.repeat(FORWARD), itertools.repeat(None)),
        itertools.starmap(operator.setitem, earlier),
    )
    try:
        for module, forward in forwards.items():
            vars(module)[FORWARD] = forward
        yield
    finally:
        collections.deque(restore, maxlen=0)  # one call in C, which Ctrl-C cannot end half-way


def sum_weight_gradients(
    linears: dict[str, nn.Linear],
    sums: GradientSum,
    unread: LinearNames,
    witness: Witness | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for the recomputation and backward of a layer's chunks, in which the
    backward of Linears adds each chunk's weight gradient directly to the sum over chunks. Otherwise
    autograd would make each chunk's gradient as a tensor of its own. If there is only one chunk,
    autograd returns the gradients as usual.

    Args:
        linears: the layer's Linears by name.
        sums: the sums of the parameters' gradients over the chunks.
        unread: names of the Linears whose outputs no code reads in this recomputation; these return
            NaN, as in `skip_outputs`.
        witness: compares the inputs of the Linears in `unread` with those of forward; None: inputs
            are not compared. [Note: witness]
    """
    forwards: dict[nn.Linear, Callable[[Tensor], Tensor]] = {}
    for name in unread.intersection(linears) if sums.is_single_chunk else linears:
        module = linears[name]
        weight, _ = weights_of(module)
        add = sums.adder(weight)
        cast = None if add is None else functools.partial(sums.cast, weight)
        sees = (
            witness if witness is not None and name in unread and name in witness.left_out else None
        )
        if name in unread or add is not None:
            forwards[module] = _summing_forward(
                module, UNREAD_OUTPUT if name in unread else None, add, cast, sees, name
            )
    return swap_forwards(forwards)


def weights_of(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return a Linear's weight [out, in] and bias [out], for a LoRA Linear those of its base. Both
    are read from `_parameters`, because `module.weight` is slower and each chunk reads both."""
    if ADAPTATION_ATTRIBUTE in module.__dict__:
        module = module.base_layer  # type: ignore[assignment]
    slots = module.__dict__[PARAMETERS_ATTRIBUTE]
    if "weight" in slots and "bias" in slots:
        return (slots["weight"], slots["bias"])
    return (module.weight, module.bias)


def _summing_forward(
    module: nn.Linear,
    value: ComparedRows | None,
    add: AddProduct | None,
    cast: WeightCast | None,
    witness: Witness | None,
    name: str,
) -> Callable[[Tensor], Tensor]:
    """Return a replacement for this Linear's forward. The replacement computes the output [...,
    out] from x [..., in], and passes x to the witness. Valid while the module keeps its weight.

    Args:
        module: the Linear.
        value: `UNREAD_OUTPUT`: no code reads the output, so it is NaN, except for a few rows that
            the witness compares; None: compute the output.
        add: callback for backward: gets two matrices [out, n] and [n, in], and adds their product
            to the sum of the weight's gradient over chunks. None: autograd returns the gradient.
        cast: function of a dtype that returns the weight in this dtype, cast once for all chunks;
            None: cast in each call.
        witness: compares the Linear's inputs with those of forward; None: there is no comparison.
        name: name of the Linear in the layer.
    """
    weight, bias = weights_of(module)
    kind = weight.device.type
    has_adapters = ADAPTATION_ATTRIBUTE in module.__dict__
    may_cast = torch.amp.is_autocast_available(kind)

    def forward(x: Tensor) -> Tensor:
        nonlocal value
        if witness is not None:
            witness.see(name, x)
            value = (
                rows_of(x.shape[-2])
                if witness.last and x.dim() > 1 and x.shape[-2]
                else UNREAD_OUTPUT
            )
        if has_adapters or (may_cast and torch.is_autocast_enabled(kind)):
            return _product(module, value, add, cast, x)
        out: Tensor = LinearWithKnownOutput.apply(x, weight, bias, value, add)
        return out

    return forward


def skip_outputs(
    linears: dict[str, nn.Linear], names: LinearNames
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which Linears return NaN instead of computing their output. Only
    for Linears whose output values no code reads. The Linears' backward computes the usual
    gradients, which do not depend on the output.

    Args:
        linears: the layer's Linears by name.
        names: names of the Linears to skip; names that are not in `linears` are ignored.
    """
    skipped = [linears[name] for name in names if name in linears]
    return swap_forwards(
        {
            module: functools.partial(_product, module, UNREAD_OUTPUT, None, None)
            for module in skipped
        }
    )


def compute_outputs(
    linears: dict[str, nn.Linear], names: Iterable[str]
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which Linears compute their output as usual, but by the autograd
    Function of `skip_outputs`. A test compares gradients with and without skipped outputs to the
    bit, and both runs must use the same Function.

    Args:
        linears: the layer's Linears by name.
        names: names of these Linears; names that are not in `linears` are ignored.
    """
    modules = [linears[name] for name in names if name in linears]
    return swap_forwards(
        {module: functools.partial(_product, module, None, None, None) for module in modules}
    )


def tap_linears(
    linears: dict[str, nn.Linear],
    names: Iterable[str],
    sink: TensorCallback | None = None,
    see: TensorCallback | None = None,
    source: Callable[[str], Tensor | None] | None = None,
    sums: GradientSum | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Context manager that shows the inputs and outputs of Linears to callbacks, or replaces their
    outputs by saved ones.

    Args:
        linears: the layer's Linears by name.
        names: names of the Linears to change; names that are not in `linears` are ignored.
        sink: callback, gets a Linear's name and its output [..., out]; None: no callback.
        see: callback, gets a Linear's name and its input [..., in]; None: no callback.
        source: function of a Linear's name: returns the saved output, or None if the Linear must
            compute it. None: all Linears compute their outputs.
        sums: adds up the weights' gradients over the chunks inside the Linears' backward; None:
            autograd returns each chunk's gradient.
    """
    forwards: dict[nn.Linear, Callable[[Tensor], Tensor]] = {}
    for name in names:
        if name in linears:
            module, add, cast = linears[name], None, None
            if sums is not None:
                weight, _ = weights_of(module)
                add = sums.adder(weight)
                cast = None if add is None else functools.partial(sums.cast, weight)
            forwards[module] = functools.partial(
                _tap_linear, name, module, sink, see, source, add, cast
            )
    return swap_forwards(forwards)


def _tap_linear(
    name: str,
    module: nn.Linear,
    sink: TensorCallback | None,
    see: TensorCallback | None,
    source: Callable[[str], Tensor | None] | None,
    add: AddProduct | None,
    cast: WeightCast | None,
    x: Tensor,
) -> Tensor:
    if see is not None:
        see(name, x)
    value = None if source is None else source(name)
    if value is None and add is None and ADAPTATION_ATTRIBUTE not in module.__dict__:
        out: Tensor = type(module).forward(module, x)
    else:
        out = _product(module, value, add, cast, x)
    if sink is not None:
        sink(name, out)
    return out


ComparedRows = (
    slice  # replaces an unread product: the rows to compute for comparison. [Note: witness]
)
UNREAD_OUTPUT = ComparedRows(0)  # none


def _product(
    module: nn.Linear,
    value: Tensor | ComparedRows | None,
    add: AddProduct | None,
    cast: WeightCast | None,
    x: Tensor,
) -> Tensor:
    """Return the Linear's output [..., out] for x [..., in], or `value` if that is a tensor.

    Args:
        module: the Linear, or a LoRA Linear.
        value: None: compute the output. A tensor [..., out]: the output that forward has saved;
            return a view of it. A slice: no code reads the output, so compute only these rows,
            which are compared with forward; all other rows are NaN. `UNREAD_OUTPUT`, the empty
            slice: compute no row.
        add: callback for backward: gets two matrices [out, n] and [n, in], and adds their product
            to the sum of the weight's gradient over chunks. None: autograd returns the gradient.
        cast: function of a dtype that returns the weight in this dtype, cast once for all chunks;
            None: cast in each call.
        x: [..., in].
    """
    if (adaptation := module.__dict__.get(ADAPTATION_ATTRIBUTE)) is not None:
        output: Tensor = adaptation.product(x, value, add, cast)
        return output
    weight, bias = weights_of(module)
    dtype = linear_autocast_dtype(x)
    if value is UNREAD_OUTPUT and not torch.is_grad_enabled():
        # The dtype of the Linear's output, without casting the weight.
        return x.new_full((*x.shape[:-1], module.out_features), torch.nan, dtype=dtype or x.dtype)
    if dtype is not None:
        weight = weight.to(dtype) if cast is None else cast(dtype)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    out: Tensor = LinearWithKnownOutput.apply(x, weight, bias, value, add)
    return out


def linear_autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts a Linear's input x [...]; None if autocast is off
    for x's device, or if x is float64."""
    return None if x.dtype == torch.float64 else autocast_dtype(x.device.type)


class LinearWithKnownOutput(torch.autograd.Function):
    """Autograd Function of a Linear, x [..., in] @ W^T + b, which may return a saved output instead
    of computing it. Backward computes the same gradients in both cases."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        value: Tensor | ComparedRows | None,
        add: Any,
    ) -> Tensor:
        """Return the output [..., out].

        Args:
            x: [..., in].
            weight: [out, in]. The weight is an input even if `add` is given: otherwise the output
                would have no graph if x requires no gradient.
            bias: [out].
            value: None: compute the output. A tensor [..., out]: the output that forward has saved;
                return a view of it. A slice: no code reads the output, so compute only these rows,
                which are compared with forward; all other rows are NaN. `UNREAD_OUTPUT`, the empty
                slice: compute no row.
            add: callback for backward: gets two matrices [out, n] and [n, in], and adds their
                product to the sum of the weight's gradient over chunks. None: autograd returns the
                gradient.
        """
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)
        ctx.add = add
        if value is None:
            computed = torch.nn.functional.linear(x, weight, bias)
            return strip_view(computed) if computed._is_view() else computed
        if isinstance(value, ComparedRows):
            out = x.new_full((*x.shape[:-1], weight.shape[0]), torch.nan)
            if value is not UNREAD_OUTPUT:
                out[..., value, :] = torch.nn.functional.linear(x[..., value, :], weight, bias)
            return out
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of forward's arguments, from the output's gradient `grad` [...,
        out]: x [..., in], weight [out, in], bias [out]. None follows for `value`, the saved output,
        and for `add`.

        If the argument `add` of forward is a function, the weight's entry is None as well. The
        function then adds the weight's gradient, the product of two matrices, to a sum over chunks.
        """
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        # [..., in]
        d_x = None if weight is None else (flat @ weight).view(*grad.shape[:-1], weight.shape[-1])
        d_bias = flat.sum(0) if ctx.needs_input_grad[2] else None  # [out]
        d_weight = None
        if x is not None and ctx.add is not None:
            ctx.add(flat.mT, x.flatten(0, -2))
        elif x is not None:
            d_weight = flat.mT @ x.flatten(0, -2)  # [out, in]
        return d_x, d_weight, d_bias, None, None
