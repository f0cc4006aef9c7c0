"""Gradients of one layer call, chunk by chunk: incoming gradients of its outputs, accumulated
gradients of its inputs.

[Note: gradient reuse] The backward of layer i returns dx, a buffer that streambp allocated, and
autograd passes it to layer i - 1 as its incoming gradient. Layer i - 1 may write its own dx into
the buffer if no other code needs it, which saves 8 KB a token on an 8B model. Other users are
`autograd.grad(loss, [x, h])`, a tensor hook, `retain_grad`, and operations that share the storage.
Each of these users holds a reference. The buffer is reused only if it has streambp's mark and if
its tensor, Python and storage reference counts equal the counts of a gradient that only the engine
holds. These counts are measured once, on a chain of two Functions. If the counts differ for another
reason, the buffer is not reused, which costs memory only.
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
    """One backward pass through a layer: its incoming gradients and its accumulators.

    Args:
        of_output: gradient of hidden_states [..., B, T, h]; None: hidden_states were not used.
        of_extras: gradients of the extra outputs.

    Attributes:
        needs_input: True if hidden_states need a gradient.
        wanted: True for each differentiable argument that needs a gradient.
        hidden_states: the buffer [..., B, T, h] for dx; None: no gradient is wanted. It may be the
            incoming gradient itself: a chunk's part is written after the last read. [Note: gradient
            reuse]
        sums: accumulators of the parameters' gradients.
        shadows: the tensors in the parameters' slots. [Note: shadows]
    """

    def __init__(
        self,
        call: LayerCall,
        parameters: int,
        of_output: Tensor | None,
        of_extras: dict[Place, Tensor | None],
    ) -> None:
        self.of_output, self.of_extras = of_output, of_extras
        self.needs_input, self.wanted = call.backward.wanted
        self.hidden_states: Tensor | None = None
        self.sums = GradientSum(parameters, call.backward.gradients_of_a_parameter)
        self.shadows: list[Tensor] = []
        self._arguments = [
            d for d, needs in zip(call.arguments.differentiable, self.wanted, strict=True) if needs
        ]
        self._buffers = [
            None if d.dim is None else torch.zeros_like(d.tensor) for d in self._arguments
        ]
        self._argument_sums = GradientSum(
            len(self._arguments), call.backward.gradients_of_a_parameter
        )

    def upstream(self, output: ChunkOutput, chunk: Chunk) -> tuple[list[Tensor], list[Tensor]]:
        """Return the chunk's outputs that have a graph, hidden_states [..., B, C, h] first, and
        their incoming gradients.
        """
        tensors, gradients = [], []
        for place, grad in ((None, self.of_output), *self.of_extras.items()):
            tensor = output.hidden_states if place is None else output.extras[place]
            if grad is not None and tensor.requires_grad:
                tensors.append(tensor)
                dim = -2 if place is None else place.dim
                gradients.append(chunk.part(grad, dim))
        return tensors, gradients

    def add(self, chunk: Chunk, gradients: list[Tensor | None], again: bool = False) -> None:
        """Accumulate a chunk's gradients.

        Args:
            gradients: of hidden_states [..., B, C, h] first, if wanted, then of the wanted
                arguments.
            again: add to the chunk's earlier gradients instead of overwriting.
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
        """Return one gradient for each differentiable argument, in its shape [...]; None for an
        unwanted gradient.
        """
        if not self._arguments:
            return [None] * len(self.wanted)
        sums = self._argument_sums.result([argument.tensor for argument in self._arguments])
        found = iter(
            [
                total if buffer is None else buffer
                for buffer, total in zip(self._buffers, sums, strict=True)
            ]
        )
        return [next(found) if needs else None for needs in self.wanted]


Counts = tuple[int, int, int]
UNKNOWN = 0


def reference_counts(gradient: Tensor) -> Counts:
    """Return the reference counts of the tensor, its Python object and its storage. Must be called
    directly in a Function's `backward(ctx, gradient)`.

    Args:
        gradient: [..., B, T, h] in a layer's backward.
    """
    storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)  # type: ignore[attr-defined]
    tensor = getattr(
        gradient, USE_COUNT, lambda: UNKNOWN
    )()  # without this attribute no buffer is reused
    return tensor, sys.getrefcount(gradient), storage


def mark(gradient: Tensor) -> Tensor:
    """Mark this buffer [..., B, T, h] as allocated by streambp for a returned gradient."""
    gradient._streambp_buffer = True  # type: ignore[attr-defined]
    return gradient


def may_overwrite(gradient: Tensor, counts: Counts, like: Tensor) -> bool:
    """True if `gradient` [...] may be reused as a buffer with the shape and dtype of `like`. [Note:
    gradient reuse]
    """
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
    """Return the reference counts of a Function's gradient that only the engine holds. The counts
    are constant for a process.
    """
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
