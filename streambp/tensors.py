"""Check the tensors that programs pass to public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from streambp.errors import StreamBPError

Kind = Literal["floating", "whole", "any"]
KINDS = {"floating": "a floating tensor", "whole": "a tensor of whole numbers", "any": "a tensor"}
ANY_DIMS = "..."


def check_tensors(**wanted: tuple[Any, str, Kind]) -> None:
    """Check that arguments are tensors with the expected kind of dtype and the expected dimensions,
    such as "... h" or "B T".

    Args:
        wanted: by name, in order, the argument, its dimensions and its kind. A dimension has the
            same size in all arguments; the first argument with the dimension sets it. "..." are any
            leading dimensions. None is skipped.

    Raises:
        StreamBPError: an argument is no tensor, or has another kind or shape.
    """
    sizes: dict[str, tuple[Any, str]] = {}  # by dimension, its size and the argument that set it
    for name, (given, text, kind) in wanted.items():
        if given is None:
            continue
        shape = _shown(text)
        if not isinstance(given, Tensor):
            raise StreamBPError(
                f"{name} is a {type(given).__name__}; it must be {KINDS[kind]} {shape}."
            )
        if not _is_of(given.dtype, kind):
            raise StreamBPError(f"{name} is of {given.dtype}; it must be {KINDS[kind]} {shape}.")
        dims = text.split()
        rest = []
        for dim in dims:
            if dim != ANY_DIMS:
                rest.append(dim)
        count = given.dim() - len(rest)
        found: dict[str, Any]
        if ANY_DIMS in dims:
            found = {ANY_DIMS: tuple(given.shape[: max(0, count)])}
        else:
            found = {}
        found.update(zip(rest, given.shape[max(0, count) :], strict=False))
        if count < 0 or (count > 0 and ANY_DIMS not in dims):
            raise StreamBPError(f"{name} has shape {tuple(given.shape)}; it must be {shape}.")
        for dim, size in found.items():
            known, whose = sizes.setdefault(dim, (size, name))
            if known != size:
                if dim == ANY_DIMS:
                    same = "equal leading dimensions"
                else:
                    same = f"{dim} = {known}"
                raise StreamBPError(
                    f"{name} has shape {tuple(given.shape)}, but {whose} has "
                    f"{tuple(wanted[whose][0].shape)}; {name} must be {shape} with "
                    f"{same}."
                )


def _is_of(dtype: torch.dtype, kind: Kind) -> bool:
    """True if a dtype belongs to a kind, such as floating or integer."""
    if kind == "floating":
        return dtype.is_floating_point
    return kind == "any" or not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _shown(text: str) -> str:
    """Return dimensions such as "B T" in the form of a shape, for an error message."""
    return "[" + ", ".join(text.split()) + "]"


def unviewed(result: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return a tensor [...] with the memory of `result` that does not count as a view of another
    tensor.

    torch refuses in-place operations on a view that a custom autograd Function's forward returns,
    and `F.linear` with a bias returns a view.

    Args:
        result: a contiguous tensor that no other code reads.
        shape: the shape of the returned tensor; None: that of `result`.
    """
    if shape is None:
        if not result._is_view():
            return result
        shape = result.shape
    own: Tensor = torch.ops.aten._unsafe_view(result, shape)
    return own
