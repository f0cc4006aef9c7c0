"""Experts in 4 bits inside a layer, decoded once for each pass instead of once for each chunk.

bitsandbytes stores the weights [E, n, m] of a layer's experts in 4 bits by a parametrization, which
decodes the weight in each call of the experts. Weights in MXFP4 are stored in the same way
(`mxfp4.py`). A streamed layer calls its experts once for each chunk. While a streamed layer runs, a
`DecodedOnce` replaces the forward of the parametrization. The first read decodes the weight, and
later reads return the same tensor until the pass ends. Only one layer's decoded experts therefore
exist at a time. The numbers are those of the parametrization, because its own code decodes.

Experts with peft's adapters need another tensor than the decoded weight (`expert_adapters.py`). A
`PackedWeight` replaces the parametrization's forward by a function that returns this tensor.

The same context manager, `decode_once`, serves Linears that train in float8
(`float8_linears.py`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from streambp.errors import UnsupportedModelError
from streambp.known_names import MXFP4_EXPERTS, PACKED_PARAMETERS, QUANT_STATE
from streambp.layer.float8_linears import CastOnce, float8_linears
from streambp.offload.decoded_weights import FORWARD, CountedPackedWeight
from streambp.offload.mxfp4 import Mxfp4Weight
from streambp.tensors import restoring_iterator


@dataclasses.dataclass(eq=False)
class DecodedOnce:
    """Replacement for the forward of a parametrized 4-bit weight, for example of experts, while its
    decoder layer runs in chunks. The first call decodes the weight, and later calls return the same
    tensor, so that not every chunk decodes it.

    Attributes:
        module: the parametrization of the weight, whose forward is replaced.
        decoded: the decoded weight [E, n, m]; None before the first call.
    """

    module: ParametrizationList
    decoded: Tensor | None = None

    def __call__(self) -> Tensor:
        """Return the decoded weight [E, n, m], the same tensor in each call."""
        if self.decoded is None:
            with torch.no_grad():
                self.decoded = type(self.module).forward(self.module)
        return self.decoded

    def clear(self) -> None:
        """Drop the decoded weight."""
        self.decoded = None


def packed_weights(layer: nn.Module) -> list[ParametrizationList]:
    """Return the parametrizations of a layer's 4-bit weights, of experts for example. A
    parametrization is left out if code has replaced its `forward` on the instance, or if the
    parametrization has further steps beside the decoding."""
    kinds = packed_kinds()
    weights = []
    for module in layer.modules():
        if not isinstance(module, ParametrizationList) or FORWARD in vars(module):
            continue
        if len(module) == 1 and isinstance(module[0], kinds):
            weights.append(module)
    return weights


def packed_kinds() -> tuple[Any, ...]:
    """Return the classes of parametrizations that decode a 4-bit weight. The first is for weights
    in MXFP4. The second is for models on meta or fake tensors whose memory and FLOPs are counted.
    The third is the class of bitsandbytes, if this library is imported."""
    library = sys.modules.get(PACKED_PARAMETERS)
    kind = getattr(library, "Bnb4bitParametrization", None)
    own_kinds = (Mxfp4Weight, CountedPackedWeight)
    return own_kinds if kind is None else (*own_kinds, kind)


def mxfp4_parameters(model: nn.Module) -> list[Tensor]:
    """Return the bytes [E, out, blocks, 16] and the scales [E, out, blocks] of a model's weights in
    MXFP4, which are integers."""
    parameters: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, ParametrizationList) and isinstance(module[0], Mxfp4Weight):
            parameters += module.parameters()
    return parameters


@dataclasses.dataclass(eq=False)
class PackedWeight:
    """A 4-bit weight of experts, and a context manager by which the experts read another tensor in
    its place.

    Attributes:
        module: the experts.
        name: name of the weight in `module`.
        weights: the weight's parametrization, which decodes the stored bytes.
    """

    module: nn.Module
    name: str
    weights: ParametrizationList

    @property
    def source(self) -> Tensor:
        """Return the packed bytes [bytes, 1] of the weight."""
        return self.weights.original

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the decoded weight."""
        decoding = self.weights[0]
        dtype: torch.dtype = getattr(decoding, QUANT_STATE, decoding).dtype  # type: ignore[assignment]
        return dtype

    def value(self) -> Tensor:
        """Return the decoded weight [E, n, m], a new tensor in each call."""
        with torch.no_grad():
            return type(self.weights).forward(self.weights)

    @contextlib.contextmanager
    def replace(self, value: Tensor) -> Iterator[None]:
        """Context manager in which the experts read `value` [E, n, m] as their weight. An empty
        cache replaces torch's cache of parametrized weights (`parametrize.cached`) during the
        context. Torch's cache has one key for a module and its copies, so the experts could read a
        cached weight instead of `value`."""
        attributes = vars(self.weights)
        restore = restoring_iterator([(attributes, FORWARD)])
        earlier = parametrize._cache
        try:
            attributes[FORWARD] = lambda: value
            parametrize._cache = {}
            yield
        finally:
            collections.deque(restore, maxlen=0)
            parametrize._cache = earlier if parametrize._cache_enabled else {}


