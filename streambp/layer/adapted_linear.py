"""A Linear with low-rank adapters as one operation: y = x W^T + b + s (x A^T) B^T.

peft computes the adapters beside the base's product. peft casts x to the adapters' dtype, writes
three tensors [..., out] and casts the sum back. The time for reading and writing these tensors
equals that of the base's product. Here the skinny products are first, and the large product is
added to their result (beta = 1), in forward and for dx. Only matrix products then read or write
tensors of the size of x or y, and y is rounded once less than in peft.

Adapters are often float32 beside a half-precision base. Rounding trained adapters to bfloat16 would
add an error that peft does not have. Each float32 factor is therefore split into two bfloat16
parts; tensor cores compute exact products of these parts and add them in float32:

    x A^T                   x [A_hi; A_lo]^T, both halves added
    u B^T                   [u_hi, u_lo, u_hi] [B_hi, B_hi, B_lo]^T

The product of the low parts is left out: 2^-16 of the result. A bfloat16 factor has one part.
`Factor.stack` contains [hi; hi; lo], so both kinds of product read a slice of it.

Biases are rows of B's stack, multiplied by columns of ones. B's stack also contains the scale and
the dropout scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streambp.accumulate import HALF_DTYPES, add_product
from streambp.device import without_autocast
from streambp.layer.products import UNREAD_OUTPUT, ComparedRows
from streambp.tensors import strip_view

HIGH_PART_STRIDE = 2  # every other part of [hi, lo, hi] is the high one


class Factor(NamedTuple):
    """A LoRA matrix [rank, m], prepared as right operand of matrix products in a given dtype.

    A float32 matrix is split into two half-precision matrices for products in half precision: hi,
    the rounded values, and lo, the rounding errors. The left operand x is split in the same way.
    The product is then hi(x) @ hi + lo(x) @ hi + hi(x) @ lo, computed at once: `left_operand` has
    columns hi, lo, hi, and `stack` has rows hi, hi, lo.

    Attributes:
        stack: [parts * rank + bias rows, m]: the parts one below the other, then the biases as
            rows.
        rank: the adapter's rank; for concatenated adapters the sum of their ranks.
        parts: number of [rank, m] matrices in `stack`. 1: the matrix itself, for products in
            float32 or wider. 2: hi twice, for a matrix that is in the products' half-precision
            dtype already and has no lo. 3: hi, hi and lo, for a float32 matrix and products in half
            precision.
    """

    stack: Tensor
    rank: int
    parts: int

    @property
    def distinct_rows(self) -> Tensor:
        """Return the rows of the LoRA matrix in `stack`, without repeated rows and biases. The rows
        are the rounded values hi [rank, m], or hi and the rounding errors lo [2 * rank, m] if
        `stack` contains lo. `thin_product` multiplies x by the transpose of these rows."""
        first = self.rank if self.parts > 1 else 0
        return self.stack[first : self.parts * self.rank]


def factor_of(matrix: Tensor, dtype: torch.dtype, rows: tuple[Tensor, ...] = ()) -> Factor:
    """Return a LoRA matrix as a `Factor` for matrix products in `dtype`. If `dtype` is a half
    precision and the matrix has a wider dtype, the `Factor` contains the rounded values and the
    rounding errors. Otherwise the matrix is only cast.

    Args:
        matrix: [rank, m].
        dtype: the dtype of the matrix products.
        rows: biases [m] to append below the matrix. A bias becomes one row, or two rows (rounded
            values, rounding errors) under the same condition as the matrix.
    """
    rank, size = matrix.shape
    parts = _parts(matrix.dtype, dtype)
    height = parts * rank + sum(_rows(row.dtype, dtype) for row in rows)
    stack = matrix.new_empty(height, size, dtype=dtype)
    if parts == 3:
        stack[: 2 * rank].unflatten(0, (2, rank)).copy_(matrix)
        torch.sub(matrix, stack[:rank], out=stack[2 * rank : 3 * rank])
    else:
        stack[: parts * rank].unflatten(0, (parts, rank)).copy_(matrix)
    stack_row = parts * rank
    for row in rows:
        stack[stack_row].copy_(row)
        if _rows(row.dtype, dtype) == 2:
            torch.sub(row, stack[stack_row], out=stack[stack_row + 1])
        stack_row += _rows(row.dtype, dtype)
    return Factor(stack, rank, parts)


def _parts(matrix_dtype: torch.dtype, dtype: torch.dtype) -> int:
    if dtype not in HALF_DTYPES:
        return 1
    return 2 if matrix_dtype == dtype else 3


def _rows(bias_dtype: torch.dtype, dtype: torch.dtype) -> int:
    return 2 if dtype in HALF_DTYPES and bias_dtype != dtype else 1


class AdapterGroup(NamedTuple):
    """LoRA adapters of one Linear that read the same tensor: the Linear's input x, or x after their
    dropout.

    Attributes:
        factor: the adapters' A matrices, one below the other.
        start: index of the group's first row in the concatenation of all A matrices of the Linear.
        stop: index behind the group's last row.
        mask: [n, in], True where dropout keeps an entry of x; None: no dropout.
    """

    factor: Factor
    start: int
    stop: int
    mask: Tensor | None = None

    def read(self, rows: Tensor) -> Tensor:
        """Return the Linear's input `rows` [n, in], with zeros where this group's dropout mask is
        False; unchanged without a mask."""
        return rows if self.mask is None else rows * self.mask


class AdapterScale(NamedTuple):
    """Scale factors of one LoRA adapter.

    Attributes:
        rank: the adapter's rank.
        b: factor of the product with B: peft's scaling, divided by 1 - p for a dropout probability
            p.
        bias: factor of the bias of B: peft's scaling.
    """

    rank: int
    b: float
    bias: float


@dataclasses.dataclass
class AdaptedLinearArguments:
    """Arguments of one `AdaptedLinear` call that autograd does not differentiate: copies of the
    LoRA adapters' matrices A and B in the dtype of the matrix products, scales and options.

    Attributes:
        groups: the A matrices of all adapters; those that read the same tensor are one group.
        b: the B matrices of all adapters, transposed [rank, out] and multiplied by their scales,
            with the biases as further rows.
        scales: scales of each adapter.
        value: None: compute the output. A tensor [..., out]: the output that forward has saved;
            return a view of it. A slice: no code reads the output, so compute only these rows,
            which are compared with forward; all other rows are NaN. `UNREAD_OUTPUT`, the empty
            slice: compute no row.
        add: callback for backward: gets two matrices [out, n] and [n, in], and adds their product
            to the sum of the weight's gradient over chunks. None: autograd returns the gradient.
        decode: returns a quantized base weight in the compute dtype, so that backward needs no
            saved weight; None: the weight is not quantized and is saved for backward.
        shared: x A^T of several Linears with the same x, computed by one product; None: this Linear
            computes its own.
        member_index: the Linear's index in `shared.factors`; unused without `shared`.
    """

    groups: list[AdapterGroup]
    b: Factor
    scales: list[AdapterScale]
    value: Tensor | ComparedRows | None = None
    add: Callable[[Tensor, Tensor], None] | None = None
    decode: Callable[[], Tensor] | None = None
    shared: SharedInputState | None = None
    member_index: int = 0


def thin_product(x: Tensor, factor: Factor) -> Tensor:
    """Return x times the transpose of a LoRA matrix: [n, rank] in promote_types(x.dtype, float32).
    If `factor` has the matrix's rounded values and its rounding errors, the products of x with both
    are added.

    Args:
        x: [n, m], in the dtype of the factor.
        factor: the LoRA matrix [rank, m].
    """
    products = add_product(None, x, factor.distinct_rows.mT)
    if factor.parts < 3:
        return products
    return products[:, : factor.rank].add_(products[:, factor.rank :])


def left_operand(product: Tensor, factor: Factor) -> Tensor:
    """Return the left operand of a matrix product with `factor.stack`. The operand is made of
    `product`, which is x A^T or its gradient in float32.

    hi are the rounded values of `product`, and lo its rounding errors. The columns are hi if
    `factor` has one part, [hi, lo] for two parts, and [hi, lo, hi] for three. A column of ones
    follows for each bias row of `factor.stack`.

    Args:
        product: [n, rank].
        factor: the LoRA matrix whose `stack` is the right operand.

    Returns:
        [n, rows of `factor.stack`], in the dtype of `factor.stack`.
    """
    rank, width = product.shape[1], factor.stack.shape[0]
    if factor.parts == 1 and width == rank:
        return product
    out = product.new_empty(product.shape[0], width, dtype=factor.stack.dtype)
    # one view of the high parts: each slice would cost as much time as the launch of a kernel
    times = (factor.parts + 1) // HIGH_PART_STRIDE
    high = (times, product.shape[0], rank), (HIGH_PART_STRIDE * rank, width, 1)
    out.as_strided(*high).copy_(product)
    if factor.parts > 1:
        torch.sub(product, out[:, :rank], out=out[:, rank : 2 * rank])
    if width > factor.parts * rank:
        out[:, factor.parts * rank :].fill_(1.0)
    return out


def sum_parts(parts: Tensor, dim: int) -> Tensor:
    """Return a LoRA matrix's gradient: the sum of the two products from which it was computed. The
    sum overwrites the first product.

    Args:
        parts: [...], two products of equal shape, concatenated along `dim`: the product with an
            operand's rounded values, then the product with the operand's rounding errors.
        dim: the dimension along which the two products are concatenated.
    """
    first, second = parts.chunk(2, dim)
    return first.add_(second)


def join_factors(factors: list[Factor]) -> Factor:
    """Return the A matrices of several Linears, concatenated to one `Factor`, from which
    `thin_product` computes x A^T for all Linears at once.

    Args:
        factors: the A matrices of each Linear, all with the same `Factor.parts`.
    """
    high = [factor.distinct_rows[: factor.rank] for factor in factors]
    low = [factor.distinct_rows[factor.rank :] for factor in factors if factor.parts == 3]
    ranks = sum(factor.rank for factor in factors)
    return Factor(torch.cat((*high, *high, *low) if low else high), ranks, 3 if low else 1)


@dataclasses.dataclass
class SharedInputState:
    """Values that several LoRA Linears share while they are called with the same input x [..., in].

    Query, key and value projections read the same x, and so do gate and up projections. One product
    computes x A^T for all Linears, and another one the gradients of all A. Each Linear's backward
    adds its dx to one sum; the backward of `SharedInput` runs last and returns this sum.

    Attributes:
        factors: A of each Linear, all with the same `Factor.parts`.
        joined: the A of all Linears as one factor.
        needs_x: True if x needs a gradient.
        products: x A^T of all Linears, [n, sum of ranks]; None: not yet computed, or already freed
            because every Linear has read its columns.
        readers: the number of Linears that have not yet read their columns of `products`.
        total: sum of the Linears' gradients of x, [n, in]; None: nothing has been added yet.
        product_gradients: dict from a Linear's index in `factors` to the gradient of the Linear's
            x A^T, as returned by `left_operand`; contains the Linears whose backward has run.
    """

    factors: list[Factor]
    joined: Factor
    needs_x: bool
    products: Tensor | None = None
    readers: int = 0
    total: Tensor | None = None
    product_gradients: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def take_product(self, index: int) -> Tensor:
        """Return the columns of x A^T that belong to one Linear, [n, rank]. Each Linear calls this
        once; the last call frees the product of all Linears.

        Args:
            index: the Linear's index in `factors`.
        """
        products = self.products
        assert products is not None
        self.readers -= 1
        if not self.readers:
            self.products = None
        start = sum(factor.rank for factor in self.factors[:index])
        return products[:, start : start + self.factors[index].rank]

    def read(self, rows: Tensor) -> None:
        """Compute x A^T for each Linear from the common input x, and store the results in
        `products`, [n, sum of ranks]. A [rank, in] and B are the LoRA matrices of a Linear, which
        add (x A^T) B^T to the Linear's output.

        Args:
            rows: x, [n, in].
        """
        self.readers = len(self.factors)
        self.products = thin_product(rows, self.joined)

    def collect(
        self, index: int, product_gradient: Tensor, flat: Tensor, weight: Tensor | None
    ) -> None:
        """Add `flat` @ `weight` to the attribute `total`, the sum of the Linears' gradients of x
        [n, in], if x needs a gradient. Store `product_gradient` for `SharedInput.backward`, which
        adds the adapters' part to `total`. The backward of each Linear calls this method.

        Args:
            index: the Linear's index in the attribute `factors`, a list with the LoRA matrix A
                [rank, in] of each Linear.
            product_gradient: the gradient of x A^T [n, rank], as 1 to 3 blocks of `rank` columns,
                `factors[index].parts` in number. A single block has the values. Several blocks have
                rounded values, rounding errors, and the rounded values once more.
            flat: gradient of the Linear's output, [n, out].
            weight: the Linear's weight [out, in]; None: x needs no gradient.
        """
        self.product_gradients[index] = product_gradient
        if self.needs_x and weight is not None:
            self.total = flat @ weight if self.total is None else self.total.addmm_(flat, weight)


class SharedInput(torch.autograd.Function):
    """Autograd Function that returns x [..., in] for several LoRA Linears and computes x A^T for
    all of them. The backward runs after that of the Linears and returns the gradients of x and of
    every A."""

    @staticmethod
    def forward(
        ctx: Any, shared: SharedInputState, counts: list[int], x: Tensor, *a: Tensor
    ) -> Tensor:
        """Compute x A^T for all Linears into `shared`, and return x [..., in] as a view.

        Args:
            shared: the values that the Linears share, with the A matrices from which x A^T is
                computed.
            counts: the number of adapters of each Linear.
            x: [..., in].
            a: A [r, in] of each adapter of the first Linear, then of the next ones; for autograd
                only.
        """
        ctx.set_materialize_grads(False)
        ctx.shared, ctx.counts = shared, counts
        ctx.ranks = [matrix.shape[0] for matrix in a]
        ctx.save_for_backward(x)
        with without_autocast(x.device.type):
            shared.read(x.flatten(0, -2))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of `forward`'s arguments in their order: None for `shared` and
        `counts`, then the gradients of x [..., in] and of each A [r, in]. The gradients follow from
        values that the Linears' backward has stored in `shared`.

        Args:
            grad: gradient of x from code other than these Linears; None: there is none.
        """
        (x,) = ctx.saved_tensors
        with without_autocast(x.device.type):
            return _shared_backward(ctx, x, grad)


