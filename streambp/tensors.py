"""Tensors that programs hand to public functions: what each must be, checked in one place."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from streambp.errors import StreamBPError

Kind = Literal["floating", "whole", "any"]
KINDS = {"floating": "a floating tensor", "whole": "a tensor of whole numbers", "any": "a tensor"}
ANY_DIMS = "..."


def check_tensors(**wanted: tuple[Any, str, Kind]) -> None:
    """Check that every argument is a tensor of its kind, with the dimensions that its text names: "... h", say, or "B T".

    Args:
        wanted: by name, in order, the argument, its dimensions and its kind. A name of a dimension has one size in all
            arguments, which the first one has that names it; "..." are any dimensions in front. None is left out.

    Raises:
        StreamBPError: one is no tensor, or of another kind, or shaped otherwise.
    """
    sizes: dict[str, tuple[Any, str]] = {}  # of each dimension, and whose
    for name, (given, text, kind) in wanted.items():
        if given is None:
            continue
        shape = _shown(text)
        if not isinstance(given, Tensor):
            raise StreamBPError(f"{name} is a {type(given).__name__}; it must be {KINDS[kind]} {shape}.")
        if not _is_of(given.dtype, kind):
            raise StreamBPError(f"{name} is of {given.dtype}; it must be {KINDS[kind]} {shape}.")
        dims = text.split()
        rest = [dim for dim in dims if dim != ANY_DIMS]
        count = given.dim() - len(rest)
        found: dict[str, Any] = {ANY_DIMS: tuple(given.shape[: max(0, count)])} if ANY_DIMS in dims else {}
        found.update(zip(rest, given.shape[max(0, count) :], strict=False))
        if count < 0 or (count > 0 and ANY_DIMS not in dims):
            raise StreamBPError(f"{name} has shape {tuple(given.shape)}; it must be {shape}.")
        for dim, size in found.items():
            known, whose = sizes.setdefault(dim, (size, name))
            if known != size:
                asked = dim if dim == ANY_DIMS else f"{dim} = {known}"
                raise StreamBPError(
                    f"{name} has shape {tuple(given.shape)}, which does not fit {whose}, {tuple(wanted[whose][0].shape)}; "
                    f"it must be {shape} with {asked} as {whose} has."
                )


def _is_of(dtype: torch.dtype, kind: Kind) -> bool:
    if kind == "floating":
        return dtype.is_floating_point
    return kind == "any" or not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _shown(text: str) -> str:
    return "[" + ", ".join(text.split()) + "]"
