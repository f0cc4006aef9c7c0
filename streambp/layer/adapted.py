"""A Linear with low-rank adapters as one operation: y = x W^T + b + s (x A^T) B^T.

[Note: one product] peft computes the adapters beside the base's product. It casts x to the
adapters' dtype, writes three tensors [..., out] and casts their sum back. These passes over memory
take as long as the base's product itself. Here the skinny products are first, and the large product
is added to their result (beta = 1), in forward and for dx. Only matrix products then read or write
tensors of the size of x or y, and y is rounded once less than in peft.

[Note: two parts] Adapters are often float32 beside a half-precision base. Rounding trained adapters
to bfloat16 would add an error that peft does not have. Each float32 factor is therefore split into
two bfloat16 parts; tensor cores compute exact products of these parts and add them in float32:

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

from streambp.accumulate import HALF, add_product
from streambp.device import without_autocast
from streambp.layer.products import UNREAD, Unread
from streambp.tensors import unviewed

HIGH_AGAIN = 2  # every other part of [hi, lo, hi] is the high one


class Factor(NamedTuple):
    """A matrix [rank, m] in parts of the product's dtype. [Note: two parts]

    Attributes:
        stack: [parts * rank + more, m], the parts one below the other, then rows of biases.
        rank: the adapter's rank.
        parts: 1 if the dtype represents the matrix and the sums of its products; 2 if only left
            factors have a low part; 3 for [hi; hi; lo].
    """

    stack: Tensor
    rank: int
    parts: int

    @property
    def wide(self) -> Tensor:
        """Return [rank or 2 rank, m], each part once."""
        first = self.rank if self.parts > 1 else 0
        return self.stack[first : self.parts * self.rank]


def factor_of(matrix: Tensor, dtype: torch.dtype, rows: tuple[Tensor, ...] = ()) -> Factor:
    """Return the matrix [rank, m] in parts of `dtype`.

    Args:
        rows: biases [m], each split into parts if needed.
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
    place = parts * rank
    for row in rows:
        stack[place].copy_(row)
        if _rows(row.dtype, dtype) == 2:
            torch.sub(row, stack[place], out=stack[place + 1])
        place += _rows(row.dtype, dtype)
    return Factor(stack, rank, parts)


def _parts(own: torch.dtype, dtype: torch.dtype) -> int:
    if dtype not in HALF:
        return 1
    return 2 if own == dtype else 3


def _rows(own: torch.dtype, dtype: torch.dtype) -> int:
    return 2 if dtype in HALF and own != dtype else 1


class Group(NamedTuple):
    """Adapters that read the same input.

    Attributes:
        factor: rows [rank, in] of A.
        start: first index among all ranks.
        stop: end index among all ranks.
        mask: [n, in], the dropout mask of x; None: no dropout. [Note: dropout]
    """

    factor: Factor
    start: int
    stop: int
    mask: Tensor | None = None

    def read(self, rows: Tensor) -> Tensor:
        """Return the adapters' input [n, in] for rows [n, in] of x."""
        return rows if self.mask is None else rows * self.mask


class Scale(NamedTuple):
    """Scales of one adapter.

    Attributes:
        rank: the adapter's rank.
        b: factor of its B.
        bias: factor of the bias of its B.
    """

    rank: int
    b: float
    bias: float


@dataclasses.dataclass
class Work:
    """Description of one call's computation, beside its tensors.

    Attributes:
        groups: A of all adapters.
        b: B of all adapters, [rank, out], scaled.
        scales: scales of each adapter.
        value: [..., out], the known y; None: compute y; `UNREAD` or a slice: only these rows are
            read.
        add: accumulates the factors of the base weight's gradient, which is None then.
        decode: returns the base's weight for backward, which then saves no weight; for packed
            weights.
        shared: shared values of several Linears with the same x; None: there are none.
        place: the Linear's index in `shared`.
    """

    groups: list[Group]
    b: Factor
    scales: list[Scale]
    value: Tensor | Unread | None = None
    add: Callable[[Tensor, Tensor], None] | None = None
    decode: Callable[[], Tensor] | None = None
    shared: Shared | None = None
    place: int = 0


