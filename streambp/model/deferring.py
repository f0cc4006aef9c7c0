"""What stands in for the final norm and the output projection during one forward: they are computed with the loss.

[Note: a head that is held] Under ZeRO-3, and in an FSDP unit, the output projection's weights [V, h] are on this rank while
its module runs, and to call it is a collective. So it is called once in each forward, where the model calls it, and hands
out a copy of its weights; the loss, and all that a program makes of logits, is computed from the copy. Then no rank waits
for what another one computes: labels or none, lazy logits that one rank alone looks at. The copy lives until the head's
backward, or as long as somebody keeps logits; it is not there while layers run. In backward the module's own hooks run
around the node that takes the gradients, once. No `weight` is read elsewhere: ZeRO-3 takes that for a wish to have it for
the whole step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from streambp.admission.insides import foreign_parts
from streambp.foreign import package_of
from streambp.head.recipe import HeadRequest, Recipe
from streambp.instance_forward import InstanceForward, has_backward_hooks, is_fsdp_unit
from streambp.known_names import ENGINES, FORWARD_HOOKS
from streambp.lazy.deferred import Deferred

TORCHS = (nn.LayerNorm, nn.RMSNorm, nn.ModuleDict)  # of torch's modules; the last is inside of peft's wrappers


def can_be_deferred(norm: nn.Module) -> bool:
    """Whether a final norm may be called with some tokens [n, h] at a time, and once more in backward, for its parameters'
    gradients alone. What others wrote may mix tokens, count, draw, or train a tensor that is none of its parameters."""
    # For backward hooks, and around an FSDP unit, torch puts an autograd.Function, which needs real tensors.
    if has_backward_hooks(norm) or is_fsdp_unit(norm):
        return False
    if foreign_parts(norm, norm.__dict__.get("forward")) or any(True for _ in norm.buffers()):
        return False
    inner = [module for module in norm.modules() if module is not norm]
    hooked = any(getattr(module, name) for module in inner for name in FORWARD_HOOKS)
    kinds = {type(module) for module in norm.modules()}
    return not hooked and all(kind in TORCHS or kind.__module__.partition(".")[0] != "torch" for kind in kinds)


class DeferredForward(InstanceForward):
    """The final norm for one forward, which returns a `Deferred` that remembers the norm and its input; or the output
    projection, which makes its input `Deferred` where the final norm could not."""

    def __init__(self, module: nn.Module, request: HeadRequest, is_norm: bool = False) -> None:
        super().__init__(module)
        self.request, self.is_norm = request, is_norm

    def call(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., h] -> what stands for the norm of them, [..., h], or for their logits, [..., V]."""
        if self.is_norm:
            self.remove()  # `Deferred` calls the module itself, block by block
            return Deferred.make(hidden_states, Recipe(self.request, norm=self.module))
        if isinstance(hidden_states, Deferred) and hidden_states.written is not None:
            hidden_states = hidden_states.written
        if not isinstance(hidden_states, Deferred):
            hidden_states = Deferred.make(hidden_states, Recipe(self.request))
        self.request.projecting = True
        try:
            result: Tensor = self.original(hidden_states) if not self._engines else self._projected(hidden_states)
        finally:
            self.request.projecting = False
        if isinstance(result, Deferred) and result.written is None and result.known():
            result = result.changed(dataclasses.replace(result.recipe, logits=True))
        return result

    @property
    def _engines(self) -> bool:
        """True if an engine's function stands in the place of torch's `F.linear`, and the module's forward calls no other.
        DeepSpeed leaves one there for good, once a process has made a ZeRO-3 engine: it computes the same."""
        plain = type(self.module).forward is nn.Linear.forward and self.previous is None
        return plain and package_of(nn.functional.linear) in ENGINES

    def _projected(self, hidden_states: Deferred) -> Tensor:
        """Return the logits [..., V] that stand for hidden_states [..., h], by the module's weights."""
        result: Any = NotImplemented
        if hidden_states.follows_rules():
            result = Deferred.rules["linear"](hidden_states, self.module.weight, self.module.bias)
        return self.original(hidden_states) if result is NotImplemented else result


class HeldHead(nn.Module):
    """In the place, for one forward, of an output projection whose weights an engine holds. [Note: a head that is held]"""

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
        """hidden_states [..., h] -> deferred logits [..., V], of copies of the projection's weights."""
        head: Any = self._head[0]
        lent = Lent()

        def forward(hidden_states: Tensor) -> Tensor:
            weights: list[Any] = [x for x in (head.weight, head.bias) if x is not None]
            lent.copies = [x.detach().clone() for x in weights]
            lent.trained = [x.requires_grad for x in weights]
            result: Tensor = Lending.apply(lent, hidden_states, *weights)  # type: ignore[no-untyped-call]
            return result

        before = head.__dict__.get("forward")
        head.forward = forward
        try:
            given = head(hidden_states)
        finally:
            del head.__dict__["forward"]
            if before is not None:
                head.forward = before
        hidden_states, weight, *bias = Borrowed.apply(lent, given)  # type: ignore[no-untyped-call]
        return Deferred.make(hidden_states, Recipe(self.request, weight=weight, bias=next(iter(bias), None), logits=True))


@dataclasses.dataclass
class Lent:
    """Copies of an output projection's weights in one forward, and their gradients. [Note: a head that is held]

    copies: [V, h] and perhaps [V]. trained: whether each wants a gradient. grads: of each, while backward is between the
        two nodes.
    """

    copies: list[Tensor] = dataclasses.field(default_factory=list)
    trained: list[bool] = dataclasses.field(default_factory=list)
    grads: tuple[Tensor | None, ...] = ()


class Lending(torch.autograd.Function):
    """hidden_states [..., h], inside of the output projection -> the same: its only output, as in any other call, since
    engines count those that a gradient comes to. What `Borrowed` left goes on to the weights [V, h], [V]."""

    @staticmethod
    def forward(ctx: Any, lent: Lent, hidden_states: Tensor, *weights: Tensor) -> Tensor:
        """hidden_states [..., h], in its own memory."""
        ctx.lent = lent
        ctx.set_materialize_grads(False)
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients as they came: of hidden_states [..., h] and of each weight."""
        grads, ctx.lent.grads = ctx.lent.grads, ()
        return None, grad, *(grads or (None,) * (len(ctx.needs_input_grad) - 2))


class Borrowed(torch.autograd.Function):
    """hidden_states [..., h], behind the output projection -> the same, and the copies of its weights [V, h], [V]."""

    @staticmethod
    def forward(ctx: Any, lent: Lent, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """hidden_states [..., h] in its own memory, and copies that want a gradient where the weights do."""
        ctx.lent, copies = lent, lent.copies
        lent.copies = []
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x, trained in zip(copies, lent.trained, strict=True) if not trained))
        return (hidden_states.view_as(hidden_states), *copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[None, Tensor | None]:
        """The gradient of hidden_states [..., h]; those of the weights are left for `Lending`."""
        ctx.lent.grads = grads
        return None, grad
