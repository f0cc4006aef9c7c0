"""Compute sums and means over the tokens of a mask, and check the shapes of a loss function's
tensors."""

from __future__ import annotations

from torch import Tensor

from streambp.tensors import DtypeKind, check_tensors


def check_shapes(like: Tensor, *, name: str = "log_probs", **tensors: Tensor | None) -> None:
    """Check the tensors of a loss function: all must be [B, T], and all except masks must have a
    floating-point dtype.

    Args:
        like: the first tensor; the other tensors need its shape.
        name: name of `like` in errors.
        tensors: the other tensors, by name; None is skipped. A name that ends in "mask" marks a
            mask.

    Raises:
        StreamBPError: a tensor has another shape or dtype.
    """
    floating: DtypeKind = "floating"
    tensors_by_name = {name: like, **tensors}
    specifications: dict[str, tuple[Tensor | None, str, DtypeKind]] = {}
    for key, x in tensors_by_name.items():
        specifications[key] = x, "B T", floating
        if key.endswith("mask"):
            specifications[key] = x, "B T", "any"
    check_tensors(**specifications)


def within(mask: Tensor, values: Tensor) -> Tensor:
    """Return values [B, T] with 0 where mask [B, T] is False. Loss functions apply this function to
    their inputs before any other operation.

    Masking the loss's terms at the end would not suffice. Values outside of the mask may be NaN or
    infinite, for example an inference engine's -inf at padding. Backward would multiply these
    values by 0, and the gradient would be NaN.
    """
    return values.masked_fill(~mask.bool(), 0.0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of values [B, T] where mask [B, T] is true.

    Values outside of the mask, NaN among them, do not count.

    Args:
        values: [B, T].
        mask: [B, T].
        dim: the dimension to sum over, as in torch.sum; None: both, and the result is a scalar.
    """
    masked = within(mask, values)
    return masked.sum() if dim is None else masked.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of values [B, T] where mask [B, T] is true. The mean over an empty mask is 0.

    Args:
        values: [B, T].
        mask: [B, T].
        dim: the dimension of the mean, as in torch.mean; None: both, and the result is a scalar.
    """
    if dim is None:
        count = mask.bool().sum()
    else:
        count = mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)