def thin(left: Tensor, factor: Factor) -> Tensor:
    """Compute left [n, m] times the factor's transpose: [n, rank] in promote_types(dtype, float32).
    left is read once.
    """
    found = add_product(None, left, factor.wide.mT)
    if factor.parts < 3:
        return found
    return found[:, : factor.rank].add_(found[:, factor.rank :])


def spread(found: Tensor, factor: Factor) -> Tensor:
    """Split found [n, rank] into the parts [hi, lo, hi] for a factor's stack, and append ones for
    its biases.
    """
    rank, width = found.shape[1], factor.stack.shape[0]
    if factor.parts == 1 and width == rank:
        return found
    out = found.new_empty(found.shape[0], width, dtype=factor.stack.dtype)
    # one view of the high parts: each slice would cost as much time as the launch of a kernel
    times = (factor.parts + 1) // HIGH_AGAIN
    high = (times, found.shape[0], rank), (HIGH_AGAIN * rank, width, 1)
    out.as_strided(*high).copy_(found)
    if factor.parts > 1:
        torch.sub(found, out[:, :rank], out=out[:, rank : 2 * rank])
    if width > factor.parts * rank:
        out[:, factor.parts * rank :].fill_(1.0)
    return out


def summed_parts(found: Tensor, dim: int) -> Tensor:
    """Return the sum of both halves [...] of a product with two parts."""
    first, second = found.chunk(2, dim)
    return first.add_(second)


def joined_factor(factors: list[Factor]) -> Factor:
    """Return the A of several Linears as one factor for `thin`."""
    high = [factor.wide[: factor.rank] for factor in factors]
    low = [factor.wide[factor.rank :] for factor in factors if factor.parts == 3]
    ranks = sum(factor.rank for factor in factors)
    return Factor(torch.cat((*high, *high, *low) if low else high), ranks, 3 if low else 1)


@dataclasses.dataclass
class Shared:
    """Shared values of the Linears with the same x [..., in], in one call. [Note: one x]

    [Note: one x] Queries, keys and values read the same x, and so do gate and up. One product reads
    x for the A of all Linears, in forward and for the gradients of A. The gradient dx is a single
    sum. Each Linear's backward adds its large product to that sum. The autograd node before the Linears (`SharedInput`)
    runs after all Linears' backward, and adds the skinny product of all.

    Attributes:
        factors: A of each Linear, all with the same number of parts.
        joined: the A of all Linears as one factor.
        needs_x: True if x needs a gradient.
        found: x A^T of all Linears [n, ranks]; None: not computed, or read by each Linear.
        readers: the number of Linears that still read `found`.
        total: the sum for dx.
        left: skinny factors of the Linears whose backward ran, by index.
    """

    factors: list[Factor]
    joined: Factor
    needs_x: bool
    found: Tensor | None = None
    readers: int = 0
    total: Tensor | None = None
    left: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def of(self, place: int) -> Tensor:
        """Return x A^T of one Linear [n, rank], to be read once.

        The last Linear frees the product, which would otherwise stay alive with the graph.
        """
        found = self.found
        assert found is not None
        self.readers -= 1
        if not self.readers:
            self.found = None
        start = sum(factor.rank for factor in self.factors[:place])
        return found[:, start : start + self.factors[place].rank]

    def read(self, rows: Tensor) -> None:
        """Compute x A^T of all Linears for rows [n, in] of x."""
        self.readers = len(self.factors)
        self.found = thin(rows, self.joined)

    def collect(self, place: int, left: Tensor, flat: Tensor, weight: Tensor | None) -> None:
        """Store one Linear's skinny factor in backward, and add its large product flat [n, out] @
        weight to dx.
        """
        self.left[place] = left
        if self.needs_x and weight is not None:
            self.total = flat @ weight if self.total is None else self.total.addmm_(flat, weight)


