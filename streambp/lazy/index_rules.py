"""What happens to lazy rows that are indexed: tokens are other positions, entries a part of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streambp.lazy.expression import Call
from streambp.lazy.row_rules import gather
from streambp.lazy.tensor import LazyRows
from streambp.torchs_own import torch_own


def index(x: LazyRows, at: Any) -> Any:
    """x[at]: of tokens, of entries, or of both."""
    parts = [_as_index(part, x.device) for part in (at if isinstance(at, tuple) else (at,))]
    if not all(_is_known(part) for part in parts):
        return NotImplemented
    if len(parts) == x.dim() and all(_is_integers(part) for part in parts):
        return _pick_each(x, parts)
    consumed = sum(part.dim() if _is_mask(part) else 1 for part in parts if part is not ...)
    last: Any = slice(None)
    if consumed == x.dim() or (any(part is ... for part in parts) and parts[-1] is not ...):
        last = parts.pop()
    if any(isinstance(part, Tensor) and part.dtype.is_floating_point for part in parts):
        return NotImplemented
    tokens = x.changed().sharing(x)
    if parts and not (len(parts) == 1 and parts[0] is ...):
        where = tuple(parts) if any(part is ... for part in parts) else (*parts, ...)
        advanced = any(isinstance(part, Tensor) for part in parts)
        unique = not any(isinstance(part, Tensor) and not _is_mask(part) for part in parts)
        tokens = x.moved(_whole_last(where), unique=unique, view=not advanced)
    if isinstance(last, slice):
        return tokens if last == slice(None) else _columns(tokens, last)
    return NotImplemented


def _is_known(part: Any) -> bool:
    """Whether it is an index of tokens by a number, a slice, an ellipsis or a tensor; not one of NumPy's, for example."""
    if isinstance(part, bool | LazyRows):
        return False
    return part is ... or isinstance(part, int | slice | Tensor)


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def _is_integers(part: Any) -> bool:
    return isinstance(part, Tensor) and not part.is_floating_point() and part.dtype != torch.bool


def _as_index(part: Any, device: torch.device) -> Any:
    """Lists of integers or of bool stand for tensors."""
    return torch.tensor(part, device=device, dtype=None if part else torch.long) if isinstance(part, list) else part


def _whole_last(where: tuple[Any, ...]) -> Callable[[Tensor], Tensor]:
    """Index tokens alone: an ellipsis must not take the last dimension for theirs."""
    if where[-1] is ...:
        return lambda t: t[where]
    return lambda t: t[(*where, slice(None))]


def _pick_each(x: LazyRows, parts: list[Tensor]) -> Any:
    """x[rows, labels]: one entry for each."""
    *rows, labels = torch.broadcast_tensors(*parts)
    labels = torch_own.where(labels < 0, labels + x.width, labels)  # shaped as each of rows
    tokens = x.moved(lambda t: t[(*rows, slice(None))], unique=False, view=False)
    found = gather(tokens, labels[..., None])
    return found if found is NotImplemented else found[..., 0]


def _columns(x: LazyRows, entries: slice) -> LazyRows:
    width = len(range(*entries.indices(x.width)))
    call = Call(_take_columns, (x.node, entries), {}, x.graded, "slice")
    return x.make(call, width, x.dtype, x.graded).sharing(x)


def _take_columns(rows: Tensor, entries: slice) -> Tensor:
    return rows[:, entries]
