"""An optimizer that steps in backward: each weight's when its gradient has arrived, so that no step holds all gradients.

    handle = optimizer_in_backward(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-5))
    for batch in batches:
        model(**batch).loss.backward()      # no optimizer.step(), no zero_grad()

With weights on the host gradients come layer by layer, on the thread that called backward: the optimizer works beside the
device, and two layers' gradients take host memory. [Note: gradients on the host]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from streambp.errors import ConfigError

MARK = "_streambp_in_backward"


class InBackward:
    """What `optimizer_in_backward` has put on a model's weights.

    optimizers: one for each weight that trains, by its name.
    """

    def __init__(self, model: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self.optimizers: dict[str, Optimizer] = {}
        self._weights: list[Tensor] = []
        self._handles: list[Any] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.optimizers[name] = make([parameter])
                self._weights.append(parameter)
                self._handles.append(parameter.register_post_accumulate_grad_hook(_Step(self.optimizers[name])))
                setattr(parameter, MARK, True)

    def remove(self) -> None:
        """Weights keep their gradients from now on; the optimizers stay here."""
        for handle, weight in zip(self._handles, self._weights, strict=True):
            handle.remove()
            delattr(weight, MARK)
        self._handles.clear()
        self._weights.clear()

    def state_dict(self) -> dict[str, Any]:
        """Of each weight's optimizer, by the weight's name."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave, of a model with the same weights.

        Raises:
            ConfigError: other weights train here.
        """
        if state.keys() != self.optimizers.keys():
            other = sorted(state.keys() ^ self.optimizers.keys())[0]
            raise ConfigError(f"The state is of other weights: {other} trains in one of them alone. Freeze the same.")
        for name, one in state.items():
            self.optimizers[name].load_state_dict(one)


class _Step:
    """Called when a weight's gradient is complete."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, parameter: Tensor) -> None:
        """Step with the gradient of `parameter` [...], and let it go."""
        self.optimizer.step()
        parameter.grad = None


def optimizer_in_backward(
    model: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer], *, max_grad_norm: float | None = None
) -> InBackward:
    """Have each weight that trains step in backward, once its gradient is complete.

    Every backward is a step then: gradients of several micro-batches are not added up.

    Args:
        make: an optimizer for a list of weights, such as `lambda parameters: AdamW(parameters, lr=1e-5)`; learning rates
            of schedules are set in `optimizers[name].param_groups`.
        max_grad_norm: refused, see below; set it to None (in HF's TrainingArguments to 0).

    Returns:
        a handle: `optimizers`, `state_dict`, `load_state_dict`, `remove`.

    Raises:
        ConfigError: gradients are to be clipped by their global norm, or the model has an optimizer in backward already.
    """
    if max_grad_norm:
        raise ConfigError(
            f"max_grad_norm is {max_grad_norm}: clipping by global norm needs all gradients before the first weight steps, "
            "and an optimizer in backward steps with each as it comes. Clip each gradient in an optimizer of your own, or "
            "call optimizer.step() after backward."
        )
    trained: Sequence[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(hasattr(parameter, MARK) for parameter in trained):
        raise ConfigError("The model has an optimizer in backward already. Call remove() of its handle before.")
    with torch.inference_mode(False):
        return InBackward(model, make)
