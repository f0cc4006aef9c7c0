"""Optimizer steps during backward: each weight steps when its gradient is complete.

    handle = optimizer_in_backward(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-5))
    for batch in batches:
        model(**batch).loss.backward()      # no optimizer.step(), no zero_grad()

No step holds the gradients of all weights at once. With weights on the host, gradients arrive layer
by layer, on the thread that called backward. The optimizer runs in parallel to the device, and
gradients of two layers use host memory (`offload/gradients.py`).

Embeddings and head stay on the device. With `on_host=True` they step on the host, which then stores
the optimizer states of all weights: 17 GiB of AdamW for a vocabulary of 152k and 5,120 features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from streambp.distributed.engines import contents_of, late_reducing_engine
from streambp.errors import ConfigError

BACKWARD_ATTRIBUTE = "_streambp_in_backward"


class OptimizersInBackward:
    """Handle returned by `optimizer_in_backward`: the optimizers of a model's weights. Each weight
    has its own optimizer, which steps during backward.

    Attributes:
        optimizers: dict from the name of each trained weight to its optimizer.
        on_host: True if weights on the device are updated on the host.
    """

    def __init__(
        self, model: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer], on_host: bool
    ) -> None:
        self.on_host = on_host
        self._weights: list[Tensor] = []
        self._handles: list[Any] = []
        trained = {}
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                trained[name] = weight
        # `make` may raise, so all optimizers are made before the first hook is registered.
        self.optimizers: dict[str, Optimizer] = {}
        for name, weight in trained.items():
            self.optimizers[name] = make([weight])
        for name, weight in trained.items():
            step = functools.partial(_step, self.optimizers[name], on_host)
            self._handles.append(weight.register_post_accumulate_grad_hook(step))
            self._weights.append(weight)
            setattr(weight, BACKWARD_ATTRIBUTE, True)
        self._handles.append(model.register_forward_pre_hook(OptimizerGuard(trained)))

    def remove(self) -> None:
        """Remove the hooks that run the optimizers, so that weights accumulate gradients again. The
        optimizers and their states stay in `optimizers`."""
        for handle in self._handles:
            handle.remove()
        for weight in self._weights:
            delattr(weight, BACKWARD_ATTRIBUTE)
        self._handles.clear()
        self._weights.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return a dict from the name of each trained weight to the state dict of its optimizer."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load optimizer states that `state_dict` returned for a model with the same trained
        weights.

        Args:
            state: the result of `state_dict`.

        Raises:
            ConfigError: the states belong to weights other than this model's trained weights.
        """
        if state.keys() != self.optimizers.keys():
            unmatched_name = sorted(state.keys() ^ self.optimizers.keys())[0]
            raise ConfigError(
                f"The state is of other weights: {unmatched_name} trains in one of them alone. "
                "Freeze the same."
            )
        for name, optimizer_state in state.items():
            self.optimizers[name].load_state_dict(
                optimizer_state
            )  # moves states to the weight's device
            for values in self.optimizers[name].state.values() if self.on_host else ():
                values.update(
                    {key: x.to("cpu") if isinstance(x, Tensor) else x for key, x in values.items()}
                )


class OptimizerGuard:
    """Forward pre-hook of the model that raises ConfigError if weights with an optimizer in
    backward would not train correctly. This happens when an engine (DDP, DeepSpeed) was added, or a
    weight was replaced, after `optimizer_in_backward` was called.

    The check runs before forward, because an engine cannot recover from an error during backward. A
    copied or pickled guard checks nothing, because a copy of the model has weights without hooks.

    Args:
        weights: dict from name to weight, for weights that are updated in backward.
    """

    def __init__(self, weights: Mapping[str, Tensor] | None = None) -> None:
        self.weights = weights or {}

    def __reduce__(self) -> Any:
        return OptimizerGuard, ()

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or not self.weights:
            return
        parameter_ids = set(map(id, contents_of(module)[1]))
        for name, weight in self.weights.items():
            # FSDP2 replaces a DTensor by the gathered weight.
            if id(weight) not in parameter_ids and not isinstance(weight, DTensor):
                raise ConfigError(
                    f"{name} has an optimizer in backward and is no longer a parameter of this "
                    f"{type(module).__name__}, so the weight would not train. Calls such as "
                    "fully_shard and resize_token_embeddings replace parameters. Call remove() of "
                    "the handle, then optimizer_in_backward again."
                )
            _refuse_engine(weight)


