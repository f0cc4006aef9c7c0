"""Sum matrix products in promote_types(dtype, float32), for weight gradients (DESIGN.md section 2).

    total = None
    for each chunk or block:
        total = add_product(total, grad.mT, x)      # dW [out, in] of grad [n, out] and x [n, in]

[Note: sums inside products] CUDA's matrix product of half-precision factors can write float32 and
add to existing values. No product is then rounded, and the sum needs no pass of its own. For the
head of an 8B model, a product and a separate addition move 7.5 GB a block, the product alone 5.
This is in torch since 2.10 (`out_dtype` of `addmm`, with a float32 `self`). ROCm lacks some cases,
and TunableOp disables it.

CPU tensors are widened instead. Rounded products, summed over blocks, would cost one more rounding
of the sum. Every gradient of the model comes from the head's dhidden; with rounded products its
error was 1.2 times that of full logits.

Tensors without data (on meta, fake) are computed like CUDA tensors. torch 2.11 cannot run `addmm`
with `out_dtype` on such tensors: the dtype is taken for beta. The in-place `addmm_` has no dtype
check there, and counts the same bytes and FLOPs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._decomp import decompositions

from streambp.device import has_data

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
RUNS_WITHOUT_DATA = hasattr(decompositions, "addmm_dtype")  # true in torch 2.12 and later


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Compute total + left @ right in place, without autograd. [Note: sums inside products]

    Args:
        total: [m, n] in promote_types(left's dtype, float32) or wider, with contiguous rows, such
            as a slice of rows; None: the sum is empty.
        left: [m, k], any strides.
        right: [k, n] in left's dtype.

    Returns:
        `total` itself; for None a new tensor in promote_types(left's dtype, float32).
    """
    # every backward runs without grad, and then saves the cost of the context
    if torch.is_grad_enabled():
        with torch.no_grad():
            return add_product(total, left, right)
    # torch.promote_types costs a dispatch
    wide = torch.float32 if left.dtype in HALF else left.dtype
    if wide != left.dtype and left.device.type == "cpu":
        left = left.to(wide)
        right = right.to(wide)
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
    """True if the device can write half-precision products in float32."""
    if x.is_meta:
        return True
    return x.is_cuda and torch.version.hip is None and not torch.cuda.tunable.is_enabled()
