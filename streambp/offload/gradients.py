"""Send gradients of weights on the host to the host, after their layer's backward.

    GradientBuffer    host memory for the gradients of one layer; `weights.HostWeights` reuses
                      buffers
    GradientArrival   the autograd Function between the weights and their layer, which waits for
                      gradients

Autograd sees the weight as a tensor on the host, so the gradient must be on the host too. The
layer's backward returns host memory while copies to the memory still run. `GradientArrival` waits
for these copies. All tensors of `GradientArrival` are on the host, so its backward runs on the
thread that called backward. The device's thread continues with the next layer. Hooks on weights,
including an optimizer's step, thus run concurrently with the device and receive complete gradients.

A buffer contains one layer's gradients in the layout of the layer's range. The buffer is reused
once no gradient in it is referenced any more, neither as `.grad` nor by the program. A step
therefore needs one buffer for each layer, or two if hooks consume the gradients.

Three waits in addition to the waits of `engines.py` and `weights.py`:

    9   out waits for compute        before it reads a gradient
    10  the caller waits for out     before it gets the gradient
    11  compute waits for out        before a gradient's device memory is freed, after the next layer's
                                     gradients were computed
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from streambp.offload.engines import HOST_QUEUE, Engine

CopyEvents = list[
    tuple[Engine, Any]
]  # event after a call's gradient copies; []: no gradient was sent
# weights and their gradients [...]
SendGradients = Callable[[Sequence[Tensor], Sequence[Tensor | None]], list[Tensor | None]]


class GradientArrival(torch.autograd.Function):
    """Autograd function between weights [...] in host memory and the autograd function of their
    layer. Forward returns the weights unchanged.

    The layer's backward computes the gradients of the weights on the device, and starts copies of
    the gradients to the host. Backward of this function waits until these copies have ended, and
    returns the gradients on the host."""

    @staticmethod
    def forward(ctx: Any, arrival: CopyEvents, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return views of the weights [...], which a layer's autograd function takes as inputs. The
        layer's gradients then pass through this function's backward.

        Args:
            arrival: list that the layer's backward fills with the events of the gradients' copies.
            weights: weights in host memory.
        """
        ctx.arrival = arrival
        ctx.set_materialize_grads(False)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients [...] of the weights unchanged, after the calling thread has waited
        for their copies to the host. The layer's backward has started these copies."""
        for engine, event in ctx.arrival:
            engine.wait(HOST_QUEUE, event)  # 10
            for gradient in gradients:
                if gradient is not None:
                    engine.access(HOST_QUEUE, gradient, write=False)
        return None, *gradients


@dataclasses.dataclass
class GradientBuffer:
    """Host memory for the gradients of one layer's weights.

    Attributes:
        memory: the memory [bytes], uint8.
        gradient_storages: weak references to the storages of gradients in the buffer. The buffer is
            free when all are gone.
    """

    memory: Tensor
    gradient_storages: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)
