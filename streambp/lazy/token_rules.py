"""What happens to a stand-in where an operation is one on tokens: it is read at other positions, or in another shape.

These rules are those of hidden states, of logits in a model's forward, and of lazy rows: each changes the positions
[*tokens, k] that its stand-in is `moved` to, and knows nothing of what stands there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streambp.device import is_elsewhere
from streambp.lazy.index_rules import index
from streambp.lazy.standin import StandIn
from streambp.torchs_own import method, torch_own

# Operations along one dimension, by where that stands among their arguments.
ALONG = {"unbind": 0, "split": 1, "chunk": 1, "select": 0, "narrow": 0, "index_select": 0}
SEVERAL = ("unbind", "split", "chunk")  # return one for each part


def is_of_tokens(x: StandIn, dim: Any) -> bool:
    """Whether it is a dimension of the tokens, and not of the W."""
    return isinstance(dim, int) and not isinstance(dim, bool) and dim % x.dim() != x.dim() - 1


def along(own: Callable[..., Any], at: int, name: str, x: StandIn, *args: Any, **kwargs: Any) -> Any:
    """What a method of torch's does along a dimension of tokens, it does to their positions.

    Results are views, but for those of an index [n], where some tokens stand perhaps twice. NotImplemented for W.

    Args:
        own: the method, of that name. at: the dimension's place among args.
    """
    given = list(args)
    dim = given[at] if len(given) > at else kwargs.get("dim", 0)
    if not is_of_tokens(x, dim):
        return NotImplemented
    if len(given) > at:
        given[at] = dim % x.dim()  # of tokens [*tokens, k], as of [*tokens, W]
    else:
        kwargs["dim"] = dim % x.dim()
    if name in SEVERAL:
        parts = range(len(own(torch.empty(*x.shape[:-1], 1, device="meta"), *given, **kwargs)))
        return tuple(x.moved(lambda t, part=part: own(t, *given, **kwargs)[part]) for part in parts)
    copies = name == "index_select"
    return x.moved(lambda t: own(t, *given, **kwargs), unique=not copies, view=not copies)


def view(x: StandIn, *shape: Any) -> Any:
    """The tokens in another shape, [*tokens, W] -> [*sizes, W]; NotImplemented if the W entries would not stay together."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if isinstance(sizes, torch.dtype | Tensor) or not len(sizes) or sizes[-1] not in (-1, x.shape[-1]):
        return NotImplemented
    if sizes[-1] == -1 and math.prod(sizes[:-1]) * x.shape[-1] != x.numel():  # tokens would end up in the last dimension
        return NotImplemented
    return x.moved(lambda t: t.reshape(*sizes[:-1], t.shape[-1]))


def flatten(x: StandIn, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Dimensions of tokens made one; NotImplemented if W is among them."""
    if not is_of_tokens(x, start_dim) or not is_of_tokens(x, end_dim):
        return NotImplemented
    return x.moved(lambda t: t.flatten(start_dim % x.dim(), end_dim % x.dim()))


def take_along_dim(x: StandIn, indices: Any, dim: Any = None) -> Any:
    """Positions [..., n, 1] of each row, a copy, some perhaps twice; NotImplemented for entries of W."""
    if not isinstance(indices, Tensor) or indices.dim() != x.dim() or indices.shape[-1] != 1 or not is_of_tokens(x, dim):
        return NotImplemented
    return x.moved(lambda t: torch_own.take_along_dim(t, indices, dim % x.dim()), unique=False, view=False)


def squeeze(x: StandIn, dim: Any = None) -> Any:
    """Without a dimension of tokens, or all of them, of size 1; NotImplemented where W would go."""
    if dim is None and x.shape[-1] != 1:
        return x.moved(lambda t: t.reshape(*(size for size in x.shape[:-1] if size != 1), t.shape[-1]))
    return x.moved(lambda t: t.squeeze(dim % x.dim())) if is_of_tokens(x, dim) else NotImplemented


def unsqueeze(x: StandIn, dim: int) -> Any:
    """With a dimension of size 1 among the tokens'; NotImplemented behind W."""
    at = dim + x.dim() + 1 if dim < 0 else dim
    return NotImplemented if at == x.dim() else x.moved(lambda t: t.unsqueeze(at))


def transpose(x: StandIn, dim0: int, dim1: int) -> Any:
    """Two dimensions exchanged, as `permute` allows it."""
    order = list(range(x.dim()))
    a, b = dim0 % x.dim(), dim1 % x.dim()
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


def permute(x: StandIn, *dims: Any) -> Any:
    """Of tokens; or with the entries second and all else in order, as losses of torch want them, and back."""
    given = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    order, last = [dim % x.dim() for dim in given], x.dim() - 1
    if x.classes is not None:
        back = [dim for dim in range(x.dim()) if dim != x.classes] + [x.classes]
        return x.with_classes(None) if order == back else NotImplemented
    if order[-1] == last:
        return x.moved(lambda t: t.permute(order))
    return x.with_classes(1) if x.dim() > 2 and order == [0, last, *range(1, last)] else NotImplemented


def to(x: StandIn, *args: Any, **kwargs: Any) -> Any:
    """Casts up, and moves to where the tensor is; all is computed in float32 or wider anyway."""
    wanted = [*args, *kwargs.values()]
    dtypes = [w for w in wanted if isinstance(w, torch.dtype)] + [w.dtype for w in wanted if isinstance(w, Tensor)]
    if is_elsewhere(x, wanted):
        return NotImplemented
    dtype = dtypes[0] if dtypes else x.dtype
    if dtype == x.dtype:
        return x.changed() if kwargs.get("copy") else x
    return x.changed(dtype=dtype) if x.casts_to(dtype) else NotImplemented


# By name: of torch's functions and of the methods that are them. [Note: torch's own functions]
TOKEN_RULES: dict[str, Callable[..., Any]] = {
    "__getitem__": index,
    "__iter__": lambda x: iter(x.unbind(0)) if x.dim() > 1 else NotImplemented,
    "view": view,
    "reshape": view,
    "flatten": flatten,
    "take_along_dim": take_along_dim,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "transpose": transpose,
    "swapaxes": transpose,
    "swapdims": transpose,
    "permute": permute,
    # A copy, if the part that it is of the whole is not contiguous: neither are the positions then.
    "contiguous": lambda x, *_, **__: (
        x if not x.derived or (x.classes is None and x.origin.is_contiguous()) else x.changed()
    ),
    # float64 stays; integers and bools are not cast.
    "float": lambda x, *_, **__: to(
        x, torch.float32 if x.casts_to(torch.float32) else torch.promote_types(x.dtype, torch.float32)
    ),
    "to": to,
    **{name: functools.partial(along, own, at, name) for name, at in ALONG.items() if (own := method(name)) is not None},
    # They take nothing but the dtype and the device.
    **{
        name: lambda x, *args, name=name, **kwargs: getattr(torch.empty(0, dtype=x.dtype, device=x.device), name)(
            *args, **kwargs
        )
        for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
    },
}
