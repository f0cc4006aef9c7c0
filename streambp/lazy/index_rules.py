"""Rules for indexing a stand-in: an index selects token positions, entries of each row, or both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import TensorBase

from streambp.lazy.base import LazyTensor
from streambp.lazy.expression import Call
from streambp.lazy.row_rules import gather
from streambp.lazy.tensor import LazyLogits
from streambp.torchs_own import torch_own


def index(x: LazyTensor, at: Any) -> Any:
    """Return x[at] of a lazy tensor without the complete tensor. `at` selects tokens; for lazy
    logits also vocabulary entries, or both.

    Returns NotImplemented for any other index, such as a NumPy array.
    """
    parts: list[Any] = []
    for part in at if isinstance(at, tuple) else (at,):
        if isinstance(part, list):
            part = torch.tensor(part, device=x.device, dtype=None if part else torch.long)
        if isinstance(part, bool | LazyTensor):
            return NotImplemented
        if part is not ... and not isinstance(part, int | slice | Tensor):
            return NotImplemented
        if isinstance(part, Tensor) and part.is_floating_point():
            return NotImplemented
        parts.append(part)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    by_number = [part for part in tensors if part.dtype != torch.bool]
    if len(by_number) == len(parts) == x.dim():
        if not isinstance(x, LazyLogits):
            return NotImplemented
        *rows, labels = torch.broadcast_tensors(*by_number)  # x[rows, labels]: one entry for each
        labels = torch_own.where(labels < 0, labels + x.width, labels)
        found = gather(
            x.moved(lambda t: t[(*rows, slice(None))], unique=False, view=False), labels[..., None]
        )
        if found is NotImplemented:
            return NotImplemented
        return found[..., 0]

    has_ellipsis = any(part is ... for part in parts)
    masked = [part for part in tensors if part.dtype == torch.bool]
    consumed = sum(part is not ... for part in parts) + sum(mask.dim() - 1 for mask in masked)
    entries: Any = slice(None)
    if consumed == x.dim() or (has_ellipsis and parts[-1] is not ...):
        entries = parts.pop()
    if not isinstance(entries, slice) or (entries != slice(None) and not isinstance(x, LazyLogits)):
        return NotImplemented
    if not has_ellipsis:
        parts.append(...)
    elif parts[-1] is not ...:
        parts.append(slice(None))  # index for dimension k, which the ellipsis must not cover
    tokens = x.moved(lambda t: t[tuple(parts)], unique=not by_number, view=not tensors)
    if entries == slice(None):
        return tokens
    width = len(range(*entries.indices(tokens.width)))
    part = Call(
        TensorBase.__getitem__,
        (tokens.node, (slice(None), entries)),
        {},
        tokens.requires_grad,
        "slice",
    )
    return tokens.make(part, width, tokens.dtype, tokens.requires_grad).sharing(tokens)
