"""Gradients of one layer call, chunk by chunk: what comes in for its outputs, what goes out for its inputs.

[Note: gradient reuse] The backward of layer i returns dx, a buffer that we allocated, and autograd hands it to layer i - 1
as its incoming gradient. Nobody needs it after that, so layer i - 1 may write its own dx into it, which saves 8 KB a token
on an 8B model. Nobody, unless `autograd.grad(loss, [x, h])` captured it, a tensor hook or `retain_grad` kept it, or an
operation shares its storage. All of these hold a reference: the buffer is reused only if it carries our mark and its
tensor, Python and storage reference counts are those of a gradient that only the engine holds. These are measured once,
on a chain of two Functions like ours; where they differ for another reason, the buffer is not reused, which costs memory
and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import torch
from torch import Tensor

from streambp.chunks import Chunk
from streambp.known_names import USE_COUNT
from streambp.layer.call import LayerCall
from streambp.layer.outputs import ChunkOutput, Place
from streambp.layer.shadows import GradientSum


@dataclasses.dataclass
class OutputGradients:
    """Gradients of hidden_states [..., B, T, h] and of the extra outputs; None for an output that nobody used."""

    hidden_states: Tensor | None
    extras: dict[Place, Tensor | None]

    def of(self, output: ChunkOutput, chunk: Chunk) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of a chunk that depend on something, hidden_states [..., B, C, h] first, and their gradients."""
        tensors, gradients = [], []
        for place, grad in ((None, self.hidden_states), *self.extras.items()):
            tensor = output.hidden_states if place is None else output.extras[place]
            if grad is not None and tensor.requires_grad:
                tensors.append(tensor)
                dim = -2 if place is None else place.dim
                gradients.append(chunk.part(grad, dim))
        return tensors, gradients


class InputGradients:
    """Collects the gradients of hidden_states and of the differentiable arguments.

    hidden_states: the buffer [..., B, T, h], or None if no gradient is wanted. It may be the incoming gradient itself: a
        chunk's part is written after it was read. [Note: gradient reuse]
    alone: one chunk gives all of it, which needs no buffer.
    """

    def __init__(self, call: LayerCall, wanted: list[bool], needs_input: bool) -> None:
        self.hidden_states: Tensor | None = None
        self.needs_input, self.alone = needs_input, call.gradients_of_a_parameter == 1
        self.wanted = wanted
        self._arguments = [d for d, needs in zip(call.arguments.differentiable, wanted, strict=True) if needs]
        self._buffers = [None if d.dim is None else torch.zeros_like(d.tensor) for d in self._arguments]
        self._sums = GradientSum(len(self._arguments), call.gradients_of_a_parameter)

    def add(self, chunk: Chunk, gradients: list[Tensor | None], again: bool = False) -> None:
        """Take in a chunk's gradients: of hidden_states [..., B, C, h] first, if wanted, then of the wanted arguments.

        again: they come on top of those that were added before.
        """
        first, *gradients = gradients if self.needs_input else (None, *gradients)
        if self.needs_input and self.alone:
            self.hidden_states = first
        elif self.hidden_states is not None:
            part = chunk.part(self.hidden_states, -2)
            if first is not None:
                part.add_(first) if again else part.copy_(first)
            elif not again:
                part.zero_()
        summed: list[Tensor | None] = [None] * len(self._arguments)
        for index, (argument, gradient) in enumerate(zip(self._arguments, gradients, strict=True)):
            buffer = self._buffers[index]
            if buffer is None:
                summed[index] = gradient
            elif gradient is not None:
                assert argument.dim is not None
                chunk.part(buffer, argument.dim).add_(gradient)
        self._sums.add(summed)

    def result(self) -> list[Tensor | None]:
        """One for every differentiable argument, in its shape [...]; None where it is not wanted."""
        if not self._arguments:
            return [None] * len(self.wanted)
        sums = self._sums.result([argument.tensor for argument in self._arguments])
        found = iter([total if buffer is None else buffer for buffer, total in zip(self._buffers, sums, strict=True)])
        return [next(found) if needs else None for needs in self.wanted]


Counts = tuple[int, int, int]
UNKNOWN = 0


def reference_counts(gradient: Tensor) -> Counts:
    """Of the tensor, its Python object and its storage. Call it directly in a Function's `backward(ctx, gradient)`.

    gradient: [..., B, T, h] in a layer's backward.
    """
    storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)  # type: ignore[attr-defined]
    tensor = getattr(gradient, USE_COUNT, lambda: UNKNOWN)()  # a torch without it cannot tell: nothing is reused
    return tensor, sys.getrefcount(gradient), storage


def mark(gradient: Tensor) -> Tensor:
    """Say that this buffer [..., B, T, h] was allocated by us to be returned as a gradient."""
    gradient._streambp_buffer = True  # type: ignore[attr-defined]
    return gradient


def may_overwrite(gradient: Tensor, counts: Counts, like: Tensor) -> bool:
    """Whether `gradient` [...] can serve as the buffer of one shaped and typed like `like`. [Note: gradient reuse]"""
    return (
        getattr(gradient, "_streambp_buffer", False)
        and counts[0] != UNKNOWN
        and counts == counts_when_alone()
        and gradient.shape == like.shape
        and gradient.dtype == like.dtype
        and gradient.is_contiguous()
        and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    )


@functools.cache
def counts_when_alone() -> Counts:
    """The counts of a gradient that our own Function returned and nobody but the engine holds; fixed for a process."""
    seen: list[Counts] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(reference_counts(gradient))
            return mark(torch.empty_like(gradient))

    with torch.enable_grad():
        x = torch.zeros(2, requires_grad=True, device="cpu")
        torch.autograd.grad(Probe.apply(Probe.apply(x)), [x], torch.zeros_like(x))
    return seen[1]