def _shared_backward(ctx: Any, x: Tensor, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    shared: SharedInputState = ctx.shared
    total, gradients_by_index, shared.total, shared.product_gradients = (
        shared.total,
        shared.product_gradients,
        None,
        {},
    )
    indices = sorted(gradients_by_index)
    stacks = [shared.factors[index].stack for index in indices]
    joined = torch.cat([gradients_by_index[index] for index in indices], 1) if indices else None
    if total is not None and joined is not None:
        total.addmm_(joined, torch.cat(stacks))
    d_x = (
        grad
        if total is None
        else total.view(x.shape)
        if grad is None
        else total.view(x.shape).add_(grad)
    )
    of_a: dict[int, Tensor] = {}
    if joined is not None and any(ctx.needs_input_grad[3:]):
        products = add_product(None, joined.mT, x.flatten(0, -2)).split(
            [gradients_by_index[index].shape[1] for index in indices]
        )
        for index, product in zip(indices, products, strict=True):
            rank = shared.factors[index].rank
            of_a[index] = (
                product[:rank]
                if product.shape[0] == rank
                else product[:rank] + product[rank : 2 * rank]
            )
    gradients: list[Tensor | None] = []
    ranks = iter(ctx.ranks)
    for index, count in enumerate(ctx.counts):
        rows = [next(ranks) for _ in range(count)]
        gradients += of_a[index].split(rows) if index in of_a else [None] * count
    pairs = zip(ctx.needs_input_grad[3:], gradients, strict=True)
    return (
        None,
        None,
        d_x if ctx.needs_input_grad[2] else None,
        *(gradient if needs else None for needs, gradient in pairs),
    )


class AdaptedLinear(torch.autograd.Function):
    """Autograd Function of a Linear (weight W, bias b) with LoRA adapters A and B of scale s:
    y [..., out] = x W^T + b + s (x A^T) B^T."""

    @staticmethod
    def forward(
        ctx: Any,
        work: AdaptedLinearArguments,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *adapters: Tensor | None,
    ) -> Tensor:
        """Return y [..., out]: computed, or the saved output as a view, or NaN in rows that no code
        reads.

        Args:
            work: copies of the adapters' matrices, their scales, and in `work.value` the saved
                output or the rows that are read.
            x: [..., in].
            weight: the Linear's weight [out, in].
            bias: the Linear's bias [out], for autograd; its values are in `work.b`.
            adapters: flat list of A [r, in], B [out, r] and the bias [out] of B or None, of each
                adapter; for autograd, the values are in `work`.
        """
        with without_autocast(x.device.type):
            return _forward(ctx, work, x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `forward`'s arguments in their order: None for `work`, then for x
        [..., in], weight [out, in], bias [out] and each adapter's tensors. The gradient of weight
        is None if `work.add` has already added the gradient to the sum over chunks.

        Args:
            grad: gradient of the output, [..., out].
        """
        with without_autocast(grad.device.type):
            return _backward(ctx, grad)


def _forward(ctx: Any, work: AdaptedLinearArguments, x: Tensor, weight: Tensor) -> Tensor:
    needs = ctx.needs_input_grad
    rows = x.flatten(0, -2)
    thin_parts = None
    if not isinstance(work.value, Tensor) or any(needs):
        thin_parts = _thin_operand(work, rows)
    ctx.work = dataclasses.replace(
        work, value=None, groups=[group._replace(mask=None) for group in work.groups]
    )
    saved_weight = weight if needs[1] and work.decode is None else None
    ctx.save_for_backward(x, saved_weight, thin_parts, *[group.mask for group in work.groups])
    if isinstance(work.value, Tensor):
        return work.value.view_as(work.value)
    assert thin_parts is not None
    shape = (*x.shape[:-1], weight.shape[0])
    if work.value is None:
        return strip_view(_product(rows, weight, thin_parts, work.b), shape)
    out = x.new_full(shape, torch.nan)
    if work.value is not UNREAD_OUTPUT:
        read = x[..., work.value, :]
        thin_parts = thin_parts.view(*x.shape[:-1], -1)[..., work.value, :]
        product = _product(read.flatten(0, -2), weight, thin_parts.flatten(0, -2), work.b)
        out[..., work.value, :] = product.view(*read.shape[:-1], -1)
    return out


def _thin_operand(work: AdaptedLinearArguments, rows: Tensor) -> Tensor:
    """Return x A^T for the Linear's input `rows` [n, in], as left operand of a product with
    `work.b.stack`: [n, parts * rank + bias rows]. There are 1 to 3 parts (`work.b.parts`) of `rank`
    columns each: rounded values, rounding errors, rounded values again. A column of ones follows
    for each row of biases in `work.b.stack`."""
    if work.shared is not None:
        return left_operand(work.shared.take_product(work.member_index), work.b)
    products = [thin_product(group.read(rows), group.factor) for group in work.groups]
    return left_operand(products[0] if len(products) == 1 else torch.cat(products, 1), work.b)


def _product(rows: Tensor, weight: Tensor, thin_parts: Tensor, b: Factor) -> Tensor:
    """Return y [n, out]: the product of x with the Linear's weight, plus the product of x A^T with
    `b.stack`.

    Args:
        rows: x, [n, in].
        weight: [out, in].
        thin_parts: x A^T with ones for the bias rows, from `_thin_operand`.
        b: the adapters' B matrices, with the biases as further rows.
    """
    return (thin_parts @ b.stack).addmm_(rows, weight.mT)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    x, weight, thin_parts, *masks = ctx.saved_tensors
    groups = [group._replace(mask=mask) for group, mask in zip(ctx.work.groups, masks, strict=True)]
    work = dataclasses.replace(ctx.work, groups=groups)
    rows, flat = x.flatten(0, -2), grad.flatten(0, -2)
    of_ranks = thin_product(flat, work.b)  # [n, rank], scaled
    if needs[1] and work.decode is not None:
        weight = work.decode()
    lefts = [
        left_operand(of_ranks[:, group.start : group.stop], group.factor) for group in work.groups
    ]
    d_x = None
    if work.shared is not None:
        work.shared.collect(work.member_index, lefts[0], flat, weight)
    elif weight is not None:
        d_x = _input_gradient(work, lefts, flat, weight).view(x.shape)
    d_weight = None
    if needs[2] and work.add is not None:
        work.add(flat.mT, rows)
    elif needs[2]:
        d_weight = flat.mT @ rows
    d_bias = flat.sum(0) if needs[3] else None
    of_a = _a_gradients(work, lefts, rows) if work.shared is None and any(needs[4::3]) else None
    of_adapters = _adapter_gradients(work, needs[4:], of_a, flat, thin_parts)
    return None, d_x, d_weight, d_bias, *of_adapters


def _input_gradient(
    work: AdaptedLinearArguments, lefts: list[Tensor], flat: Tensor, weight: Tensor
) -> Tensor:
    """Return the gradient [n, in] of the input of a LoRA Linear.

    Args:
        work: the adapters' matrices.
        lefts: gradient of x A^T for each of `work.groups`, as returned by `left_operand`.
        flat: gradient of the Linear's output, [n, out].
        weight: the Linear's weight [out, in].
    """
    total: Tensor | None = None
    for group, group_parts in zip(work.groups, lefts, strict=True):
        product = group_parts @ group.factor.stack
        if group.mask is not None:
            product.mul_(group.mask)
        total = product if total is None else total.add_(product)
    assert total is not None
    return total.addmm_(flat, weight)


def _a_gradients(work: AdaptedLinearArguments, lefts: list[Tensor], rows: Tensor) -> Tensor:
    """Return the gradients of all A matrices, one below the other, [rank, in], in float32 or wider.

    Args:
        work: the adapters' matrices.
        lefts: gradient of x A^T for each of `work.groups`, as returned by `left_operand`.
        rows: the Linear's input x, [n, in].
    """
    gradients = []
    for group, group_parts in zip(work.groups, lefts, strict=True):
        rank, parts = group.factor.rank, min(group.factor.parts, 2)
        product = add_product(None, group_parts[:, : parts * rank].mT, group.read(rows))
        gradients.append(product if parts == 1 else sum_parts(product, 0))
    return gradients[0] if len(gradients) == 1 else torch.cat(gradients)


def _adapter_gradients(
    work: AdaptedLinearArguments,
    needs: tuple[bool, ...],
    of_a: Tensor | None,
    flat: Tensor,
    thin_parts: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of the adapters' tensors, in float32 or wider. The result is a flat
    list: A [r, in], B [out, r] and B's bias [out] of the first adapter, then of the next ones. An
    entry is None if its tensor needs no gradient.

    Args:
        work: the adapters' matrices and scales.
        needs: a flag per tensor, in the order of the result: True if the tensor needs a gradient.
        of_a: gradients of all A of the Linear, one below the other, [rank, in]; None: no A needs a
            gradient, or `SharedInput` computes the gradients of A.
        flat: gradient of the Linear's output, [n, out].
        thin_parts: x A^T [n, rank] from `_thin_operand`, as 1 to 3 blocks of `rank` columns,
            `work.b.parts` in number. A single block has the values. Several blocks have rounded
            values, rounding errors, and the rounded values once more. The third block is not read
            here. Columns of ones for biases follow, and are not read either.
    """
    of_b: Tensor | None = None
    if any(needs[1::3]):
        parts = min(work.b.parts, 2)
        of_b = add_product(
            None, flat.mT, thin_parts[:, : parts * work.b.rank]
        )  # [out, rank or 2 rank]
        of_b = sum_parts(of_b, 1) if parts == 2 else of_b
    wide = torch.promote_types(flat.dtype, torch.float32)
    gradients: list[Tensor | None] = []
    start = 0
    for number, scale in enumerate(work.scales):
        stop = start + scale.rank
        wants_a, wants_b, wants_bias = needs[3 * number : 3 * number + 3]
        gradients.append(of_a[start:stop] if wants_a and of_a is not None else None)
        gradients.append(of_b[:, start:stop] * scale.b if wants_b and of_b is not None else None)
        gradients.append(flat.sum(0, dtype=wide) * scale.bias if wants_bias else None)
        start = stop
    return gradients
