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
from streambp.lazy.lazy_hidden import LazyHidden
from streambp.prefixes.tree import PrefixTree


class TokenCopies(torch.autograd.Function):
    """Autograd Function that copies values x [N, ...] of a packed row's tokens to all rows of the
    batch that have these tokens: [B, T, ...]. The packed row has shared prefixes once. Backward
    sums the gradients of the copies.

    A gradient at padding raises, because padding was not computed. Padding gets the first token's
    values and not zeros. Zeros could make the gradient of code that uses padding 0, so that nothing
    would raise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tree: PrefixTree) -> Tensor:
        """Return a new tensor [B, T, ...] with the values of x [N, ...].

        Args:
            x: one value for each token of the packed row.
            tree: the packed row.
        """
        ctx.tree = tree
        spread_output = x.new_empty(len(tree.rows), tree.width, *x.shape[1:])
        for row, columns, positions in _row_pieces(tree):
            spread_output[row, columns] = x[positions]
        for row, start, stop in tree.padding():
            spread_output[row, start:stop] = x[0]
        return spread_output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sums [N, ...] of grad [B, T, ...] over the copies of each token, in grad's
        dtype.

        Raises:
            BackwardError: a gradient arrives at padding, which was not computed.
        """
        tree: PrefixTree = ctx.tree
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(tree.length, *grad.shape[2:], dtype=wide)
        for row, columns, positions in _row_pieces(tree):
            total[positions] += grad[row, columns]
        refuse(*(grad[row, start:stop] for row, start, stop in tree.padding()))
        return total.to(grad.dtype), None