def _refuse_engine(weight: Tensor) -> None:
    """Raise ConfigError if a weight's optimizer cannot step in the weight's gradient hook, because
    an engine (DDP, DeepSpeed) adds up the ranks' gradients only after that hook has run. The
    optimizer would step with this rank's gradient alone."""
    name = late_reducing_engine(weight)
    if name is not None:
        raise ConfigError(
            f"An optimizer in backward does not work under {name}: each weight would step with the "
            "gradient of this rank alone, before the ranks' gradients are added up. Call "
            "fully_shard before it (FSDP2 reduces a gradient before the hooks of its weight run), "
            "or call optimizer.step() after backward."
        )


def _step(optimizer: Optimizer, on_host: bool, parameter: Tensor) -> None:
    """Run one optimizer step for a parameter [...] during backward, when its gradient is complete,
    and free the gradient. Called by the parameter's gradient hook.

    Args:
        optimizer: the parameter's optimizer.
        on_host: True to compute the step on the host, whatever device the parameter is on.
        parameter: the parameter.
    """
    _refuse_engine(parameter)  # calling a submodule skips the guard
    weight_on_device = parameter.data
    gradient = parameter.grad
    if not on_host or weight_on_device.device.type == "cpu" or gradient is None:
        optimizer.step()
    else:
        parameter.grad = None  # a gradient must be on its weight's device
        parameter.data = weight_on_device.to("cpu")
        parameter.grad = gradient.to("cpu")
        try:
            optimizer.step()
        finally:
            stepped = parameter.data
            parameter.grad = None
            parameter.data = weight_on_device.copy_(stepped)
    parameter.grad = None


def optimizer_in_backward(
    model: nn.Module,
    make: Callable[[list[nn.Parameter]], Optimizer],
    *,
    on_host: bool = False,
    max_grad_norm: float | None = None,
) -> OptimizersInBackward:
    """Make each trained weight's optimizer step during backward, when the weight's gradient is
    complete.

    Every backward is then a step: gradients of several micro-batches are not accumulated.

    Args:
        model: the model, patched or not.
        make: returns an optimizer for a list of weights, such as `lambda parameters:
            AdamW(parameters, lr=1e-5)`. Schedules set learning rates in
            `optimizers[name].param_groups`.
        on_host: True: weights on the device step on the host as well. Gradients are copied to the
            host, and updated weights are copied back. The device then stores no optimizer states;
            the cost is three copies of each such weight in every step.
        max_grad_norm: must be None or 0. Any other value raises an error, because clipping by the
            global norm needs all gradients before the first weight steps.

    Returns:
        A handle with `optimizers`, `state_dict`, `load_state_dict` and `remove`.

    Raises:
        ConfigError: max_grad_norm requests clipping, the model has an optimizer in backward
            already, or an engine (DDP, DeepSpeed, a pipeline) reduces gradients after the weights'
            hooks. The first forward raises as well, if such an engine was added later.
    """
    if max_grad_norm:
        raise ConfigError(
            f"max_grad_norm is {max_grad_norm}: clipping by global norm needs all gradients before "
            "the first weight steps, and an optimizer in backward steps with each as it comes. "
            "Clip each gradient in an optimizer of your own, or call optimizer.step() after "
            "backward."
        )
    trained: Sequence[Tensor] = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    if any(hasattr(parameter, BACKWARD_ATTRIBUTE) for parameter in trained):
        raise ConfigError(
            "The model has an optimizer in backward already. Call remove() of its handle before."
        )
    for parameter in trained:
        _refuse_engine(parameter)
    with torch.inference_mode(False):
        return OptimizersInBackward(model, make, on_host)
