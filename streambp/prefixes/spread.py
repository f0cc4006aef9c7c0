"""Copy outputs of the packed row to each row that shares their tokens.

A token's gradient is the sum over the rows that share the token. The sum is computed in
promote_types(dtype, float32), in the order of the rows, and rounded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from streambp.errors import BackwardError, UnsharedError
from streambp.head.token_positions import LatePadding
from streambp.lazy.deferred import LazyHidden
from streambp.prefixes.tree import Tree


class Spread(torch.autograd.Function):
    """Autograd Function from x [N, ...] of a tree's packed row to [B, T, ...] of the batch's rows.

    Padding gets the first token's values. A loss must not include padding. If a loss includes
    padding, these values have a gradient, and the gradient raises an error. Zeros might have no
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tree: Tree) -> Tensor:
        """Return a new tensor [B, T, ...] in x's dtype."""
        ctx.tree = tree
        spread = x.new_empty(len(tree.rows), tree.width, *x.shape[1:])
        for row, here, there in _places(tree):
            spread[row, here] = x[there]
        for row, start, stop in tree.padding():
            spread[row, start:stop] = x[0]
        return spread

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sums [N, ...] of grad [B, T, ...], in grad's dtype.

        Raises:
            BackwardError: a gradient arrives at padding, which was not computed.
        """
        tree: Tree = ctx.tree
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(tree.length, *grad.shape[2:], dtype=wide)
        for row, here, there in _places(tree):
            total[there] += grad[row, here]
        refuse(*(grad[row, start:stop] for row, start, stop in tree.padding()))
        return total.to(grad.dtype), None


class Behind(torch.autograd.Function):
    """Autograd Function that appends a row for padding: x [N, h] -> [N + 1, h].

    The appended row has the first token's values, as in `Spread`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a new tensor [N + 1, h]."""
        return torch.cat([x, x[:1]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of x [N, h] from the gradient of [N + 1, h].

        Raises:
            BackwardError: a gradient arrives at padding.
        """
        refuse(grad[-1:])
        return grad[:-1]


def _at_places(x: LazyHidden, tree: Tree) -> LazyHidden:
    """Return the packed row's deferred tensor as the batch's deferred tensor, with the same hidden
    states [N, h].

    [Note: places]
    """
    source = x.source.reshape(-1, x.source.shape[-1])  # [N, h]
    if source.shape[0] != tree.length or x.recipe.places is not None:
        raise UnsharedError(
            f"the final norm is one of {list(x.shape)} for a packed row of {tree.length} tokens"
        )
    if any(True for _ in tree.padding()):
        source = Behind.apply(source)
    return LazyHidden.make(
        source, dataclasses.replace(x.recipe, places=tree.places(source.device)), x.dtype
    )


def with_late_padding(x: LazyHidden, tree: Tree, compute: Callable[[bool], Tensor]) -> LazyHidden:
    """Return the packed row's deferred tensor [N, h] as the batch's deferred tensor [B, T, h].

    [Note: padding that is read]

    Args:
        compute: returns the hidden states of the rows, [B * T, h], if the program reads padding.

    Raises:
        UnsharedError: x has another shape.
    """
    source = x.source.reshape(-1, x.source.shape[-1])  # [N, h]
    if source.shape[0] != tree.length or x.recipe.places is not None:
        raise UnsharedError(
            f"the final norm is one of {list(x.shape)} for a packed row of {tree.length} tokens"
        )
    places = tree.places(source.device)  # [B, T]
    columns = torch.arange(places.numel(), device=places.device).view_as(places)
    places = torch.where(places < tree.length, places, tree.length + columns)
    late = LatePadding(source, compute)
    return LazyHidden.make(source, dataclasses.replace(x.recipe, places=places, late=late), x.dtype)


def _places(tree: Tree) -> Iterator[tuple[int, slice, slice]]:
    """Yield for each piece of each row: the row, its columns, and its tokens in the packed row."""
    for index, row in enumerate(tree.rows):
        for piece in row.pieces:
            start = row.column + piece.at
            yield (
                index,
                slice(start, start + piece.stop - piece.start),
                slice(piece.start, piece.stop),
            )


def refuse(*parts: Tensor) -> None:
    """Refuse finite gradients [...] at padding.

    After an overflow, padding gets NaN from operations that mix padding with tokens; NaN is
    ignored.

    Raises:
        BackwardError: a gradient at padding is finite and not zero.
    """
    if parts and bool(torch.stack([((part != 0) & part.isfinite()).any() for part in parts]).any()):
        raise BackwardError(
            "A gradient arrives at padding of a batch that was computed without padding, as a "
            "packed row. Leave padding out of the loss (labels of -100, or a mask of zeros), or "
            "set StreamConfig(rows='as_given')."
        )


def spread(x: Tensor, tree: Tree, late: Callable[[bool], Tensor] | None = None) -> Tensor:
    """Return x of the packed row as a tensor of the batch, in x's dtype.

    [1, N, ...] becomes [B, T, ...], and [N, ...] becomes [B * T, ...]. N is the length of the
    packed row.

    Args:
        late: returns the hidden states of the rows, for deferred tensors; None: padding has another
            token's values.

    Raises:
        UnsharedError: x has another shape.
    """
    if isinstance(x, LazyHidden):
        if x.written is not None:
            return spread(x.written, tree)
        if late is None:
            return _at_places(x, tree)
        return with_late_padding(x, tree, late)
    if x.dim() > 1 and tuple(x.shape[:2]) == (1, tree.length):
        rows: Tensor = Spread.apply(x[0], tree)
        return rows
    if x.dim() > 1 and x.shape[0] == tree.length:
        flat: Tensor = Spread.apply(x, tree)
        return flat.flatten(0, 1)
    raise UnsharedError(
        f"the model returns a tensor {list(x.shape)} for a packed row of {tree.length} tokens"
    )


def spread_all(
    output: Any,
    tree: Tree,
    done: dict[int, Tensor] | None = None,
    late: Callable[[bool], Tensor] | None = None,
) -> Any:
    """Return a model's output with `spread` applied to each tensor [1, N, ...] or [N, ...].

    A tensor that occurs twice in the output is converted once.

    Raises:
        UnsharedError: a tensor has another shape.
    """
    done = {} if done is None else done
    if isinstance(output, Tensor):
        if id(output) not in done:
            done[id(output)] = spread(output, tree, late)
        return done[id(output)]
    if isinstance(output, Mapping):
        return type(output)(**{name: spread_all(x, tree, done, late) for name, x in output.items()})
    if isinstance(output, tuple | list):
        return type(output)(spread_all(value, tree, done, late) for value in output)
    return output
