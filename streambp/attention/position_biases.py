"""Compute T5's attention bias for parts of a sequence, and its gradient.

T5's attention adds a bias to each score. The bias depends on the head and on the distance between
key and query. A table has one row for a range of distances. T5's modules build the bias for all
pairs, [1, H, T, T].

streambp keeps one value for each distance:

    bias [1, H, 2 T - 1]    entry i belongs to the distance i - (T - 1), which is key - query

The model's own code computes these values, so autograd gives the table its gradient. An attention
kernel builds the bias of one block from them. Backward sums the gradient of the block's scores
along its diagonals, on which the distance is the same.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from streambp.attention.spans import Block
from streambp.known_names import BUCKETS, COMPUTE_BIAS, HAS_TABLE


def biases_distances(attention: nn.Module) -> bool:
    """True if an attention module has T5's functions for a bias by distance, which `distance_bias`
    calls."""
    return all(hasattr(attention, name) for name in (COMPUTE_BIAS, BUCKETS, HAS_TABLE))


def has_table(attention: nn.Module) -> bool:
    """True if an attention module has the table from which T5's bias is computed. T5 has a table in
    the first layer, and UMT5 in each layer."""
    return biases_distances(attention) and bool(getattr(attention, HAS_TABLE))


def distance_bias(attention: nn.Module, length: int, device: torch.device) -> Tensor:
    """Return the bias of each distance in a sequence, [1, H, 2 T - 1], as the attention module's
    own code computes it from its table.

    Args:
        attention: an attention module with a table.
        length: T.
        device: device of the result.
    """
    compute: Any = getattr(attention, COMPUTE_BIAS)
    past = compute(length, 1, device=device).flatten(2)  # [1, H, T], distances 0 to -(T - 1)
    ahead = compute(1, length, device=device).flatten(2)  # [1, H, T], distances 0 to T - 1
    return torch.cat((past.flip(-1), ahead[..., 1:]), -1)


def is_distance_bias(bias: Any) -> TypeGuard[Tensor]:
    """True if a bias has one value for each distance, [1, H, 2 T - 1]. False for None, and for a
    bias of pairs, [1, H, T, T]."""
    return isinstance(bias, Tensor) and bias.dim() == 3


def pair_bias(bias: Tensor, q0: int, q1: int, k0: int, k1: int) -> Tensor:
    """Return T5's bias of all pairs of queries [q0, q1) and keys [k0, k1), as [..., q, k], to be
    added to scores.

    Args:
        bias: the bias of each distance, [..., 2 T - 1].
        q0, q1: the queries' range of positions.
        k0, k1: the keys' range of positions.
    """
    first = k0 - (q1 - 1) + bias.shape[-1] // 2
    distances = bias[..., first : first + (q1 - q0) + (k1 - k0) - 1]
    # the last query has the first window
    return distances.unfold(-1, k1 - k0, 1).flip(-2)


def add_block_gradient(sums: Tensor, gradient: Tensor, block: Block) -> None:
    """Add the gradient of a block's scores to the gradient of T5's bias of each distance, in an
    attention kernel's backward.

    Args:
        sums: [H, 2 T - 1], the gradient of the bias, to which this function adds.
        gradient: [H, q, k], the gradient of the block's scores, summed over the batch's rows.
        block: a rectangle of queries and keys.
    """
    queries, keys = gradient.shape[-2:]
    width = queries + keys - 1
    # Longer rows move diagonals into columns.
    longer = F.pad(gradient.flip(-2), (0, queries)).flatten(-2)  # [H, q * (k + q)]
    by_column = longer[..., : queries * width].unflatten(-1, (queries, width))
    first = block.k0 - (block.q1 - 1) + sums.shape[-1] // 2
    sums[..., first : first + width] += by_column.sum(-2)