def packed_weight(module: nn.Module, name: str) -> PackedWeight | None:
    """Return a module's weight `name` as a `PackedWeight` if the weight is stored in 4 bits; None
    for other weights."""
    if not parametrize.is_parametrized(module, name):
        return None
    weights: Any = module.parametrizations[name]  # type: ignore[index]
    if len(weights) != 1 or not isinstance(weights[0], packed_kinds()):
        return None
    return PackedWeight(module, name, weights)


def refuse_without_backward(model: nn.Module) -> None:
    """Raise if a model has experts in MXFP4, as transformers loads them for kernels on a GPU. Such
    kernels have no backward, so the gradient of a layer's input would lack the experts' part.

    Args:
        model: the model, before it is patched.

    Raises:
        UnsupportedModelError: a module of the model has such experts.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == MXFP4_EXPERTS:
            raise UnsupportedModelError(
                f"{name} keeps its weights in MXFP4, and the kernels for such weights have no "
                "backward: gradients would lack the part of the experts. Load the model inside of "
                "`with streambp.keep_mxfp4():`, or in bfloat16 with "
                "quantization_config=Mxfp4Config(dequantize=True)."
            )


def replaced_forwards(layer: nn.Module) -> list[DecodedOnce | CastOnce]:
    """Return one object for each 4-bit weight and each float8 Linear of a layer, to replace the
    forward that decodes or casts the weight. `decode_once` sets the replacements while the layer
    runs in chunks."""
    return [*map(DecodedOnce, packed_weights(layer)), *float8_linears(layer)]


@contextlib.contextmanager
def decode_once(replacements: Sequence[DecodedOnce | CastOnce]) -> Iterator[None]:
    """Context manager for a layer that runs in chunks. Each 4-bit weight is decoded, and each
    weight of a float8 Linear is cast, once for all chunks: when it is first read. The end of the
    context drops the decoded and cast weights.

    Args:
        replacements: the replacements of the modules' forwards, from `replaced_forwards`.
    """
    entered = []
    changed_tables: list[dict[str, Any]] = []
    # reads `changed_tables` when consumed
    restore = map(dict.pop, changed_tables, itertools.repeat(FORWARD), itertools.repeat(None))
    try:
        for replacement in replacements:
            attributes = vars(replacement.module)
            if FORWARD not in attributes:  # a context outside of this one has replaced it
                entered.append(replacement)
                changed_tables.append(attributes)
                attributes[FORWARD] = replacement
        yield
    finally:
        collections.deque(restore, maxlen=0)  # one call in C, which Ctrl-C cannot end half-way
        for replacement in entered:
            replacement.clear()