class SharedInput(torch.autograd.Function):
    """Identity of x [..., in] for several Linears. [Note: one x]

    Args:
        counts: the number of adapters of each Linear.
        a: A of each adapter, [r, in].
    """

    @staticmethod
    def forward(ctx: Any, shared: Shared, counts: list[int], x: Tensor, *a: Tensor) -> Tensor:
        """Return x [..., in] as a view."""
        ctx.set_materialize_grads(False)
        ctx.shared, ctx.counts = shared, counts
        ctx.ranks = [one.shape[0] for one in a]
        ctx.save_for_backward(x)
        with without_autocast(x.device.type):
            shared.read(x.flatten(0, -2))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of x [..., in] and of each A, from the values that the Linears have
        stored.

        Args:
            grad: the gradient from other readers of x; None: there are none.
        """
        (x,) = ctx.saved_tensors
        with without_autocast(x.device.type):
            return _shared_backward(ctx, x, grad)


def _shared_backward(ctx: Any, x: Tensor, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    shared: Shared = ctx.shared
    total, left, shared.total, shared.left = shared.total, shared.left, None, {}
    places = sorted(left)
    stacks = [shared.factors[place].stack for place in places]
    joined = torch.cat([left[place] for place in places], 1) if places else None
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
            [left[place].shape[1] for place in places]
        )
        for place, product in zip(places, products, strict=True):
            rank = shared.factors[place].rank
            of_a[place] = (
                product[:rank]
                if product.shape[0] == rank
                else product[:rank] + product[rank : 2 * rank]
            )
    found: list[Tensor | None] = []
    ranks = iter(ctx.ranks)
    for place, count in enumerate(ctx.counts):
        rows = [next(ranks) for _ in range(count)]
        found += of_a[place].split(rows) if place in of_a else [None] * count
    wanted = zip(ctx.needs_input_grad[3:], found, strict=True)
    return (
        None,
        None,
        d_x if ctx.needs_input_grad[2] else None,
        *(one if needs else None for needs, one in wanted),
    )


class AdaptedLinear(torch.autograd.Function):
    """Autograd Function for x [..., in] through a Linear and its adapters. [Note: one product]

    Args:
        weight: [out, in].
        bias: [out]; `work.b` contains its values.
        adapters: for each adapter A [r, in], B [out, r], and the bias [out] of B or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        work: Work,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *adapters: Tensor | None,
    ) -> Tensor:
        """Return y [..., out] of a Linear with adapters: computed, or the saved output as a view,
        or NaN in rows that no code reads.

        Args:
            work: the adapters' factors and scales, and the saved output.
            x: [..., in].
            weight: [out, in].
            bias: [out]; its values are in `work.b`.
            adapters: A [r, in], B [out, r] and the bias [out] of B or None, of each adapter, for
                autograd.
        """
        with without_autocast(x.device.type):
            return _forward(ctx, work, x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x [..., in], weight [out, in], bias [out] and each adapter's
        tensors, from grad [..., out].
        """
        with without_autocast(grad.device.type):
            return _backward(ctx, grad)


def _forward(ctx: Any, work: Work, x: Tensor, weight: Tensor) -> Tensor:
    needs = ctx.needs_input_grad
    rows = x.flatten(0, -2)
    left = None
    if not isinstance(work.value, Tensor) or any(needs):
        left = _left(work, rows)
    ctx.work = dataclasses.replace(
        work, value=None, groups=[group._replace(mask=None) for group in work.groups]
    )
    kept = weight if needs[1] and work.decode is None else None
    ctx.save_for_backward(x, kept, left, *[group.mask for group in work.groups])
    if isinstance(work.value, Tensor):
        return work.value.view_as(work.value)
    assert left is not None
    shape = (*x.shape[:-1], weight.shape[0])
    if work.value is None:
        return unviewed(_product(rows, weight, left, work.b), shape)
    out = x.new_full(shape, torch.nan)
    if work.value is not UNREAD:
        read = x[..., work.value, :]
        left = left.view(*x.shape[:-1], -1)[..., work.value, :]
        product = _product(read.flatten(0, -2), weight, left.flatten(0, -2), work.b)
        out[..., work.value, :] = product.view(*read.shape[:-1], -1)
    return out


def _left(work: Work, rows: Tensor) -> Tensor:
    """Return the left factor of B's stack [n, parts * rank + biases], for rows [n, in] of x."""
    if work.shared is not None:
        return spread(work.shared.of(work.place), work.b)
    found = [thin(group.read(rows), group.factor) for group in work.groups]
    return spread(found[0] if len(found) == 1 else torch.cat(found, 1), work.b)


def _product(rows: Tensor, weight: Tensor, left: Tensor, b: Factor) -> Tensor:
    """Compute y [n, out] for rows [n, in] of x and left [n, parts * rank + biases]."""
    return (left @ b.stack).addmm_(rows, weight.mT)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    x, weight, left, *masks = ctx.saved_tensors
    groups = [group._replace(mask=mask) for group, mask in zip(ctx.work.groups, masks, strict=True)]
    work = dataclasses.replace(ctx.work, groups=groups)
    rows, flat = x.flatten(0, -2), grad.flatten(0, -2)
    of_ranks = thin(flat, work.b)  # [n, rank], scaled
    if needs[1] and work.decode is not None:
        weight = work.decode()
    lefts = [spread(of_ranks[:, group.start : group.stop], group.factor) for group in work.groups]
    d_x = None
    if work.shared is not None:
        work.shared.collect(work.place, lefts[0], flat, weight)
    elif weight is not None:
        d_x = _of_input(work, lefts, flat, weight).view(x.shape)
    d_weight = None
    if needs[2] and work.add is not None:
        work.add(flat.mT, rows)
    elif needs[2]:
        d_weight = flat.mT @ rows
    d_bias = flat.sum(0) if needs[3] else None
    of_a = _of_a(work, lefts, rows) if work.shared is None and any(needs[4::3]) else None
    of_adapters = _of_adapters(work, needs[4:], of_a, flat, left)
    return None, d_x, d_weight, d_bias, *of_adapters


def _of_input(work: Work, lefts: list[Tensor], flat: Tensor, weight: Tensor) -> Tensor:
    """Compute dx [n, in]: the adapters' products first, then the base's product is added."""
    total: Tensor | None = None
    for group, left in zip(work.groups, lefts, strict=True):
        found = left @ group.factor.stack
        if group.mask is not None:
            found.mul_(group.mask)
        total = found if total is None else total.add_(found)
    assert total is not None
    return total.addmm_(flat, weight)


def _of_a(work: Work, lefts: list[Tensor], rows: Tensor) -> Tensor:
    """Compute the gradients of the A of all adapters [rank, in], in float32 or wider."""
    found = []
    for group, left in zip(work.groups, lefts, strict=True):
        rank, parts = group.factor.rank, min(group.factor.parts, 2)
        product = add_product(None, left[:, : parts * rank].mT, group.read(rows))
        found.append(product if parts == 1 else summed_parts(product, 0))
    return found[0] if len(found) == 1 else torch.cat(found)


def _of_adapters(
    work: Work, needs: tuple[bool, ...], of_a: Tensor | None, flat: Tensor, left: Tensor
) -> list[Tensor | None]:
    """Return the gradients of all adapters' tensors as a flat list: A [r, in], B [out, r] and B's
    bias [out] of the first adapter, then of the second. None where none is needed.

    Gradients are in float32 or wider.

    Args:
        work: description of the computation.
        needs: True for each tensor that needs a gradient, in the order of the result.
        of_a: gradient of the adapters' A, one below the other, [rank, in]; None: not computed here.
        flat: gradient of the Linear's output, [n, out].
        left: the inputs' products with A, in parts, [n, parts * rank + biases].
    """
    of_b: Tensor | None = None
    if any(needs[1::3]):
        parts = min(work.b.parts, 2)
        of_b = add_product(None, flat.mT, left[:, : parts * work.b.rank])  # [out, rank or 2 rank]
        of_b = summed_parts(of_b, 1) if parts == 2 else of_b
    wide = torch.promote_types(flat.dtype, torch.float32)
    found: list[Tensor | None] = []
    start = 0
    for number, scale in enumerate(work.scales):
        stop = start + scale.rank
        wants_a, wants_b, wants_bias = needs[3 * number : 3 * number + 3]
        found.append(of_a[start:stop] if wants_a and of_a is not None else None)
        found.append(of_b[:, start:stop] * scale.b if wants_b and of_b is not None else None)
        found.append(flat.sum(0, dtype=wide) * scale.bias if wants_bias else None)
        start = stop
    return found
