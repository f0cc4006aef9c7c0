"""torchao's float8 Linears inside a layer, whose weights are cast once for each pass.

A `Float8Linear` casts its weight to float8 in each call, and again in the backward of each call. If
each row has its own scale, the second cast is another one, along the weight's other dimension. A
streamed layer calls its Linears once for each chunk. While a streamed layer runs, a `CastOnce`
therefore replaces the forward of each float8 Linear, and casts are cached until the pass ends.

The replacement is a copy of torchao's own code, in which the name of torchao's cast stands for the
cached cast. The weight remains an input of torchao's autograd Function, so the weight's gradient is
torchao's. Nothing global changes, and nothing of torchao is written anew.

A cached cast is that of the same memory, version counter, arguments and autocast state. Only plain
tensors in the Linears' slots are cached. Weights that an engine has gathered in float8 are not cast
at all, and compiled Linears keep their forward.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from streambp.device import autocast_dtype
from streambp.foreign import compiled_submodules, package_of
from streambp.known_names import (
    FLOAT8_CAST,
    FLOAT8_LINEAR,
    FLOAT8_PRODUCT,
    FLOAT8_ROLE,
    MODULE_TABLES,
    TORCHAO,
)
from streambp.layer.products import TENSOR_TYPES
from streambp.offload.decoded_weights import FORWARD
from streambp.source import undecorate, with_globals
from streambp.tensors import memory_state

PARAMETERS_ATTRIBUTE = MODULE_TABLES[0]
WEIGHT = "weight"  # a Linear's parameter, and the value of torchao's role of this operand


def is_float8(module: nn.Module) -> bool:
    """True if the module is an instance of torchao's `Float8Linear`, a Linear for training in
    float8, or of a subclass."""
    return isinstance(module, nn.Linear) and any(
        base.__name__ == FLOAT8_LINEAR and package_of(base) == TORCHAO
        for base in type(module).__mro__
    )


class WeightCasts:
    """Cache of the float8 casts of one layer's weights. A layer that runs in chunks calls its
    Linears once for each chunk, and each weight is cast at the first call. The casts are dropped
    after the layer's forward, and again after its backward.

    Args:
        linears: the layer's float8 Linears, all with the same class's forward.
        forward: this forward, a function of torchao.

    Attributes:
        linears: the Linears.
        forward: copy of torchao's forward that reads and fills this cache when it casts a weight.
        storages: memory of the Linears' weights, by address. The references keep the addresses from
            being used for other tensors. None: nothing is cached now.
        casts: pairs of a version counter and the cast weight, by the weight's memory, the arguments
            of torchao's cast, and autocast's dtype.
    """

    def __init__(self, linears: list[nn.Linear], forward: Any) -> None:
        self.linears = linears
        self.storages: dict[int, torch.UntypedStorage] | None = None
        self.casts: dict[Any, tuple[int, Any]] = {}
        names = undecorate(forward).__globals__
        product = names[FLOAT8_PRODUCT]
        # a class is part of a reference cycle, and must not keep the model's memory
        cast = functools.partial(_cast, weakref.ref(self), product.forward.__globals__)
        space = {**product.forward.__globals__, FLOAT8_CAST: cast}
        copied = type(
            product.__name__,
            (product,),
            {
                "__module__": product.__module__,
                "forward": staticmethod(with_globals(space, product.forward)),
                "backward": staticmethod(with_globals(space, product.backward)),
            },
        )
        self.forward = with_globals({**names, FLOAT8_PRODUCT: copied}, forward)

    def begin(self) -> None:
        """Start caching casts, unless caching has started already. Each call of a float8 Linear
        calls this method first, so that the first chunk's calls start the cache for all chunks."""
        if self.storages is not None:
            return
        self.storages = {}
        for linear in self.linears:
            weight = vars(linear)[PARAMETERS_ATTRIBUTE].get(WEIGHT)
            if type(weight) in TENSOR_TYPES:
                storage = weight.untyped_storage()
                self.storages[storage._cdata] = storage

    def end(self) -> None:
        """Drop all cached casts, and cache none until the next call of `begin`."""
        self.storages = None
        self.casts.clear()

    def caches(self, tensor: Tensor) -> bool:
        """True if a cast of this tensor [...] may be cached. The tensor must be one of the Linears'
        weights, or share memory with one. The tensor must have a version counter, and grad mode
        must be off."""
        return (
            self.storages is not None
            and type(tensor) in TENSOR_TYPES
            and not tensor.is_inference()
            and not torch.is_grad_enabled()
            and tensor.untyped_storage()._cdata in self.storages
        )


