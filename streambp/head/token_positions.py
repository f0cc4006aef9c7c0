"""Hidden states shared by several tokens of a batch, with an index for each token.

A model whose rows share prefixes ends with the hidden states [N, h] of its packed
row. The head selects rows by indices [B, T], or those of labelled positions only, and never builds
[B, T, h]. The gradient of a hidden state that several tokens read is a sum, added in
promote_types(dtype, float32) and rounded once.

[Note: padding that is read] A packed row has no padding, and a program may read logits at padding:
a mean over all logits, a maximum, an index. Then the call's rows are computed after all, padding
and tokens. Hidden states of the batch [B, T] stand behind those of the packed row: index N + i is
that of the i-th token of the batch. Tokens keep their indices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streambp.device import has_data

ROWS_PER_BLOCK = 4096


class SelectRows(torch.autograd.Function):
    """Autograd function that selects rows by index: source [N, h] and indices [M] -> [M, h]. Unlike
    torch's `index_select`, backward adds the gradients of a repeated row in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, token_positions: Tensor) -> Tensor:
        """Return the rows of source [N, h] at the indices `token_positions` [M], as a new tensor
        [M, h] in source's dtype."""
        ctx.save_for_backward(token_positions)
        ctx.count = source.shape[0]
        return source.index_select(0, token_positions)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient [N, h] of `source`: the sum of the rows of grad [M, h] that have the
        same index."""
        (token_positions,) = ctx.saved_tensors
        total = grad.new_zeros(
            ctx.count, grad.shape[1], dtype=torch.promote_types(grad.dtype, torch.float32)
        )
        for part, at in zip(
            grad.split(ROWS_PER_BLOCK), token_positions.split(ROWS_PER_BLOCK), strict=True
        ):
            total.index_add_(0, at, part.to(total.dtype))
        return total.to(grad.dtype), None


def take_rows(source: Tensor, token_positions: Tensor) -> Tensor:
    """Return the rows of source [N, h] at indices `token_positions` [...], as a tensor [..., h] in
    source's dtype. Backward adds the gradients of a repeated row in float32 or wider."""
    flat: Tensor = SelectRows.apply(source, token_positions.reshape(-1))
    return flat.view(*token_positions.shape, source.shape[-1])


@dataclasses.dataclass(eq=False)
class LatePadding:
    """Computes hidden states of padding tokens on request. A batch may be computed as one packed
    row: all rows concatenated, without padding. Padding then has no hidden states, until the
    program reads logits there. [Note: padding that is read]

    Attributes:
        source: [N, h], hidden states of all N tokens in the packed row.
        compute: function that returns hidden states of the batch with padding, [B * T, h]. The
            function's argument is True if the result must be differentiable.
        completed_rows: cached results of `with_padding`; the key is True for a differentiable
            result.
    """

    source: Tensor
    compute: Callable[[bool], Tensor]
    completed_rows: dict[bool, Tensor] = dataclasses.field(default_factory=dict)

    def tokens(self, token_positions: Tensor) -> Tensor:
        """Return a bool mask [...]: True where an index belongs to a token, False where it belongs
        to padding.

        Args:
            token_positions: [...], indices of rows in the result of `with_padding`. Indices below N
                belong to tokens, indices from N on to the batch with padding.
        """
        return token_positions < self.source.shape[0]

    def reads_padding(self, token_positions: Tensor) -> bool:
        """True if one of the indices belongs to padding. False if the indices have no data (meta or
        fake tensors). Synchronizes with the device.

        Args:
            token_positions: [...], indices of rows in the result of `with_padding`. Indices below N
                belong to tokens, indices from N on to the batch with padding.
        """
        return has_data(token_positions) and not bool(self.tokens(token_positions).all())

    def with_padding(self) -> Tensor:
        """Return a tensor [N + B * T, h] with the hidden states of the N tokens of the packed row,
        followed by those of the batch with padding. Tokens have indices below N there, and padding
        has indices from N on.

        The result is cached, and is differentiable in grad mode if the packed row's hidden states
        are.
        """
        graded = torch.is_grad_enabled() and self.source.requires_grad
        if graded not in self.completed_rows:
            rows = self.compute(graded)
            source = self.source if graded else self.source.detach()
            self.completed_rows[graded] = torch.cat([source, rows])
        return self.completed_rows[graded]
