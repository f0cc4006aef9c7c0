"""Triton kernel for all softmax statistics of a block of raw logits in one read.

torch would read the block once for each statistic and write a float32 copy. The numbers are those
of `blocks.fold_in_torch`, the reference in this kernel's tests (in Triton's interpreter without a
GPU).
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch do not include Triton
    triton = None

TRITON_AVAILABLE = triton is not None
MAX_BLOCK_WIDTH = 4096  # maximal number of entries in a program at once, a power of two
WARPS = 8
STATISTICS_COUNT = 6
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.lru_cache
def supports_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the Triton kernels that compute softmax statistics and gradients of logits support
    this device and dtype. False: torch's operators must be used in their place.

    The kernels compute in float32 and do not support float64. True also for the device meta, whose
    tensors represent tensors on CUDA in a prediction; no kernel runs there.
    """
    if dtype not in KERNEL_DTYPES:
        return False
    if device.type == "meta":
        return True
    return (
        TRITON_AVAILABLE
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context manager that makes `device` the current CUDA device, on which Triton launches
    kernels. Other devices are ignored."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


if TRITON_AVAILABLE:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        product, labels, out, best_out, stride, columns, first, scale, softcap, temperature,
        capped: tl.constexpr, width: tl.constexpr, fields: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        label = tl.load(labels + row) - first
        top = -float("inf")
        summed = 0.0
        mean = 0.0
        squares = 0.0
        total = 0.0
        target = 0.0
        best = tl.zeros((), dtype=tl.int64)
        for start in range(0, columns, width):
            column = start + tl.arange(0, width)
            in_vocabulary = column < columns
            z = (
                tl.load(product + row * stride + column, mask=in_vocabulary, other=0.0).to(
                    tl.float32
                )
                * scale
            )
            if capped:
                z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)  # tanh
            z = z / temperature
            total += tl.sum(tl.where(in_vocabulary, z, 0.0), axis=0)
            target += tl.sum(tl.where(in_vocabulary & (column == label), z, 0.0), axis=0)
            z = tl.where(in_vocabulary, z, -float("inf"))
            largest = tl.max(z, axis=0)
            best = tl.where(largest > top, start + tl.argmax(z, axis=0).to(tl.int64), best)
            higher = tl.maximum(top, largest)
            base = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf would be NaN
            shrink = tl.exp(top - base)
            weights = tl.exp(z - base)
            summed = summed * shrink + tl.sum(weights, axis=0)
            squares = squares * shrink * shrink + tl.sum(weights * weights, axis=0)
            mean = mean * shrink + tl.sum(tl.where(weights == 0.0, 0.0, weights * z), axis=0)
            top = higher
        tl.store(out + row * fields, top)
        tl.store(out + row * fields + 1, summed)
        tl.store(out + row * fields + 2, target)
        tl.store(out + row * fields + 3, mean)
        tl.store(out + row * fields + 4, squares)
        tl.store(out + row * fields + 5, total)
        tl.store(best_out + row, best + first)


def fold_rows(
    product: Tensor,
    labels: Tensor,
    first: int,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> tuple[Any, ...]:
    """Return the fields of `blocks.Fold` for n tokens over v vocabulary entries, [n] each.

    The first six are in float32: the largest logit z, the sum of w = exp(z - max), the label's z,
    and sums of w z, w^2 and z. The last is the index in the full vocabulary of the largest z, in
    int64.

    Args:
        product: [n, v] in float32 or half precision, matrix products of the output projection; read
            once.
        labels: the labels [n], indices in the full vocabulary.
        first: index in the full vocabulary of the first column.
        scale: factor of the products.
        softcap: bound of the logits, or None.
        temperature: divisor of the logits.
    """
    rows, columns = product.shape
    if product.stride(1) != 1:
        product = product.contiguous()
    out = product.new_empty((rows, STATISTICS_COUNT), dtype=torch.float32)
    best = product.new_empty(rows, dtype=torch.int64)
    if rows and product.device.type != "meta":
        with use_device(product.device):
            _kernel[(rows,)](
                product, labels.contiguous(), out, best, product.stride(0), columns, first, scale, softcap or 1.0,
                temperature, capped=softcap is not None,
                width=min(MAX_BLOCK_WIDTH, triton.next_power_of_2(columns)),
                fields=STATISTICS_COUNT,
                num_warps=WARPS,
            )  # fmt: skip
    return *out.unbind(1), best
