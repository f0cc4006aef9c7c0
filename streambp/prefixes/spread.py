"""Outputs of the packed row, given to each row that shares their tokens; gradients are summed over these rows.

A token's gradient is the sum over the rows that share it. It is summed in promote_types(dtype,
float32), row after row in their order, and rounded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from streambp.errors import BackwardError, UnsharedError
from streambp.head.places import LatePadding
from streambp.lazy.deferred import Deferred
from streambp.prefixes.tree import Tree


class Spread(torch.autograd.Function):
    """x [N, ...] of a tree's packed row -> [B, T, ...] of its rows.

    Where these are padded they get the first token's values: a loss that takes padding in, which it should not, has a
    gradient there, and zeros might have none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tree: Tree) -> Tensor:
        """A new tensor [B, T, ...] in x's dtype."""
        ctx.tree = tree
        spread = x.new_empty(len(tree.rows), tree.width, *x.shape[1:])
        for row, here, there in _places(tree):
            spread[row, here] = x[there]
        for row, start, stop in tree.padding():
            spread[row, start:stop] = x[0]
        return spread

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """From [B, T, ...] the sums [N, ...], in grad's dtype.

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
    """x [N, h] -> [N + 1, h], with what stands for padding behind it: the first token's values, as in `Spread`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A new tensor [N + 1, h]."""
        return torch.cat([x, x[:1]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient of x [N, h], from that of [N + 1, h].

        Raises:
            BackwardError: a gradient arrives at padding.
        """
        refuse(grad[-1:])
        return grad[:-1]


def _at_places(x: Deferred, tree: Tree) -> Deferred:
    """What is deferred of the packed row, deferred of its rows: the hidden states [N, h] stay. [Note: places]"""
    source = x.source.reshape(-1, x.source.shape[-1])  # [N, h]
    if source.shape[0] != tree.length or x.recipe.places is not None:
        raise UnsharedError(f"the final norm is one of {list(x.shape)} for a packed row of {tree.length} tokens")
    if any(True for _ in tree.padding()):
        source = Behind.apply(source)
    return Deferred.make(source, dataclasses.replace(x.recipe, places=tree.places(source.device)), x.dtype)


def with_late_padding(x: Deferred, tree: Tree, compute: Callable[[bool], Tensor]) -> Deferred:
    """What is deferred of the packed row [N, h], deferred of its rows [B, T, h]. [Note: padding that is read]

    Args:
        compute: gives the hidden states of the rows, [B * T, h], if something reads padding.

    Raises:
        UnsharedError: x has another shape.
    """
    source = x.source.reshape(-1, x.source.shape[-1])  # [N, h]
    if source.shape[0] != tree.length or x.recipe.places is not None:
        raise UnsharedError(f"the final norm is one of {list(x.shape)} for a packed row of {tree.length} tokens")
    places = tree.places(source.device)  # [B, T]
    columns = torch.arange(places.numel(), device=places.device).view_as(places)
    places = torch.where(places < tree.length, places, tree.length + columns)
    late = LatePadding(source, compute)
    return Deferred.make(source, dataclasses.replace(x.recipe, places=places, late=late), x.dtype)


def _places(tree: Tree) -> Iterator[tuple[int, slice, slice]]:
    """A row, a part of its columns, and their place in the packed row."""
    for index, row in enumerate(tree.rows):
        for piece in row.pieces:
            start = row.column + piece.at
            yield index, slice(start, start + piece.stop - piece.start), slice(piece.start, piece.stop)


def refuse(*parts: Tensor) -> None:
    """Refuse gradients [...] of padding. Where a step has overflowed, it gets NaN from what it has in common with tokens:
    that is left alone.

    Raises:
        BackwardError: there is one.
    """
    if parts and bool(torch.stack([((part != 0) & part.isfinite()).any() for part in parts]).any()):
        raise BackwardError(
            "A gradient arrives at padding of a batch that was computed as a packed row, without padding. "
            "Leave padding out of the loss (labels of -100, or a mask that zeroes it), or set "
            "StreamConfig(rows='as_given')."
        )


def spread(x: Tensor, tree: Tree, late: Callable[[bool], Tensor] | None = None) -> Tensor:
    """[1, N, ...] -> [B, T, ...], and [N, ...] -> [B * T, ...], in x's dtype; N are the tokens of the packed row.

    Args:
        late: gives the hidden states of rows, for what is deferred; None: it has another token's at padding.

    Raises:
        UnsharedError: x has another shape.
    """
    if isinstance(x, Deferred):
        if x.written is not None:
            return spread(x.written, tree)
        return _at_places(x, tree) if late is None else with_late_padding(x, tree, late)
    if x.dim() > 1 and tuple(x.shape[:2]) == (1, tree.length):
        rows: Tensor = Spread.apply(x[0], tree)
        return rows
    if x.dim() > 1 and x.shape[0] == tree.length:
        flat: Tensor = Spread.apply(x, tree)
        return flat.flatten(0, 1)
    raise UnsharedError(f"the model returns a tensor {list(x.shape)} for a packed row of {tree.length} tokens")


def spread_all(
    output: Any,
    tree: Tree,
    done: dict[int, Tensor] | None = None,
    late: Callable[[bool], Tensor] | None = None,
) -> Any:
    """The same of every tensor [1, N, ...] or [N, ...] in a model's output; one that stands there twice stays one.

    Raises:
        UnsharedError: one of them is none of the packed row's tokens.
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
