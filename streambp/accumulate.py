"""Sum gradients, and the matrix products of weight gradients, in promote_types(dtype, float32)
(DESIGN.md section 2).

    total = None
    for each chunk or block:
        total = add_product(total, grad.mT, x)      # dW [out, in] of grad [n, out] and x [n, in]

CUDA's matrix product of half-precision factors can write float32 and add to existing values. No
product is then rounded, and the sum needs no pass of its own. For the head of an 8B model, a
product and a separate addition move 7.5 GB a block, the product alone 5. This is in torch since
2.10 (`out_dtype` of `addmm`, with a float32 `self`). ROCm lacks some cases, and TunableOp disables
it.

CPU tensors are widened instead. Rounded products, summed over blocks, would cost one more rounding
of the sum. Every gradient of the model comes from the head's dhidden; with rounded products its
error was 1.2 times that of full logits.

Tensors without data (on meta, fake) are computed like CUDA tensors. torch 2.11 cannot run `addmm`
with `out_dtype` on such tensors: the dtype is taken for beta. The in-place `addmm_` has no dtype
check there, and counts the same bytes and FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._decomp import decompositions

from streambp.device import has_data

aten = torch.ops.aten
HALF_DTYPES = (torch.float16, torch.bfloat16)
HAS_ADDMM_DTYPE = hasattr(decompositions, "addmm_dtype")  # true in torch 2.12 and later


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Add the matrix product left @ right to `total` in place, without autograd. The product of
    matrices in half precision is computed and added in float32, and never rounded to half
    precision.

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
    wide = torch.float32 if left.dtype in HALF_DTYPES else left.dtype
    if wide != left.dtype and left.device.type == "cpu":
        left = left.to(wide)
        right = right.to(wide)
    if total is None:
        if wide != left.dtype and _can_sum_in_float32(left):
            return aten.mm.dtype(left, right, wide)
        return (left @ right).to(wide)
    sums_inside = total.dtype == wide and not left.is_cpu and _can_sum_in_float32(left)
    if total.dtype == left.dtype or (sums_inside and not HAS_ADDMM_DTYPE and not has_data(left)):
        return total.addmm_(left, right)
    if sums_inside:
        aten.addmm.dtype_out(total, left, right, wide, out=total)
        return total
    return total.add_(left @ right)


def _can_sum_in_float32(x: Tensor) -> bool:
    """True if x's device can multiply half-precision matrices and add the product to a float32
    tensor in one operation, without rounding the product to half precision.

    Args:
        x: one of the matrices. A tensor on the meta device counts as a tensor on CUDA, because
            predictions for CUDA run on meta.
    """
    if x.is_meta:
        return True
    return x.is_cuda and torch.version.hip is None and not torch.cuda.tunable.is_enabled()


class GradientSum:
    """Sums of the gradients of several parameters over the chunks of a sequence, in
    promote_types(dtype, float32). A layer's backward runs chunk by chunk, and each chunk gives a
    gradient of every parameter (DESIGN.md section 2).

    Args:
        count: number of parameters.
        parts: number of chunks.

    Attributes:
        is_single_chunk: True if there is one chunk. Each parameter then gets one gradient, which is
            returned without a sum.
        index_by_alias: index of each parameter, by the id() of a detached alias. Backward
            differentiates with respect to the alias and fills this dict; `adder` reads the dict.
    """

    def __init__(self, count: int, parts: int) -> None:
        self._sums: list[Tensor | None] = [None] * count
        self.is_single_chunk = parts == 1
        self.index_by_alias: dict[int, int] = {}
        self._casts: dict[
            tuple[int, torch.dtype, bool], Tensor
        ] = {}  # by id, dtype and whether with a graph
        self._products_added: dict[
            int, int
        ] = {}  # by parameter, added products of the current chunk
        self._products_to_skip: dict[int, int] = {}  # added products that a retry still has to skip

    def begin(self, is_retry: bool = False) -> None:
        """Prepare for the gradients of the next chunk. Called before each chunk's backward. [Note:
        once for each chunk]

        Args:
            is_retry: True if the same chunk runs again, because its backward ran out of memory. The
                matrix products that the first attempt has added are then not added again.
        """
        self._products_to_skip = dict(self._products_added) if is_retry else {}
        if not is_retry:
            self._products_added.clear()

    def adder(self, weight: Tensor) -> Callable[[Tensor, Tensor], None] | None:
        """Return a function (left, right) that adds the matrix product left [out, n] @ right [n,
        in] to the sum for a weight [out, in]. A Linear's backward calls this function, so that the
        product is never rounded to half precision.

        Return None if `weight` is not among the parameters, or if there is only one chunk.

        Args:
            weight: the detached alias with which the chunk was computed in the parameter's place.
        """
        index = self.index_by_alias.get(id(weight))
        if index is None or self.is_single_chunk:
            return None

        def add(left: Tensor, right: Tensor) -> None:
            if self._products_to_skip.get(index):
                self._products_to_skip[index] -= 1
                return
            self._sums[index] = add_product(self._sums[index], left, right)
            self._products_added[index] = self._products_added.get(index, 0) + 1

        return add

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in `dtype`. The cast is computed once for all chunks of a
        backward pass and stored in this object, as autocast's cache does in forward."""
        key = (id(weight), dtype, torch.is_grad_enabled())
        if key not in self._casts:
            self._casts[key] = weight.to(dtype)
        return self._casts[key]

    def add(self, gradients: list[Tensor | None]) -> None:
        """Add the gradients of one chunk to the sums. [Note: once for each chunk]

        If there is only one chunk, its gradients are stored without copies. Otherwise a parameter's
        first gradient is copied to start the sum, and its entry in `gradients` becomes None. If
        memory runs out here, the caller can call this method again with the same list, and no
        gradient is added twice.

        Args:
            gradients: gradient [...] of each parameter, in the parameter's shape; None: no
                gradient. Entries may become None.
        """
        totals = []
        parts = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self._sums[index]
            if self.is_single_chunk:
                self._sums[index] = gradient
            elif total is None:
                self._sums[index] = gradient.to(
                    torch.promote_types(gradient.dtype, torch.float32), copy=True
                )
                gradients[index] = None
            else:
                totals.append(total)
                parts.append(gradient)
        if totals:
            torch._foreach_add_(totals, parts)

    def result(self, like: list[Tensor]) -> list[Tensor | None]:
        """Return the summed gradient [...] of each parameter, cast to the parameter's dtype; None
        for a parameter without a gradient. Called once, after the last chunk.

        Args:
            like: the parameters, in the order of the gradients.
        """
        self._casts.clear()
        sums = zip(self._sums, like, strict=True)
        return [
            total if total is None or total.dtype == parameter.dtype else total.to(parameter.dtype)
            for total, parameter in sums
        ]
