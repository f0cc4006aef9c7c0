"""What stands in for the final norm and the output projection during one forward: they are computed with the loss."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from streambp.admission.insides import foreign_parts
from streambp.head.recipe import HeadRequest, Recipe
from streambp.instance_forward import InstanceForward, wants_gradients
from streambp.known_names import FORWARD_HOOKS
from streambp.lazy.deferred import Deferred

TORCHS = (nn.LayerNorm, nn.RMSNorm, nn.ModuleDict)  # of torch's modules; the last is inside of peft's wrappers


def can_be_deferred(norm: nn.Module) -> bool:
    """Whether a final norm may be called with some tokens [n, h] at a time, and once more in backward, for its parameters'
    gradients alone. What others wrote may mix tokens, count, draw, or train a tensor that is none of its parameters."""
    if wants_gradients(norm) or foreign_parts(norm, norm.__dict__.get("forward")) or any(True for _ in norm.buffers()):
        return False
    inner = [module for module in norm.modules() if module is not norm]
    hooked = any(getattr(module, name) for module in inner for name in FORWARD_HOOKS)
    return not hooked and all(_is_known(type(module)) for module in norm.modules())


def _is_known(kind: type[nn.Module]) -> bool:
    return kind in TORCHS or kind.__module__.partition(".")[0] != "torch"


class DeferredNorm(InstanceForward):
    """The final norm for one forward: returns a `Deferred` that remembers the norm and its input."""

    def __init__(self, module: nn.Module, request: HeadRequest) -> None:
        super().__init__(module)
        self.request = request

    def call(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., h] -> what stands for the norm of them, [..., h]."""
        self.remove()  # `Deferred` calls the module itself, block by block
        return Deferred.make(hidden_states, Recipe(self.request, norm=self.module))


class DeferredHead(InstanceForward):
    """The output projection for one forward; makes its input `Deferred` where the final norm could not."""

    def __init__(self, module: nn.Module, request: HeadRequest) -> None:
        super().__init__(module)
        self.request = request

    def call(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., h] -> what stands for their logits, [..., V]."""
        if isinstance(hidden_states, Deferred) and hidden_states.written is not None:
            hidden_states = hidden_states.written
        if not isinstance(hidden_states, Deferred):
            hidden_states = Deferred.make(hidden_states, Recipe(self.request))
        self.request.outcome.projecting = True
        try:
            result: Tensor = self.original(hidden_states)
        finally:
            self.request.outcome.projecting = False
        if isinstance(result, Deferred) and result.written is None:
            result = result.derive(recipe=dataclasses.replace(result.recipe, logits=True))
        return result


class HeadLater(nn.Module):
    """In the output projection's place for one forward: the projection is called when the loss is computed, not before."""

    def __init__(self, model: nn.Module, head: nn.Module, request: HeadRequest) -> None:
        super().__init__()
        self._model, self._head = [model], [head]  # in lists, so as not to become submodules
        self._name = next(name for name, child in model.named_children() if child is head)
        self.request = request

    def install(self) -> None:
        """Take the output projection's place in the model."""
        self._model[0]._modules[self._name] = self

    def remove(self) -> None:
        """Give the output projection its place back."""
        self._model[0]._modules[self._name] = self._head[0]

    @property
    def weight(self) -> Any:
        """The output projection's own weight [V, h], for models that ask for its dtype or device."""
        return self._head[0].weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., h] -> deferred logits [..., V]; the projection itself is not called."""
        head = self._head[0]
        recipe = Recipe(self.request, weight=head.weight, bias=head.bias, head=head, logits=True)  # type: ignore[arg-type]
        return Deferred.make(hidden_states, recipe)
