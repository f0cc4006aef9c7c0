"""Gradients of weights that live on the host: they leave when their layer's backward is over; autograd finds them there.

    HostGradients   of one patched model: memory of the host, used again and again, and what is on its way there
      Buffer        the gradients of one layer
    Arriving        the autograd Function between such weights and their layer, by which gradients arrive

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

from streambp.offload.engines import COMPUTE, HOST, OUT, Engine
from streambp.offload.ranges import HostRanges, view_of

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

    @property
    def is_free(self) -> bool:
        """Whether nobody has one of them any more."""
        return all(storage() is None for storage in self.given)


class HostGradients:
    """Of one patched model."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._leaving: tuple[Engine, Any, list[Tensor]] | None = None

    @property
    def bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def leave(
        self,
        ranges: HostRanges,
        index: int,
        engine: Engine,
        arrival: Arrival,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Put copies of a layer's gradients [...] to the host into their queue.

        Args:
            ranges: where the layer's weights live, and what gives host memory. weights: that they are of, in their order.
            arrival: of the call.

        Returns:
            the host's tensors [...] that are on their way; gradients of weights that live on the device, as they are.

        Raises:
            HostMemoryError: the host has no room for them.
        """
        layer = ranges.layers[index]
        pieces = {id(piece.tensor): piece for piece in layer.pieces}
        pairs = zip(weights, gradients, strict=True)
        going = {id(w): (pieces[id(w)], g) for w, g in pairs if g is not None and id(w) in pieces}
        self.let_go()
        if not going:
            return list(gradients)
        # A buffer of as many bytes that nobody needs, or a new one, which is there in training as well.
        size = layer.memory.numel()
        buffer = next((one for one in self._buffers if one.memory.numel() == size and one.is_free), None)
        if buffer is None:
            with torch.inference_mode(False):
                buffer = Buffer(ranges.more(size, engine, "The gradients of a layer"))
            ranges.beside += size
            self._buffers.append(buffer)
        buffer.given.clear()
        for _, gradient in going.values():
            engine.access(COMPUTE, gradient, write=True)
        engine.wait(OUT, engine.record(COMPUTE))  # 9
        there = dict[int, Tensor]()
        for key, (piece, gradient) in going.items():
            engine.copy(OUT, piece.within(buffer.memory), gradient)
            # With a storage of its own, which tells when nobody has it any more.
            there[key] = view_of(buffer.memory, piece.offset, piece.home)
            buffer.given.append(weakref.ref(there[key].untyped_storage()))
        event = engine.record(OUT)
        arrival[:] = [(engine, event)]
        self._leaving = engine, event, [gradient for _, gradient in going.values()]
        return [there.get(id(w), g) for w, g in zip(weights, gradients, strict=True)]

    def let_go(self) -> None:
        """Of the gradients on the device that left last."""
        if self._leaving is not None:
            engine, event, gradients = self._leaving
            engine.wait(COMPUTE, event)  # 11
            for gradient in gradients:
                engine.access(COMPUTE, gradient, write=True)  # as whoever has the memory next may do
            self._leaving = None
