"""Sums of matrix products in promote_types(dtype, float32): what weight gradients are made of (DESIGN.md section 2).

    total = None
    for each chunk or block:
        total = add_product(total, grad.mT, x)      # dW [out, in] of grad [n, out] and x [n, in]

[Note: sums inside products] CUDA's matrix product of half-precision factors can write float32 and add to what is there.
Then no product is rounded, and no pass over the sum is needed beside the product's own: for the head of an 8B model a
product and a separate addition move 7.5 GB a block, the product alone 5. torch has offered it since 2.10 (`out_dtype`
of `addmm`, with a float32 `self`); not on ROCm in all cases, and not while TunableOp is on.

On the CPU the factors are widened instead: rounded products, summed over blocks, are worth one rounding more of the sum,
and every gradient of the model comes from the head's dhidden, whose error was 1.2 times that of full logits.

Tensors without data (on meta, fake) stand for those on CUDA. torch 2.11 cannot run `addmm` with `out_dtype` on them (it
takes the dtype for beta), but its in-place `addmm_` asks no dtypes there: as many bytes, and as many FLOPs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._decomp import decompositions

from streambp.device import has_data

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
RUNS_WITHOUT_DATA = hasattr(decompositions, "addmm_dtype")  # of torch 2.12 and later


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, in place; no autograd. [Note: sums inside products]

    Args:
        total: [m, n] in promote_types(left's dtype, float32) or wider, rows contiguous (a slice of rows will do); None:
            nothing was added yet.
        left: [m, k], any strides. right: [k, n] in left's dtype.

    Returns:
        `total` itself, or a new tensor in promote_types(left's dtype, float32) where it was None.
    """
    if torch.is_grad_enabled():  # where it is off already, as in every backward, the context's price is saved
        with torch.no_grad():
            return add_product(total, left, right)
    wide = torch.float32 if left.dtype in HALF else left.dtype  # torch.promote_types costs a dispatch
    if wide != left.dtype and left.device.type == "cpu":
        left, right = left.to(wide), right.to(wide)
    if total is None:
        if wide != left.dtype and _sums_inside(left):
            return aten.mm.dtype(left, right, wide)
        return (left @ right).to(wide)
    sums_inside = total.dtype == wide and not left.is_cpu and _sums_inside(left)
    if total.dtype == left.dtype or (sums_inside and not RUNS_WITHOUT_DATA and not has_data(left)):
        return total.addmm_(left, right)
    if sums_inside:
        aten.addmm.dtype_out(total, left, right, wide, out=total)
        return total
    return total.add_(left @ right)


def _sums_inside(x: Tensor) -> bool:
    """Whether half-precision products can be written in float32."""
    if x.is_meta:
        return True
    return x.is_cuda and torch.version.hip is None and not torch.cuda.tunable.is_enabled()
