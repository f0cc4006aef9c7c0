"""Gradients of weights that live on the host: they leave when their layer's backward is over; autograd finds them there.

    Buffer     memory of the host for the gradients of one layer; `weights.HostWeights` uses it again and again
    Arriving   the autograd Function between such weights and their layer, by which gradients arrive

[Note: gradients on the host] autograd knows a weight as a tensor on the host, where its gradient therefore has to be. The
layer's backward hands out host memory that copies are still on their way to. They are waited for in `Arriving`, whose
tensors are all on the host: its backward runs on the thread that called backward, and the device's thread goes on with the
next layer. So hooks on weights, among them an optimizer's step, run beside the device, and find what is complete.

A buffer holds one layer's gradients as its range holds the weights. It is used again when nobody has any of them any more:
neither `.grad`, nor a program that kept one. So a step holds a buffer for each layer, and two beside those whose gradients
its hooks take away.

[Note: order of gradients] Three waits beside those of `engines.py` and `weights.py`:

    9   out waits for compute        before it reads a gradient
    10  the caller waits for out     before it gets the gradient
    11  compute waits for out        before a gradient's device memory is let go: when the next layer's have been computed
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from streambp.offload.engines import HOST, Engine

Arrival = list[tuple[Engine, Any]]  # of a layer's call: the event after which its gradients are there; []: none has left
Leave = Callable[[Sequence[Tensor], Sequence[Tensor | None]], list[Tensor | None]]  # weights and their gradients [...]


class Arriving(torch.autograd.Function):
    """Weights [...] on the host -> themselves; their gradients wait for an arrival. [Note: gradients on the host]"""

    @staticmethod
    def forward(ctx: Any, arrival: Arrival, *weights: Tensor) -> tuple[Tensor, ...]:
        """The weights [...], for a layer's Function to take."""
        ctx.arrival = arrival
        ctx.set_materialize_grads(False)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients [...] of the weights, which are complete from now on."""
        for engine, event in ctx.arrival:
            engine.wait(HOST, event)  # 10
            for gradient in gradients:
                if gradient is not None:
                    engine.access(HOST, gradient, write=False)
        return None, *gradients


@dataclasses.dataclass
class Buffer:
    """Host memory [bytes], uint8, for one layer's gradients. given: what sees the storages of those in it."""

    memory: Tensor
    given: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)
