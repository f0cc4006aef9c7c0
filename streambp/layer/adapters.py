"""peft's LoRA Linears inside a layer. Most of them are computed as one operation. The others run
peft's own forward, and the reason is stored.

[Note: adapters] While a streamed layer runs, an `Adaptation` replaces the forward of each LoRA
Linear inside. The replacement computes the result of peft's forward as one operation
(`adapted_linear.py`). At all other times the modules are unchanged, so peft can switch, merge, save
or add adapters as usual. A module's factors are read again after the layer has changed. If peft's
forward does more than the two skinny products, the module keeps peft's forward, bit for bit, and
`describe` prints the reason.

Factors are computed from the adapters' values once for each call of the layer, and are freed when
its backward ends. The values are read from the parameters' slots: shadows in a backward, gathered
parameters under an engine. Backward computes the factors again if a parameter has changed, if an
engine or the host holds parameters between the passes, or if the factors are large (`call.py`).

Each adapter has its own dropout module. peft calls it on x in the adapters' dtype. Here the module
is called on ones of the same shape and dtype, so it draws the same random numbers. The nonzero
entries of its output are the mask, and its scale is multiplied into the factors.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from streambp.accumulate import HALF_DTYPES
from streambp.device import has_data, without_autocast
from streambp.foreign import compiled_submodules, home_of
from streambp.known_names import (
    LORA_LAYERS,
    LORA_OF_PACKED,
    MODULE_HOOKS,
    MODULE_TABLES,
    SHARED_INPUT_LINEARS,
)
from streambp.layer.adapted_linear import (
    AdaptedLinear,
    AdaptedLinearArguments,
    AdapterGroup,
    AdapterScale,
    Factor,
    SharedInput,
    SharedInputState,
    factor_of,
    join_factors,
)
from streambp.layer.expert_adapters import (
    FactoredExperts,
    LoraParameter,
    expert_kinds,
    read_experts,
)
from streambp.layer.float8_linears import CastOnce
from streambp.layer.products import (
    ADAPTATION_ATTRIBUTE,
    TENSOR_TYPES,
    UNREAD_OUTPUT,
    AddProduct,
    ComparedRows,
    WeightCast,
    computes_plainly,
    has_global_hooks,
    linear_autocast_dtype,
)
from streambp.offload.decoded_weights import (
    FORWARD,
    CountedPackedLinear,
    DecodedLinear,
    decoded_weight,
    has_packed_weight,
)
from streambp.tensors import memory_state

PARAMETERS_ATTRIBUTE = MODULE_TABLES[0]
# float16 is left out: rounding errors of its parts would underflow
ADAPTER_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class Adapter(NamedTuple):
    """One active LoRA adapter of a Linear.

    Attributes:
        a: the Linear with weight A [r, in].
        b: the Linear with weight B [out, r], and a bias [out] or None.
        dropout: peft's dropout module before A; nn.Identity: no dropout.
        scale: peft's scaling of the product with A and B.
    """

    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module
    scale: float

    @property
    def dropout_rate(self) -> float:
        """Return the probability of the dropout before A; 0 if the dropout is inactive."""
        if isinstance(self.dropout, nn.Dropout) and self.dropout.training:
            return float(self.dropout.p)
        return 0.0


@dataclasses.dataclass(eq=False)
class LoraLinear:
    """A LoRA Linear of peft, and the decision whether streambp computes it with `AdaptedLinear` or
    calls peft's own forward.

    Attributes:
        module: peft's module.
        base: the module's base Linear; None if `why` is set.
        adapters: the active adapters; () if `why` is set.
        why: the reason to call peft's own forward in every call; None: `AdaptedLinear` may run.
        why_in_call: the reason why peft's own forward ran in the last call; None: `AdaptedLinear`
            ran.
    """

    module: Any
    base: Any = None
    adapters: tuple[Adapter, ...] = ()
    why: str | None = None
    why_in_call: str | None = None

    @property
    def can_be_fused(self) -> bool:
        """True if `AdaptedLinear` computes this Linear instead of peft's forward: in the last call,
        or before the first call by what is known of the module. Only then may the Linear's output
        be saved or skipped."""
        return self.why is None and self.why_in_call is None


LoraModules = dict[str, LoraLinear | LoraParameter]


def lora_modules_of(layer: nn.Module) -> LoraModules:
    """Return the LoRA Linears of peft inside a layer, and the layer's expert parameters with LoRA
    adapters, by module name. Modules with merged, disabled or no active adapters are left out."""
    kinds = _kinds()
    if not kinds:
        return {}
    of_experts = expert_kinds()
    compiled = {id(inner) for module in compiled_submodules(layer) for inner in module.modules()}
    by_name: LoraModules = {}
    for name, module in layer.named_modules():
        if type(module) not in (*kinds, *of_experts):
            continue
        if module.disable_adapters or module.merged_adapters:
            continue
        if type(module) in of_experts:
            of_parameter = read_experts(module)
            if of_parameter is not None:
                by_name[name] = of_parameter
                if id(module) in compiled:
                    of_parameter.why = "it is compiled"
            continue
        lora_module = (
            LoraLinear(module, why="it is compiled") if id(module) in compiled else _read(module)
        )
        if lora_module.why is not None or lora_module.adapters:
            by_name[name] = lora_module
    return by_name


def keep_reasons(previous: LoraModules, current: LoraModules) -> None:
    """Copy the attribute `why_in_call` from earlier results of `lora_modules_of` to new ones, for
    the modules in both. The attribute is the reason why peft's own forward ran in the last call,
    and `describe` reports it.

    Args:
        previous: the earlier results, by module name.
        current: the new results, by module name; changed in place.
    """
    for name, lora_module in current.items():
        previous_module = previous.get(name)
        if previous_module is not None and previous_module.module is lora_module.module:
            lora_module.why_in_call = previous_module.why_in_call


def _kinds() -> tuple[Any, ...]:
    """Return the classes of peft's LoRA Linears, by which `lora_modules_of` finds them; () if peft
    is not imported."""
    plain, packed = sys.modules.get(LORA_LAYERS), sys.modules.get(LORA_OF_PACKED)
    kinds = () if plain is None else (plain.Linear,)
    if packed is None or not hasattr(packed, "Linear4bit"):
        return kinds
    return (*kinds, packed.Linear4bit)


def _read(module: Any) -> LoraLinear:
    base = module.base_layer
    names: list[str] = []
    parts: list[tuple[Any, Any, Any]] = []
    for name in module.active_adapters:
        if name in module.lora_A:
            names.append(name)
            parts.append((module.lora_A[name], module.lora_B[name], module.lora_dropout[name]))
    why = _why_not(module, base, names, parts)
    if why is not None:
        return LoraLinear(module, why=why)
    adapters: list[Adapter] = []
    for name, part in zip(names, parts, strict=True):
        adapters.append(Adapter(*part, float(module.scaling[name])))
    return LoraLinear(module, base, tuple(adapters))


def _why_not(
    module: Any, base: Any, names: list[str], parts: list[tuple[Any, Any, Any]]
) -> str | None:
    """Return the reason, as text for `describe`, to call peft's own forward of this LoRA Linear.
    None if peft's forward computes exactly x W^T plus the products with A and B, so that
    `AdaptedLinear` can replace it.

    Args:
        module: peft's module.
        base: the module's base Linear.
        names: names of the active adapters.
        parts: A, B and dropout of each active adapter.
    """
    if home_of(type(module).forward) not in (LORA_LAYERS, LORA_OF_PACKED) or FORWARD in vars(
        module
    ):
        return "its forward is another's"
    variants = {
        type(module.lora_variant[name]).__name__ for name in names if name in module.lora_variant
    }
    if variants:
        return f"it is a {' and a '.join(sorted(variants))}"
    if module.fan_in_fan_out:
        return "its weight is transposed"
    for inner in module.modules():
        if inner is module:
            continue
        if any(getattr(inner, table) for table in MODULE_HOOKS):
            return "there are hooks inside it"
        forward = vars(inner).get(FORWARD)
        if forward is not None and not isinstance(forward, DecodedLinear | CastOnce):
            return "the forward of a module inside it is another's"
    packed = has_packed_weight(base)
    if not packed and not (computes_plainly(base) and type(base.weight) in TENSOR_TYPES):
        return f"its base is a {type(base).__name__}"
    if not packed and base.weight.dtype not in ADAPTER_DTYPES:
        return f"its weight is {_dtype_name(base.weight.dtype)}"
    for a, b, dropout in parts:
        if not (computes_plainly(a) and computes_plainly(b) and a.bias is None):
            return f"its adapter is made of a {type(a).__name__} and a {type(b).__name__}"
        if type(a.weight) not in TENSOR_TYPES or type(b.weight) not in TENSOR_TYPES:
            return f"its adapter's weights are {type(a.weight).__name__}s"
        if type(dropout) not in (nn.Identity, nn.Dropout) or getattr(dropout, "p", 0.0) >= 1.0:
            return f"its dropout is a {dropout}"
    if not all(isinstance(module.scaling[name], int | float) for name in names):
        return "its scale is no number"
    return None


class CachedFactor(NamedTuple):
    """A cached `Factor` and the tensors it was computed from.

    Attributes:
        sources: the tensors. A reference keeps their memory from being reused for other tensors.
        state: memory address and version counter of each tensor when the factor was computed.
        factor: the factor.
    """

    sources: list[Tensor]
    state: list[Any]
    factor: Factor


Factors = dict[Any, CachedFactor]


def bytes_of(factors: Iterable[Factors]) -> int:
    """Return the bytes of the cached LoRA factors of several Linears. If these bytes are many, the
    factors are freed after forward, and backward computes them again.

    Args:
        factors: the cache of each Linear.
    """
    total = 0
    for of_linear in factors:
        for cached in of_linear.values():
            total += cached.factor.stack.nbytes
    return total


def _decodes(base: Any, x: Tensor) -> bool:
    """True if the forward of a Linear with a 4-bit weight equals F.linear(x, dequantized weight)
    for this x [..., in], without a cast of x or the weight. `AdaptedLinear` may then use the
    dequantized weight."""
    if isinstance(base, CountedPackedLinear):
        return x.dtype == base.compute_dtype
    return has_data(x) and DecodedLinear(base).decodes(x)


def _dtype_name(dtype: torch.dtype | None) -> str:
    """Return a dtype's name without "torch.", for messages."""
    return str(dtype).removeprefix("torch.")


