"""Let peft add adapters to experts in 4 bits.

bitsandbytes stores a weight of experts in 4 bits by a parametrization of torch. peft adapts the
weight by a second parametrization, which it adds before each forward. Two things go wrong there in
peft 0.21. peft does not remove its parametrization afterwards, so the next forward adds the adapter
twice, or raises an error. Modules with several adapted weights are computed without one of the
adapters, because torch has cached the decoded weight before.

`patch` therefore replaces the step of peft's forward that activates the adapters. The replacement
computes peft's sum of the decoded weight and the adapters, and the experts read the sum. The
replacement is called by unstreamed layers: in evaluation, generation, short steps and tests of a
layer. A streamed layer makes the sum once for each pass (`layer/expert_adapters.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from streambp.errors import UnsupportedModelError
from streambp.known_names import ADAPTER_ACTIVATION
from streambp.layer.expert_adapters import expert_kinds, folded_weight, stored_weight
from streambp.layer.packed_experts import PackedWeight, packed_kinds


@dataclasses.dataclass(eq=False)
class PackedActivation:
    """Replacement for the method `_activate_lora` of peft's `ParamWrapper`, for an expert weight in
    4 bits. A call returns a context manager in which the experts' forward uses the active adapters.
    The method of peft would add the adapters twice, or leave adapters out.

    Attributes:
        module: peft's module (`ParamWrapper`).
        stays: True if `unpatch` leaves the replacement in the module; False: `unpatch` removes it.
    """

    module: Any
    stays: bool = False

    @contextlib.contextmanager
    def __call__(self, active_adapters: list[str]) -> Iterator[None]:
        """Context manager in which the experts' weight is the sum of the decoded weight and the
        active adapters.

        Args:
            active_adapters: names of adapters; a name without matrices for this weight is left out.
        """
        module = self.module
        adapters = [adapter for adapter in active_adapters if adapter in module.lora_A]
        weight = stored_weight(module)
        if not isinstance(weight, PackedWeight) or not adapters:
            with type(module)._activate_lora(module, active_adapters):
                yield
            return
        base = weight.weights()
        with weight.replace(base):
            folded = folded_weight(module, base, adapters)
        with weight.replace(folded):
            yield


def activate_packed(model: nn.Module, stays: bool = False) -> None:
    """Replace the method `_activate_lora` of peft's modules around expert weights in 4 bits. Each
    forward calls this method to add the active adapters to the weight. peft's own method adds an
    adapter of a 4-bit weight twice, or leaves the adapter out.

    Args:
        model: a module that contains peft's modules; changed in place.
        stays: False: `unpatch` removes the replacements. True: `unpatch` leaves them, for the
            planner, which also predicts unpatched steps.

    Raises:
        UnsupportedModelError: a forward before `patch` has left an adapter in a weight, because
            peft's own method does not remove the adapter.
    """
    kinds = expert_kinds()
    for module in model.modules() if kinds else ():
        if not isinstance(module, kinds) or not hasattr(module, ADAPTER_ACTIVATION):
            continue
        experts = module.get_base_layer()
        name = module.parameter_name
        if not parametrize.is_parametrized(experts, name):
            continue
        weights = experts.parametrizations[name]
        if len(weights) > 1 and isinstance(weights[0], packed_kinds()):
            raise UnsupportedModelError(
                f"peft has left an adapter in {name}, which is stored in 4 bits, because a forward "
                "ran before streambp.patch. "
                "Load the model again, and call streambp.patch before the first forward."
            )
        if ADAPTER_ACTIVATION in vars(module):
            continue
        if isinstance(stored_weight(module), PackedWeight):
            vars(module)[ADAPTER_ACTIVATION] = PackedActivation(module, stays)


def deactivate_packed(model: nn.Module) -> None:
    """Remove the replacements that `activate_packed` installed in the modules of a model, except
    those that were installed with `stays=True`."""
    for module in model.modules():
        activation = vars(module).get(ADAPTER_ACTIVATION)
        if isinstance(activation, PackedActivation) and not activation.stays:
            del vars(module)[ADAPTER_ACTIVATION]


@contextlib.contextmanager
def packed_adapters_active(model: nn.Module) -> Iterator[None]:
    """Context manager in which peft adds the adapters of experts in 4 bits once to each forward of
    an unpatched model, for `verify`."""
    activate_packed(model, stays=True)
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(vars(module).get(ADAPTER_ACTIVATION), PackedActivation):
                del vars(module)[ADAPTER_ACTIVATION]