def _cast(
    reference: weakref.ref[WeightCasts],
    names: dict[str, Any],
    tensor: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Cast a tensor [...] to float8 as torchao does, and return the result. A weight's result is
    read from the cache, if the cache has a cast of the weight's present values. Replaces torchao's
    cast in the copy of torchao's forward.

    Args:
        reference: weak reference to the cache of the Linear's layer.
        names: global names of torchao's code, among them its cast.
        tensor: the tensor: input, weight or gradient of a Linear.
        args: further arguments of torchao's cast.
        kwargs: keyword arguments of torchao's cast, which say if the tensor is a weight.
    """
    make = names[FLOAT8_CAST]
    cache = reference()
    is_weight = getattr(kwargs.get(FLOAT8_ROLE), "value", None) == WEIGHT
    if cache is None or not is_weight or not cache.caches(tensor):
        return make(tensor, *args, **kwargs)
    *place, version = memory_state(tensor)
    key = (*place, autocast_dtype(tensor.device.type), args, tuple(kwargs.items()))
    try:
        cached = cache.casts.get(key)
    except TypeError:  # an argument without a hash, as another release may have
        return make(tensor, *args, **kwargs)
    if cached is None or cached[0] != version:
        cached = cache.casts[key] = version, make(tensor, *args, **kwargs)
    return cached[1]


@dataclasses.dataclass(eq=False)
class CastOnce:
    """Replacement for the forward of a float8 Linear while its decoder layer runs in chunks. The
    weight is cast to float8 once for all chunks instead of once for each.

    Attributes:
        module: the Linear.
        casts: the cache of the casts of all weights in the layer.
    """

    module: nn.Module
    casts: WeightCasts

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of torchao's forward, [..., out] for x [..., in]."""
        self.casts.begin()
        result: Tensor = self.casts.forward(self.module, *args, **kwargs)
        return result

    def clear(self) -> None:
        """Drop the casts of the layer's weights."""
        self.casts.end()


def float8_linears(layer: nn.Module) -> list[CastOnce]:
    """Return one replacement of the forward for each float8 Linear of a layer, which casts the
    weight once for all chunks. Compiled Linears are left out, and Linears with a `forward` set on
    the object. So are all Linears if torchao's code does not cast as expected."""
    linears: dict[Any, list[nn.Linear]] = {}  # by forward
    for module in layer.modules():
        if is_float8(module) and isinstance(vars(module).get(FORWARD), CastOnce | None):
            linears.setdefault(type(module).forward, []).append(module)  # type: ignore[arg-type]
    if not linears:
        return []
    compiled = {id(inner) for module in compiled_submodules(layer) for inner in module.modules()}
    replacements = []
    for forward, modules in linears.items():
        plain = []
        for module in modules:
            if id(module) not in compiled:
                plain.append(module)
        if plain and _casts_by_name(forward):
            casts = WeightCasts(plain, forward)
            for module in plain:
                replacements.append(CastOnce(module, casts))
    return replacements


def _casts_by_name(forward: Any) -> bool:
    """True if the cast in a float8 Linear's forward can be replaced in a copy of the code. The
    forward must call torchao's autograd Function by its global name, and this Function's code must
    call torchao's cast by its name.

    Args:
        forward: the forward of torchao's class.
    """
    function = undecorate(forward)
    if not isinstance(function, FunctionType) or FLOAT8_PRODUCT not in function.__code__.co_names:
        return False
    product = function.__globals__.get(FLOAT8_PRODUCT)
    if not (isinstance(product, type) and issubclass(product, torch.autograd.Function)):
        return False
    steps = product.forward, product.backward
    return all(
        isinstance(step, FunctionType)
        and FLOAT8_CAST in step.__code__.co_names
        and FLOAT8_CAST in step.__globals__
        for step in steps
    )
