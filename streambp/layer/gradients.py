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


class BackwardPass:
    """One backward pass through a layer: where gradients come from, and where they are added up.

    Args:
        of_output: the gradient of hidden_states [..., B, T, h]; None: nobody used them. of_extras: of the extra outputs.

    needs_input, wanted: whether hidden_states and each differentiable argument wants a gradient.
    hidden_states: the buffer [..., B, T, h] of their gradient, if it is wanted. It may be the incoming gradient itself: a
        chunk's part is written after it was read. [Note: gradient reuse]
    sums: of the parameters' gradients; `sums.alone`: one chunk gives all of it, which needs no buffer.
    shadows: stand in for the parameters. [Note: shadows]
    """

    def __init__(
        self, call: LayerCall, parameters: int, of_output: Tensor | None, of_extras: dict[Place, Tensor | None]
    ) -> None:
        self.of_output, self.of_extras = of_output, of_extras
        self.needs_input, self.wanted = call.wanted
        self.hidden_states: Tensor | None = None
        self.sums = GradientSum(parameters, call.gradients_of_a_parameter)
        self.shadows: list[Tensor] = []
        self._arguments = [d for d, needs in zip(call.arguments.differentiable, self.wanted, strict=True) if needs]
        self._buffers = [None if d.dim is None else torch.zeros_like(d.tensor) for d in self._arguments]
        self._argument_sums = GradientSum(len(self._arguments), call.gradients_of_a_parameter)

    def upstream(self, output: ChunkOutput, chunk: Chunk) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of a chunk that depend on something, hidden_states [..., B, C, h] first, and their gradients."""
        tensors, gradients = [], []
        for place, grad in ((None, self.of_output), *self.of_extras.items()):
            tensor = output.hidden_states if place is None else output.extras[place]
            if grad is not None and tensor.requires_grad:
                tensors.append(tensor)
                dim = -2 if place is None else place.dim
                gradients.append(chunk.part(grad, dim))
        return tensors, gradients

    def add(self, chunk: Chunk, gradients: list[Tensor | None], again: bool = False) -> None:
        """Take in a chunk's gradients: of hidden_states [..., B, C, h] first, if wanted, then of the wanted arguments.

        again: they come on top of those that were added before.
        """
        first, *gradients = gradients if self.needs_input else (None, *gradients)
        if self.needs_input and self.sums.alone:
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
        self._argument_sums.add(summed)

    def of_arguments(self) -> list[Tensor | None]:
        """One for every differentiable argument, in its shape [...]; None where it is not wanted."""
        if not self._arguments:
            return [None] * len(self.wanted)
        sums = self._argument_sums.result([argument.tensor for argument in self._arguments])
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
