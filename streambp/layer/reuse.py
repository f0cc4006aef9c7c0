"""Whether a gradient's memory may be written over.

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

from streambp.known_names import USE_COUNT

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
    """Whether `gradient` can serve as the buffer of a gradient shaped and typed like `like`. [Note: gradient reuse]"""
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
        x = torch.zeros(2, requires_grad=True)
        torch.autograd.grad(Probe.apply(Probe.apply(x)), [x], torch.zeros(2))
    return seen[1]