@dataclasses.dataclass(eq=False)
class Adaptation:
    """Replacement for the forward of one of peft's LoRA Linears while its decoder layer runs. The
    result is that of peft's forward, computed as one operation. [Note: adapters]

    Attributes:
        lora_linear: the Linear with its base and its adapters.
        peft_forward: peft's forward, called with (module, x, ...).
        factors: cached LoRA matrices in the dtype of the matrix products. The keys are this dtype,
            followed by the adapter for A, or by the adapters' scales for B.
        siblings: this Linear and the Linears that may read the same x; None: there are no others.
    """

    lora_linear: LoraLinear
    peft_forward: Callable[..., Tensor]
    factors: Factors
    siblings: Siblings | None = None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the LoRA Linear's output [..., out] for x [..., in]. Calls with more arguments go
        to peft's forward."""
        if args or kwargs:
            return self.peft_forward(self.lora_linear.module, x, *args, **kwargs)
        return self.product(x)

    def product(
        self,
        x: Tensor,
        value: Tensor | ComparedRows | None = None,
        add: AddProduct | None = None,
        cast: WeightCast | None = None,
    ) -> Tensor:
        """Return the LoRA Linear's output [..., out] for x [..., in].

        Args:
            x: [..., in].
            value: None: compute the output. A tensor [..., out]: the output that forward has saved;
                return a view of it. A slice: no code reads the output, so compute only these rows,
                which are compared with forward; all other rows are NaN. `UNREAD_OUTPUT`, the empty
                slice: compute no row.
            add: callback for backward: gets two matrices [out, n] and [n, in], and adds their
                product to the sum of the weight's gradient over chunks. None: autograd returns the
                gradient.
            cast: function of a dtype that returns the base's weight in this dtype, cast once for
                all chunks; None: cast in each call.
        """
        dtype = linear_autocast_dtype(x)
        self.lora_linear.why_in_call = self.why_not(x, dtype or x.dtype)
        if self.lora_linear.why_in_call is not None:
            return self.peft_forward(self.lora_linear.module, x)
        weight, bias = self._base(x, dtype, cast)
        caller_input, masks = x, [self._mask(x, adapter) for adapter in self.lora_linear.adapters]
        if value is UNREAD_OUTPUT and not torch.is_grad_enabled():
            return x.new_full((*x.shape[:-1], weight.shape[0]), torch.nan, dtype=dtype or x.dtype)
        x = x if dtype is None else x.to(dtype)
        shared = None
        if self.siblings is not None and all(mask is None for mask in masks):
            shared = self.siblings.share_input(caller_input, x, self)
        if shared is None:
            work, tensors = self._work(x.dtype, masks, value, add)
        else:
            x, values, index = shared
            work, tensors = self._work(x.dtype, masks, value, add, values.factors[index])
            work.shared = values
            work.member_index = index
        out: Tensor = AdaptedLinear.apply(work, x, weight, bias, *tensors)  # type: ignore[no-untyped-call]
        return out

    def why_not(self, x: Tensor, dtype: torch.dtype) -> str | None:
        """Return the reason, as text for `describe`, to call peft's own forward for this input x
        [..., in]. None if `AdaptedLinear` has at least the precision of peft's forward.

        Args:
            x: the Linear's input.
            dtype: the dtype of the matrix products.
        """
        module, base = self.lora_linear.module, self.lora_linear.base
        if type(x) not in TENSOR_TYPES or x.dim() < 2 or not x.numel():
            return "its input is no tensor [..., tokens, features] with entries"
        if dtype not in ADAPTER_DTYPES:
            return f"it is computed in {_dtype_name(dtype)}"
        adapter_dtypes: set[torch.dtype] = set()
        for adapter in self.lora_linear.adapters:
            for tensor in _tensors(adapter):
                if tensor is not None:
                    adapter_dtypes.add(tensor.dtype)
        if not (
            adapter_dtypes <= {dtype, torch.float32}
            if dtype in HALF_DTYPES
            else adapter_dtypes == {dtype}
        ):
            kinds = " and ".join(sorted(map(_dtype_name, adapter_dtypes)))
            return f"its adapter is {kinds}, and it is computed in {_dtype_name(dtype)}"
        if linear_autocast_dtype(x) is None and not (
            getattr(module, "cast_input_dtype_enabled", True) or adapter_dtypes == {dtype}
        ):
            return "peft's casts of inputs are switched off"
        if has_packed_weight(base):
            if x.dtype != dtype or not _decodes(base, x):
                return (
                    f"its 4-bit base computes in {_dtype_name(base.compute_dtype)}, and its input "
                    "is "
                    f"{_dtype_name(x.dtype)}"
                )
        elif linear_autocast_dtype(x) is None and _current_weight(base).dtype != dtype:
            return (
                f"its weight is {_dtype_name(_current_weight(base).dtype)}, and its input is "
                f"{_dtype_name(dtype)}"
            )
        return None

    def _base(
        self, x: Tensor, dtype: torch.dtype | None, cast: WeightCast | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the base Linear's weight [out, in] and bias [out] in the dtype of the matrix
        products.

        Args:
            x: the Linear's input [..., in].
            dtype: the dtype that autocast casts to; None: weight and bias are not cast.
            cast: function of a dtype that returns the weight in this dtype, cast once for all
                chunks; None: cast in each call.
        """
        base = self.lora_linear.base
        slots = vars(base)[PARAMETERS_ATTRIBUTE]
        bias = slots["bias"]
        if has_packed_weight(base):
            return decoded_weight(base), bias
        weight = slots["weight"]
        if dtype is None:
            return weight, bias
        weight = weight.to(dtype) if cast is None else cast(dtype)
        return weight, None if bias is None else bias.to(dtype)

    def _mask(self, x: Tensor, adapter: Adapter) -> Tensor | None:
        """Return the mask [n, in] of the adapter's dropout for x [..., in], True for entries that
        stay; None without dropout.

        The dropout module is called on ones, and draws the same random numbers as in peft's
        forward.
        """
        if not adapter.dropout_rate:
            return None
        packed = has_packed_weight(self.lora_linear.base) and torch.is_autocast_enabled()
        dtype = x.dtype if packed else _current_weight(adapter.a).dtype
        with torch.no_grad():
            dropped_ones: Tensor = adapter.dropout(torch.ones_like(x, dtype=dtype))
            return (dropped_ones != 0).flatten(0, -2)

    def _work(
        self,
        dtype: torch.dtype,
        masks: list[Tensor | None],
        value: Tensor | ComparedRows | None,
        add: AddProduct | None,
        factor: Factor | None = None,
    ) -> tuple[AdaptedLinearArguments, list[Tensor | None]]:
        """Return two arguments of `AdaptedLinear.apply`: an `AdaptedLinearArguments`, and a flat
        list of each adapter's A [r, in], B [out, r] and B's bias [out] or None.

        Args:
            dtype: dtype of the matrix products.
            masks: dropout mask [n, in] of each adapter's input, from `_mask`; None: no dropout.
            value: None: compute the output. A tensor [..., out]: the output that forward has saved;
                return a view of it. A slice: no code reads the output, so compute only these rows,
                which are compared with forward; all other rows are NaN. `UNREAD_OUTPUT`, the empty
                slice: compute no row.
            add: callback for backward: gets two matrices [out, n] and [n, in], and adds their
                product to the sum of the weight's gradient over chunks. None: autograd returns the
                gradient.
            factor: the A matrices of all adapters, concatenated; None: read this factor from the
                cache, or compute it. Ignored if an adapter has dropout.
        """
        adapters, base = self.lora_linear.adapters, self.lora_linear.base
        scales = []
        for adapter, mask in zip(adapters, masks, strict=True):
            keep_probability = 1.0 if mask is None else 1.0 - adapter.dropout_rate
            scales.append(
                AdapterScale(
                    _current_weight(adapter.a).shape[0],
                    adapter.scale / keep_probability,
                    adapter.scale,
                )
            )
        groups, start = [], 0
        if all(mask is None for mask in masks):
            factor = self.a(dtype) if factor is None else factor
            groups.append(AdapterGroup(factor, 0, sum(scale.rank for scale in scales)))
        else:
            for adapter, scale, mask in zip(adapters, scales, masks, strict=True):
                groups.append(AdapterGroup(self.a(dtype, adapter), start, start + scale.rank, mask))
                start += scale.rank
        decode = functools.partial(decoded_weight, base) if has_packed_weight(base) else None
        work = AdaptedLinearArguments(groups, self._b(dtype, scales), scales, value, add, decode)
        return work, [tensor for adapter in adapters for tensor in _tensors(adapter)]

    def a(self, dtype: torch.dtype, adapter: Adapter | None = None) -> Factor:
        """Return the matrix A of one adapter as a `Factor`, cached.

        Args:
            dtype: dtype of the matrix products.
            adapter: the adapter; None: all adapters of this Linear, whose A matrices are
                concatenated.
        """
        adapters = self.lora_linear.adapters if adapter is None else (adapter,)
        matrices = [_current_weight(entry.a) for entry in adapters]
        return self._cached_factor(
            (dtype, adapter), matrices, lambda: factor_of(_join_stacks(matrices), dtype)
        )

    def _b(self, dtype: torch.dtype, scales: list[AdapterScale]) -> Factor:
        """Return the matrices B of all adapters, transposed, scaled and concatenated, as a
        `Factor`, cached. The biases of the base and of B are further rows.

        Args:
            dtype: the dtype of the matrix products.
            scales: scale factors of each adapter.
        """
        bias = vars(self.lora_linear.base)[PARAMETERS_ATTRIBUTE]["bias"]
        tensors = [
            *itertools.chain(*(_tensors(adapter)[1:] for adapter in self.lora_linear.adapters)),
            bias,
        ]

        def make() -> Factor:
            scaled = [
                b.mT * scale.b
                for b, scale in zip(tensors[:-1:2], scales, strict=True)
                if b is not None
            ]
            pairs = zip(tensors[1:-1:2], scales, strict=True)
            rows = [
                bias,
                *(
                    None if adapter_bias is None else adapter_bias * scale.bias
                    for adapter_bias, scale in pairs
                ),
            ]
            return factor_of(
                _join_stacks(scaled), dtype, tuple(row for row in rows if row is not None)
            )

        return self._cached_factor((dtype, *(scale.b for scale in scales)), tensors, make)

    def _cached_factor(self, key: Any, tensors: list[Any], make: Callable[[], Factor]) -> Factor:
        """Return `make()`, cached until one of `tensors` is replaced or written to.

        Args:
            key: key of the factor in the cache `factors`.
            tensors: the tensors from which `make` computes the factor; None for missing ones.
            make: computes the factor.
        """
        state = list(map(memory_state, tensors))
        cached = self.factors.get(key)
        if cached is not None and cached.state == state:
            return cached.factor
        with torch.no_grad():
            factor = make()
        self.factors[key] = CachedFactor(
            [tensor.detach() for tensor in tensors if tensor is not None], state, factor
        )
        return factor


@dataclasses.dataclass(eq=False)
class Siblings:
    """LoRA Linears of one module that may read the same x, as query, key and value projections do.
    The member that is called first computes x A^T for all members.

    Attributes:
        members: the `Adaptation` of each Linear.
        record: values of the first member's call that the next members reuse. None: no member has
            been called, or all have. The tuple contains x as the first member got it, and a pair
            (version counter of x, grad mode). The products x A^T of all members follow, x in the
            compute dtype, and the indices of the members that were called.
        joined: pair of the list of the members' A matrices, and these matrices concatenated by
            `join_factors`; None: not computed.
    """

    members: list[Adaptation] = dataclasses.field(default_factory=list)
    record: tuple[Tensor, tuple[int, bool], SharedInputState, Tensor, set[int]] | None = None
    joined: tuple[list[Factor], Factor] | None = None

    def share_input(
        self, tensor: Tensor, x: Tensor, member: Adaptation
    ) -> tuple[Tensor, SharedInputState, int] | None:
        """Return x [..., in] in the compute dtype for one of the Linears, the values that all of
        the Linears share, and the Linear's index in these values. The first of the Linears to be
        called computes x A^T for all of them.

        Return None if the Linears cannot share a product. Reasons are an active dropout of an
        adapter, a Linear for which peft's own forward runs, an inference tensor, and A matrices
        with different numbers of parts (`Factor.parts`).

        Args:
            tensor: the Linear's input [..., in] as passed by the caller, by which calls with the
                same x are recognized.
            x: the input [..., in] in the compute dtype.
            member: the `Adaptation` of the Linear, one of `members`.
        """
        index = self.members.index(member)
        if tensor.is_inference():
            return None
        record, state = self.record, (tensor._version, torch.is_grad_enabled())
        if record is None or record[0] is not tensor or record[1] != state or index in record[4]:
            shared = self._start_sharing(tensor, x)
            record = self.record = None if shared is None else (tensor, state, *shared, set())
        if record is None:
            return None
        record[4].add(index)
        if len(record[4]) == len(self.members):
            self.record = None  # free x as early as in the unpatched model
        return record[3], record[2], index

    def _start_sharing(
        self, caller_input: Tensor, x: Tensor
    ) -> tuple[SharedInputState, Tensor] | None:
        if any(
            adapter.dropout_rate
            for sibling in self.members
            for adapter in sibling.lora_linear.adapters
        ):
            return None
        if any(sibling.why_not(caller_input, x.dtype) is not None for sibling in self.members):
            return None
        factors = [sibling.a(x.dtype) for sibling in self.members]
        if len({factor.parts for factor in factors}) > 1:
            return None
        if self.joined is None or any(map(operator.is_not, self.joined[0], factors)):
            with torch.no_grad():
                self.joined = factors, join_factors(factors)
        needs_x = x.requires_grad and torch.is_grad_enabled()
        shared = SharedInputState(factors, self.joined[1], needs_x)
        if torch.is_grad_enabled():
            a = [
                [_current_weight(adapter.a) for adapter in sibling.lora_linear.adapters]
                for sibling in self.members
            ]
            counts = [len(tensors) for tensors in a]
            x = SharedInput.apply(shared, counts, x, *itertools.chain(*a))  # type: ignore[no-untyped-call]
        else:
            with without_autocast(x.device.type):
                shared.read(x.flatten(0, -2))
        return shared, x


def _join_stacks(matrices: list[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def _current_weight(linear: nn.Linear) -> Tensor:
    """Return a Linear's current weight [out, in], read directly from `_parameters`. During
    streambp's backward this entry is a detached alias of the parameter."""
    weight: Tensor = vars(linear)[PARAMETERS_ATTRIBUTE]["weight"]
    return weight


def _tensors(adapter: Adapter) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the adapter's current A [r, in], B [out, r] and B's bias [out] or None, read directly
    from `_parameters`."""
    return (
        _current_weight(adapter.a),
        _current_weight(adapter.b),
        vars(adapter.b)[PARAMETERS_ATTRIBUTE]["bias"],
    )


@contextlib.contextmanager
def fuse_adapters(
    lora_modules: LoraModules, factors: dict[str, Factors] | None = None
) -> Iterator[None]:
    """Context manager for a decoder layer's forward, in which streambp computes peft's LoRA
    adapters. Each LoRA Linear computes base and adapters in one operation (`AdaptedLinear`).
    Experts with adapters read the sum of weight and adapters (`FactoredWeight`).

    Nothing changes while hooks for all modules (`register_module_forward_hook`) are registered,
    because such hooks may need the modules inside a LoRA Linear.

    Args:
        lora_modules: the LoRA Linears and adapted parameters of experts by module name. Modules
            with a reason `why` use peft's own forward.
        factors: cached LoRA matrices by module name, read and written; None: a new cache, dropped
            at the end of the context.
    """
    factors = {} if factors is None else factors
    adaptations: list[Adaptation] = []
    changed_tables: list[dict[str, Any]] = []
    groups: dict[tuple[str, int], Siblings] = {}
    # reads `changed_tables` when consumed
    restore = itertools.chain(
        map(dict.pop, changed_tables, itertools.repeat(FORWARD), itertools.repeat(None)),
        map(
            dict.pop, changed_tables, itertools.repeat(ADAPTATION_ATTRIBUTE), itertools.repeat(None)
        ),
    )
    try:
        for name, lora_module in lora_modules.items() if not has_global_hooks() else ():
            attributes = vars(lora_module.module)
            if lora_module.why is not None or ADAPTATION_ATTRIBUTE in attributes:
                continue
            if isinstance(lora_module, LoraParameter):
                if FORWARD not in attributes:  # a context outside of this one has replaced it
                    changed_tables.append(attributes)
                    attributes[FORWARD] = FactoredExperts(
                        lora_module, type(lora_module.module).forward
                    )
                continue
            cache = factors.setdefault(name, {})
            adaptation = Adaptation(lora_module, type(lora_module.module).forward, cache)
            adaptations.append(adaptation)
            changed_tables.append(attributes)
            attributes[FORWARD] = attributes[ADAPTATION_ATTRIBUTE] = adaptation
            parent, _, last = name.rpartition(".")
            number = SHARED_INPUT_LINEARS.get(last)
            if number is not None:
                groups.setdefault((parent, number), Siblings()).members.append(adaptation)
        for siblings in groups.values():
            for member in siblings.members if len(siblings.members) > 1 else ():
                member.siblings = siblings
        yield
    finally:
        collections.deque(restore, maxlen=0)  # one call in C, which Ctrl-C cannot end half-way
        # in a reference cycle, factors and the last input would stay until a garbage collection
        for adaptation in adaptations:
            adaptation.factors = {}
        for siblings in groups.values():
            siblings.members.clear()
            siblings.record = siblings.joined = None
