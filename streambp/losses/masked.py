"""Sums and means over the tokens that count, and the shape checks that every objective starts with."""

from __future__ import annotations

from torch import Tensor

from streambp.tensors import Kind, check_tensors


def check_shapes(like: Tensor, *, name: str = "log_probs", **tensors: Tensor | None) -> None:
    """Check the tensors of an objective: all are [B, T], and all but masks are floating.

    Args:
        like: of this name.

    Raises:
        StreamBPError: one is not.
    """
    floating: Kind = "floating"
    given = {name: like, **tensors}
    check_tensors(**{key: (x, "B T", "any" if key.endswith("mask") else floating) for key, x in given.items()})


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The sum of values [B, T] where mask [B, T] is true, over all of them or over one dim.

    What stands elsewhere, NaN too, does not count.
    """
    kept = values.masked_fill(~mask.bool(), 0.0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of values [B, T] where mask [B, T] is true, over all of them or over one dim; 0 where there are none."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)
