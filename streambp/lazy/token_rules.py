"""What happens to lazy rows where an operation is one on tokens: they are read at other positions, or in another shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streambp.device import is_elsewhere
from streambp.lazy.expression import readings
from streambp.lazy.tensor import LazyRows
from streambp.torchs_own import torch_own


def view(x: LazyRows, *shape: Any) -> Any:
    """The tokens in another shape, [*tokens, W] -> [*sizes, W]; NotImplemented if the W entries would not stay together."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if isinstance(sizes, torch.dtype | Tensor) or not len(sizes) or sizes[-1] not in (-1, x.width):
        return NotImplemented
    if sizes[-1] == -1 and math.prod(sizes[:-1]) * x.width != x.numel():  # tokens would end up in the last dimension
        return NotImplemented
    return x.moved(lambda t: t.reshape(*sizes[:-1], t.shape[-1]))


def flatten(x: LazyRows, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Dimensions of tokens made one; NotImplemented if W is among them."""
    if end_dim % x.dim() == x.dim() - 1 or start_dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return x.moved(lambda t: t.flatten(start_dim % x.dim(), end_dim % x.dim()))


def _along(x: LazyRows, dim: Any) -> int | None:
    """A dimension of tokens."""
    if isinstance(dim, bool) or not isinstance(dim, int) or dim % x.dim() == x.dim() - 1:
        return None
    return dim % x.dim()


def _parts(x: LazyRows, dim: Any, cut: Callable[[Tensor, int], tuple[Tensor, ...]]) -> Any:
    """Several, of parts of the tokens."""
    at = _along(x, dim)
    if at is None:
        return NotImplemented
    count = len(cut(torch.empty(*x.tokens, 1, device="meta"), at))

    def part(number: int) -> LazyRows:
        return x.moved(lambda t: cut(t, at)[number])

    return tuple(part(number) for number in range(count))


def unbind(x: LazyRows, dim: int = 0) -> Any:
    """One for each index of a dimension of tokens; NotImplemented for W."""
    return _parts(x, dim, lambda t, at: t.unbind(at))


def iterate(x: LazyRows) -> Any:
    """Over the first dimension of tokens; NotImplemented for a single row [W]."""
    return iter(x.unbind(0)) if x.dim() > 1 else NotImplemented


def split(x: LazyRows, split_size_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """Parts of a dimension of tokens, by sizes or one size; NotImplemented for W."""
    sizes = named.get("split_size", split_size_or_sections)
    return _parts(x, dim, lambda t, at: t.split(sizes, at))


def chunk(x: LazyRows, chunks: int, dim: int = 0) -> Any:
    """So many parts of a dimension of tokens, as torch cuts them; NotImplemented for W."""
    return _parts(x, dim, lambda t, at: t.chunk(chunks, at))


def select(x: LazyRows, dim: int, index: Any) -> Any:
    """One index of a dimension of tokens, which goes; NotImplemented for W."""
    at = _along(x, dim)
    return NotImplemented if at is None else x.moved(lambda t: t.select(at, index))


def narrow(x: LazyRows, dim: int, start: Any, length: int) -> Any:
    """A range of a dimension of tokens; NotImplemented for W."""
    at = _along(x, dim)
    return NotImplemented if at is None else x.moved(lambda t: t.narrow(at, start, length))


def index_select(x: LazyRows, dim: int, index: Tensor) -> Any:
    """The tokens at `index` [n] of a dimension, a copy, some perhaps twice; NotImplemented for W."""
    at = _along(x, dim)
    return NotImplemented if at is None else x.moved(lambda t: t.index_select(at, index), unique=False, view=False)


def take_along_dim(x: LazyRows, indices: Any, dim: Any = None) -> Any:
    """Positions [..., n, 1] of each row, a copy, some perhaps twice; NotImplemented for entries of W."""
    at = None if dim is None else _along(x, dim)
    if at is None or not isinstance(indices, Tensor) or indices.dim() != x.dim() or indices.shape[-1] != 1:
        return NotImplemented
    return x.moved(lambda t: torch_own.take_along_dim(t, indices, at), unique=False, view=False)


def squeeze(x: LazyRows, dim: Any = None) -> Any:
    """Without a dimension of tokens, or all of them, of size 1; NotImplemented where W would go."""
    if dim is None:
        if x.width == 1:
            return NotImplemented
        return x.moved(lambda t: t.reshape(*(size for size in x.tokens if size != 1), t.shape[-1]))
    at = _along(x, dim)
    if at is None:
        return NotImplemented
    return x.moved(lambda t: t.squeeze(at))


def unsqueeze(x: LazyRows, dim: int) -> Any:
    """With a dimension of size 1 among the tokens'; NotImplemented behind W."""
    at = dim + x.dim() + 1 if dim < 0 else dim
    return NotImplemented if at == x.dim() else x.moved(lambda t: t.unsqueeze(at))


def transpose(x: LazyRows, dim0: int, dim1: int) -> Any:
    """Two dimensions exchanged, as `permute` allows it."""
    order = list(range(x.dim()))
    a, b = dim0 % x.dim(), dim1 % x.dim()
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


def permute(x: LazyRows, *dims: Any) -> Any:
    """Of tokens; or with the entries second and all else in order, as losses of torch want them, and back."""
    given = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    order = [dim % x.dim() for dim in given]
    before = list(range(x.dim()))
    if x.classes is not None:
        back = [dim for dim in before if dim != x.classes] + [x.classes]
        return x.make(x.node, x.width, x.dtype, x.graded).sharing(x) if order == back else NotImplemented
    if order[-1] == before[-1]:
        return x.moved(lambda t: t.permute(order))
    if x.dim() > 2 and order == [0, before[-1], *before[1:-1]]:
        return x.make(x.node, x.width, x.dtype, x.graded, classes=1).sharing(x)
    return NotImplemented


def itself(x: LazyRows, *args: Any, **kwargs: Any) -> Any:
    """The stand-in: the operation changes nothing of what it stands for."""
    return x


def contiguous(x: LazyRows, *args: Any, **kwargs: Any) -> Any:
    """A copy, if the part that it is of the logits is not contiguous: neither are the positions then."""
    own = not x.derived or (x.classes is None and readings(x.node)[0].positions.is_contiguous())
    return x if own else x.changed()


def clone(x: LazyRows, *args: Any, **kwargs: Any) -> Any:
    """A copy: writes to it do not show in x."""
    return x.changed()


def detach(x: LazyRows) -> Any:
    """The same without a gradient; writes to one show in the other."""
    return x.changed(graded=False).sharing(x)


def to_float(x: LazyRows, *args: Any, **kwargs: Any) -> Any:
    """In float32, or in float64 if x is; NotImplemented for integers and bools."""
    return to(x, torch.promote_types(x.dtype, torch.float32))


def double(x: LazyRows, *args: Any, **kwargs: Any) -> Any:
    """x itself if it is in float64; NotImplemented otherwise, as for `to`."""
    return to(x, torch.float64)


def to(x: LazyRows, *args: Any, **kwargs: Any) -> Any:
    """Casts up, and moves to where the tensor is; all is computed in float32 or wider anyway."""
    wanted = [*args, *kwargs.values()]
    dtypes = [w for w in wanted if isinstance(w, torch.dtype)] + [w.dtype for w in wanted if isinstance(w, Tensor)]
    if is_elsewhere(x, wanted):
        return NotImplemented
    dtype = dtypes[0] if dtypes else x.dtype
    if dtype == x.dtype:
        return x.changed() if kwargs.get("copy") else x
    if not x.dtype.is_floating_point:  # 1 + 1 is not what True + True is
        return NotImplemented
    if torch.promote_types(dtype, x.dtype) != dtype or dtype == torch.float64:
        return NotImplemented
    return x.changed(dtype=dtype)


def made_new(name: str) -> Callable[..., Any]:
    """new_zeros and its like take nothing but the dtype and the device."""
    return lambda x, *args, **kwargs: getattr(torch.empty(0, dtype=x.dtype, device=x.device), name)(*args, **kwargs)
