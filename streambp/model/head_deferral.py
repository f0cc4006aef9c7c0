"""Replace the final norm and the output projection during one forward, so that the loss computes
both.

ZeRO-3 and FSDP units gather the output projection's weights [V, h] only while its module runs. A
call of the module is a collective. The module is therefore called once in each forward, where the
model calls it, and returns a copy of its weights. The loss and everything that a program computes
from logits use the copy. Then no rank waits for another rank's computation: one rank may have
labels and another none, or read lazy logits alone. The copy lives until the head's backward, or as
long as other code references the logits; it does not exist while layers run. The module's own hooks
run once in backward, around the node that receives the gradients. No other code reads `weight`,
because ZeRO-3 would then gather the weight for the entire step.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streambp.admission.third_party import foreign_parts
from streambp.foreign import package_of
from streambp.head.recipe import HeadRequest, LogitsExpression
from streambp.instance_forward import InstanceForward, has_backward_hooks, is_fsdp_unit
from streambp.known_names import ENGINE_PACKAGES, FORWARD_HOOKS
from streambp.lazy.lazy_hidden import LazyHidden
from streambp.tensors import restoring_iterator

# allowed classes of torch; peft's wrappers contain the last
DEFERRABLE_CLASSES = (nn.LayerNorm, nn.RMSNorm, nn.ModuleDict)


def can_be_deferred(norm: nn.Module) -> bool:
    """True if a model's final norm may be computed after the model's forward, together with the
    loss: on blocks of tokens [n, h], and once more in backward.

    False for a norm with third-party code, because such code may mix tokens, count calls, draw
    random numbers, or train a tensor that is not a registered parameter.
    """
    # Backward hooks and FSDP units add an autograd.Function, which needs real tensors.
    if has_backward_hooks(norm) or is_fsdp_unit(norm):
        return False
    if foreign_parts(norm, norm.__dict__.get("forward")) or any(True for _ in norm.buffers()):
        return False
    inner = [module for module in norm.modules() if module is not norm]
    hooked = any(getattr(module, name) for module in inner for name in FORWARD_HOOKS)
    kinds = {type(module) for module in norm.modules()}
    return not hooked and all(
        kind in DEFERRABLE_CLASSES or kind.__module__.partition(".")[0] != "torch" for kind in kinds
    )


class DeferredForward(InstanceForward):
    """Replacement of the forward of the final norm, or of the output projection, during one call of
    the model. The result is a lazy tensor (`LazyHidden`), whose values are not computed yet. The
    loss later computes norm and projection block by block.

    The norm's replacement returns a lazy tensor that references the norm and its input. The output
    projection's replacement makes its input lazy in case the norm was not replaced.

    Args:
        module: the final norm or the output projection.
        request: options of the output projection in this call, which all lazy tensors of the call
            share.
        is_norm: True if `module` is the final norm.
    """

    def __init__(self, module: nn.Module, request: HeadRequest, is_norm: bool = False) -> None:
        super().__init__(module)
        self.request = request
        self.is_norm = is_norm

    def call(self, hidden_states: Tensor) -> Tensor:
        """Return a lazy tensor (`LazyHidden`) in place of the module's output: the normed hidden
        states [..., h] of the final norm, or the logits [..., V] of the output projection. The
        values are computed later, on use.

        Args:
            hidden_states: [..., h], the module's input.
        """
        if self.is_norm:
            self.remove()  # `LazyHidden` calls the module itself, block by block
            return LazyHidden.make(hidden_states, LogitsExpression(self.request, norm=self.module))
        if isinstance(hidden_states, LazyHidden) and hidden_states.materialized_tensor is not None:
            hidden_states = hidden_states.materialized_tensor
        if not isinstance(hidden_states, LazyHidden):
            hidden_states = LazyHidden.make(hidden_states, LogitsExpression(self.request))
        self.request.projecting = True
        try:
            result: Tensor = (
                self.original(hidden_states)
                if not self._runs_engine_linear
                else self._project(hidden_states)
            )
        finally:
            self.request.projecting = False
        if (
            isinstance(result, LazyHidden)
            and result.materialized_tensor is None
            and result.has_own_node()
        ):
            result = result.copy_with(dataclasses.replace(result.recipe, logits=True))
        return result

    @property
    def _runs_engine_linear(self) -> bool:
        """True if the output projection's forward would call DeepSpeed's replacement of `F.linear`.
        Lazy tensors have a rule for torch's own `F.linear` only, so `_project` applies this rule
        directly.

        DeepSpeed's function computes the same as torch's, and stays in place once the process has
        created a ZeRO-3 engine.
        """
        plain = type(self.module).forward is nn.Linear.forward and self.previous is None
        return plain and package_of(nn.functional.linear) in ENGINE_PACKAGES

    def _project(self, hidden_states: LazyHidden) -> Tensor:
        """Return lazy logits [..., V], which are computed later from `hidden_states`, and the
        module's weight and bias.

        Args:
            hidden_states: [..., h], the output projection's input.
        """
        result: Any = NotImplemented
        if hidden_states.follows_rules():
            result = LazyHidden.rules["linear"](hidden_states, self.module.weight, self.module.bias)
        return self.original(hidden_states) if result is NotImplemented else result


class HeldHead(nn.Module):
    """Module that replaces an output projection whose weight ZeRO-3 or FSDP shards, during one call
    of the model. The engine frees the gathered weight when the projection's forward ends, but the
    logits are computed later. The weight is therefore copied while it is gathered, and logits are
    computed with the copy, in forward and again in backward.

    Args:
        model: the language model.
        head: the model's output projection, a direct submodule.
        request: options of the output projection in this call.
    """

    def __init__(self, model: nn.Module, head: nn.Module, request: HeadRequest) -> None:
        super().__init__()
        self._model, self._head = [model], [head]  # lists prevent registration as submodules
        self._name = next(name for name, child in model.named_children() if child is head)
        self.request = request

    def install(self) -> None:
        """Put this module in the place of the model's output projection."""
        self._model[0]._modules[self._name] = self

    def remove(self) -> None:
        """Put the model's own output projection back."""
        self._model[0]._modules[self._name] = self._head[0]

    @property
    def weight(self) -> Any:
        """Return the output projection's own weight [V, h], for models that read its dtype or
        device.
        """
        return self._head[0].weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return lazy logits [..., V], which are computed later from `hidden_states` and from a
        copy of the projection's weight and bias.

        Args:
            hidden_states: [..., h], the output projection's input.
        """
        head: Any = self._head[0]
        loan = WeightLoan()

        def forward(hidden_states: Tensor) -> Tensor:
            weights: list[Any] = [x for x in (head.weight, head.bias) if x is not None]
            loan.copies = [x.detach().clone() for x in weights]
            loan.trained = [x.requires_grad for x in weights]
            result: Tensor = LendWeights.apply(loan, hidden_states, *weights)  # type: ignore[no-untyped-call]
            return result

        restore = restoring_iterator([(vars(head), "forward")])
        try:
            head.forward = forward
            head_input = head(hidden_states)
        finally:
            collections.deque(restore, maxlen=0)  # one call in C, which Ctrl-C cannot end half-way
        hidden_states, weight, *bias = BorrowWeights.apply(loan, head_input)  # type: ignore[no-untyped-call]
        return LazyHidden.make(
            hidden_states,
            LogitsExpression(self.request, weight=weight, bias=next(iter(bias), None), logits=True),
        )


@contextlib.contextmanager
def restore_heads(model: nn.Module) -> Iterator[None]:
    """Context manager in which a model has its own output projections again, even if a call of the
    model has replaced them by `HeldHead`. Used by code that copies or describes the model while the
    call is in progress.

    Args:
        model: the model.
    """
    held_heads = [module for module in model.modules() if isinstance(module, HeldHead)]
    for head in held_heads:
        head.remove()
    try:
        yield
    finally:
        for head in held_heads:
            head.install()


@dataclasses.dataclass
class WeightLoan:
    """Copies of a sharded output projection's weight and bias for one forward, and the gradients of
    the copies. `LendWeights` and `BorrowWeights` exchange the gradients through this object.

    Attributes:
        copies: the weight [V, h], and the bias [V] if the projection has a bias.
        trained: True for each copy whose original requires a gradient.
        grads: the gradient of each copy. `BorrowWeights` sets the gradients in backward, and
            `LendWeights` returns them.
    """

    copies: list[Tensor] = dataclasses.field(default_factory=list)
    trained: list[bool] = dataclasses.field(default_factory=list)
    grads: tuple[Tensor | None, ...] = ()


class LendWeights(torch.autograd.Function):
    """Autograd function that runs inside of the forward of a sharded output projection, where its
    weights are gathered. Forward returns hidden_states [..., h] unchanged. Backward returns the
    gradients of weight [V, h] and bias [V], which were computed for copies of them.

    hidden_states is the only output, because engines such as DeepSpeed count the outputs that
    receive a gradient. The copies' gradients are passed in a `WeightLoan`.
    """

    @staticmethod
    def forward(ctx: Any, loan: WeightLoan, hidden_states: Tensor, *weights: Tensor) -> Tensor:
        """Return a view of hidden_states [..., h].

        Args:
            loan: object in which backward finds the gradients of the weights' copies.
            hidden_states: [..., h].
            weights: weight and bias of the output projection. Backward returns their gradients;
                forward does not use them.
        """
        ctx.lent = loan
        ctx.set_materialize_grads(False)
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of hidden_states [..., h] unchanged, and the gradients of weight and
        bias: those that `BorrowWeights.backward` has stored in `WeightLoan` for the copies."""
        grads = ctx.lent.grads
        ctx.lent.grads = ()
        return None, grad, *(grads or (None,) * (len(ctx.needs_input_grad) - 2))


class BorrowWeights(torch.autograd.Function):
    """Autograd function that runs after the forward of a sharded output projection. Forward returns
    hidden_states [..., h] unchanged, and the copies of weight [V, h] and bias [V], from which
    logits are computed later. Backward stores the copies' gradients in a `WeightLoan`, where
    `LendWeights` finds them."""

    @staticmethod
    def forward(ctx: Any, loan: WeightLoan, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Return a view of hidden_states [..., h], and the copies of weight and bias. A copy
        requires a gradient if the original does.

        Args:
            loan: holds the copies, and later their gradients.
            hidden_states: [..., h].
        """
        ctx.lent = loan
        copies = loan.copies
        loan.copies = []
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(x for x, trained in zip(copies, loan.trained, strict=True) if not trained)
        )
        return (hidden_states.view_as(hidden_states), *copies)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, *grads: Tensor | None
    ) -> tuple[None, Tensor | None]:
        """Return the gradient of hidden_states [..., h] unchanged. Store the gradients of the
        copies of weight and bias in the `WeightLoan`, where `LendWeights.backward` reads them."""
        ctx.lent.grads = grads
        return None, grad