class PaddingRow(torch.autograd.Function):
    """Autograd Function that appends one row to hidden states x [N, h], to stand for all padding
    tokens. The appended row is a copy of the first row of x. Lazy hidden states of the batch refer
    to rows of x by index, and their padding needs a row.

    Backward raises if a gradient arrives at the appended row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x [N, h] followed by a copy of its first row, as [N + 1, h]."""
        return torch.cat([x, x[:1]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of x [N, h], which is `grad` [N + 1, h] without the row that stands
        for padding.

        Raises:
            BackwardError: the gradient of the row for padding is not zero.
        """
        refuse(grad[-1:])
        return grad[:-1]


def _copy_lazy_rows(x: LazyHidden, tree: PrefixTree) -> LazyHidden:
    """Return the packed row's lazy hidden states [N, h] as lazy hidden states [B, T, h] of the
    batch's rows. Each token of the batch refers to a token of the packed row, and all padding to
    one additional row.

    Args:
        x: hidden states, computed on the first read.
        tree: the packed row of N tokens: the tokens of all rows, without padding and with shared
            prefixes once.

    Raises:
        UnsharedError: x has not one row for each token of the packed row.
    """
    source = x.source.reshape(-1, x.source.shape[-1])  # [N, h]
    if source.shape[0] != tree.length or x.recipe.token_positions is not None:
        raise UnsharedError(
            f"the final norm is one of {list(x.shape)} for a packed row of {tree.length} tokens"
        )
    if any(True for _ in tree.padding()):
        source = PaddingRow.apply(source)
    return LazyHidden.make(
        source,
        dataclasses.replace(x.recipe, token_positions=tree.token_positions(source.device)),
        x.dtype,
    )


def defer_padding(x: LazyHidden, tree: PrefixTree, compute: Callable[[bool], Tensor]) -> LazyHidden:
    """Return the packed row's lazy hidden states [N, h] as lazy hidden states [B, T, h] of the
    batch's rows. If the program reads values at padding, `compute` runs a second forward, which
    computes all rows. [Note: padding that is read]

    Args:
        x: hidden states, computed on the first read.
        tree: the packed row of N tokens: the tokens of all rows, without padding and with shared
            prefixes once.
        compute: runs the second forward and returns the hidden states of the rows, [B * T, h]. The
            argument is True to build an autograd graph.

    Raises:
        UnsharedError: x has not one row for each token of the packed row.
    """
    source = x.source.reshape(-1, x.source.shape[-1])  # [N, h]
    if source.shape[0] != tree.length or x.recipe.token_positions is not None:
        raise UnsharedError(
            f"the final norm is one of {list(x.shape)} for a packed row of {tree.length} tokens"
        )
    token_positions = tree.token_positions(source.device)  # [B, T]
    columns = torch.arange(token_positions.numel(), device=token_positions.device).view_as(
        token_positions
    )
    token_positions = torch.where(
        token_positions < tree.length, token_positions, tree.length + columns
    )
    late_padding = LatePadding(source, compute)
    return LazyHidden.make(
        source,
        dataclasses.replace(x.recipe, token_positions=token_positions, late_padding=late_padding),
        x.dtype,
    )


def _row_pieces(tree: PrefixTree) -> Iterator[tuple[int, slice, slice]]:
    """Yield (row index, columns, positions) for each range of tokens of a batch row that are
    consecutive in the packed row too. `columns` is the range in the batch's row, and `positions`
    the range in the packed row; both are slices.

    Args:
        tree: the packed row: the tokens of all rows, without padding and with shared prefixes once.
    """
    for index, row in enumerate(tree.rows):
        for span in row.packed_spans:
            start = row.column + span.row_start
            yield (
                index,
                slice(start, start + span.stop - span.start),
                slice(span.start, span.stop),
            )


def refuse(*parts: Tensor) -> None:
    """Raise BackwardError if a gradient [...] at padding has elements that are finite and not zero.
    A packed row has no padding for this gradient. NaN and inf are ignored: after an overflow
    padding gets them from operations that mix padding with tokens.

    Args:
        parts: gradients at padding.

    Raises:
        BackwardError: there is such a gradient.
    """
    if parts and bool(torch.stack([((part != 0) & part.isfinite()).any() for part in parts]).any()):
        raise BackwardError(
            "A gradient arrives at padding of a batch that was computed without padding, as a "
            "packed row. Leave padding out of the loss (labels of -100, or a mask of zeros), or "
            "set StreamConfig(rows='as_given')."
        )


def spread_output(
    x: Tensor, tree: PrefixTree, compute_rows: Callable[[bool], Tensor] | None = None
) -> Tensor:
    """Return an output x of the model for the packed row as an output for the batch's rows.
    [1, N, ...] becomes [B, T, ...], and [N, ...] becomes [B * T, ...], in x's dtype.

    Args:
        x: the output.
        tree: the packed row of N tokens: the tokens of all rows, without padding and with shared
            prefixes once.
        compute_rows: called if x is a lazy tensor and the program reads padding; returns the hidden
            states of the rows [B * T, h]. The argument is True to build an autograd graph. None:
            padding has another token's values.

    Raises:
        UnsharedError: x has not one value for each token of the packed row.
    """
    if isinstance(x, LazyHidden):
        if x.materialized_tensor is not None:
            return spread_output(x.materialized_tensor, tree)
        if compute_rows is None:
            return _copy_lazy_rows(x, tree)
        return defer_padding(x, tree, compute_rows)
    if x.dim() > 1 and tuple(x.shape[:2]) == (1, tree.length):
        rows: Tensor = TokenCopies.apply(x[0], tree)
        return rows
    if x.dim() > 1 and x.shape[0] == tree.length:
        flat: Tensor = TokenCopies.apply(x, tree)
        return flat.flatten(0, 1)
    raise UnsharedError(
        f"the model returns a tensor {list(x.shape)} for a packed row of {tree.length} tokens"
    )


def spread_outputs(
    output: Any,
    tree: PrefixTree,
    results: dict[int, Tensor] | None = None,
    compute_rows: Callable[[bool], Tensor] | None = None,
) -> Any:
    """Return a model's output for the packed row as an output for the batch's rows. The function
    `spread_output` is applied to every tensor in the output, once to a tensor that occurs twice.

    Args:
        output: a tensor [1, N, ...] or [N, ...], or such tensors in tuples, lists and dicts.
        tree: the packed row of N tokens: the tokens of all rows, without padding and with shared
            prefixes once.
        results: results so far, by id() of the tensor, in recursive calls; None in other calls.
        compute_rows: called if the program reads padding; returns the hidden states of the rows
            [B * T, h]. The argument is True to build an autograd graph. None: padding has another
            token's values.

    Raises:
        UnsharedError: a tensor has not one value for each token of the packed row.
    """
    results = {} if results is None else results
    if isinstance(output, Tensor):
        if id(output) not in results:
            results[id(output)] = spread_output(output, tree, compute_rows)
        return results[id(output)]
    if isinstance(output, Mapping):
        return type(output)(
            **{name: spread_outputs(x, tree, results, compute_rows) for name, x in output.items()}
        )
    if isinstance(output, tuple | list):
        return type(output)(spread_outputs(value, tree, results, compute_rows) for value in output)
    return output
