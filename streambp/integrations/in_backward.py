"""An optimizer that steps in backward: each weight's when its gradient has arrived, so that no step holds all gradients.

    handle = optimizer_in_backward(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-5))
    for batch in batches:
        model(**batch).loss.backward()      # no optimizer.step(), no zero_grad()

With weights on the host gradients come layer by layer, on the thread that called backward: the optimizer works beside the
device, and two layers' gradients take host memory. [Note: gradients on the host]

Embeddings and head stay on the device. With `on_host=True` their steps are made on the host, which has the optimizer's
states of all weights then: 17 GiB of AdamW for a vocabulary of 152k and 5,120 features.
"""

from __future__ import annotations

import functools
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

    def __init__(self, model: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer], on_host: bool) -> None:
        self.on_host = on_host
        self.optimizers: dict[str, Optimizer] = {}
        self._weights: list[Tensor] = []
        self._handles: list[Any] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.optimizers[name] = make([parameter])
                self._weights.append(parameter)
                step = functools.partial(_step, self.optimizers[name], on_host)
                self._handles.append(parameter.register_post_accumulate_grad_hook(step))
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
            self.optimizers[name].load_state_dict(one)  # to where each weight is
            for values in self.optimizers[name].state.values() if self.on_host else ():
                values.update({key: x.to("cpu") if isinstance(x, Tensor) else x for key, x in values.items()})


def _step(optimizer: Optimizer, on_host: bool, parameter: Tensor) -> None:
    """Step with the complete gradient of `parameter` [...], and let it go; `on_host`: there, wherever the weight lives."""
    here, gradient = parameter.data, parameter.grad
    if not on_host or here.device.type == "cpu" or gradient is None:
        optimizer.step()
    else:
        parameter.grad = None  # lest it is of another device than its weight
        parameter.data, parameter.grad = here.to("cpu"), gradient.to("cpu")
        try:
            optimizer.step()
        finally:
            stepped, parameter.grad = parameter.data, None
            parameter.data = here.copy_(stepped)
    parameter.grad = None


def optimizer_in_backward(
    model: nn.Module,
    make: Callable[[list[nn.Parameter]], Optimizer],
    *,
    on_host: bool = False,
    max_grad_norm: float | None = None,
) -> InBackward:
    """Have each weight that trains step in backward, once its gradient is complete.

    Every backward is a step then: gradients of several micro-batches are not added up.

    Args:
        make: an optimizer for a list of weights, such as `lambda parameters: AdamW(parameters, lr=1e-5)`; learning rates
            of schedules are set in `optimizers[name].param_groups`.
        on_host: weights on the device step on the host as well: their gradients go there, and they come back. It frees
            the device of the optimizer's states, and costs three copies of each of these weights.
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
        return InBackward(model, make, on_host)
