"""Rules for operations on the tokens of a stand-in: they change positions or shape.

The rules serve hidden states, logits in a model's forward, and lazy rows. Each rule changes the
positions [*tokens, k] with the stand-in's `with_tokens`, independently of the values at the
positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import TensorBase

from streambp.device import names_other_device
from streambp.foreign import tensor_method, torch_own
from streambp.lazy.base import LazyTensor
from streambp.lazy.expression import RecordedCall
from streambp.lazy.row_rules import gather
from streambp.lazy.tensor import LazyLogits


def index(x: LazyTensor, at: Any) -> Any:
    """Compute x[at] for a lazy tensor x [*tokens, W], whose values are not stored. An index of
    tokens gives a lazy tensor. The last dimension of lazy logits may be indexed or sliced too.

    Return NotImplemented for any other index, such as a NumPy array. The caller then indexes the
    complete tensor.
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
        gathered = gather(
            x.with_tokens(lambda t: t[(*rows, slice(None))], unique=False, view=False),
            labels[..., None],
        )
        if gathered is NotImplemented:
            return NotImplemented
        return gathered[..., 0]

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
    tokens = x.with_tokens(lambda t: t[tuple(parts)], unique=not by_number, view=not tensors)
    if entries == slice(None):
        return tokens
    width = len(range(*entries.indices(tokens.width)))
    part = RecordedCall(
        TensorBase.__getitem__,
        (tokens.node, (slice(None), entries)),
        {},
        tokens.requires_grad,
        "slice",
    )
    return tokens.make(part, width, tokens.dtype, tokens.requires_grad).share_memory_with(tokens)


# Operation along one dimension -> index of the dimension argument.
TOKEN_DIM_ARGUMENT = {
    "unbind": 0,
    "split": 1,
    "chunk": 1,
    "select": 0,
    "narrow": 0,
    "index_select": 0,
}
SPLITTING_OPERATIONS = ("unbind", "split", "chunk")  # return a tuple of parts


def is_of_tokens(x: LazyTensor, dim: Any) -> bool:
    """True if `dim` is an integer and one of the token dimensions of a lazy tensor [*tokens, W],
    not the last dimension."""
    return isinstance(dim, int) and not isinstance(dim, bool) and dim % x.dim() != x.dim() - 1


def apply_along_dim(
    method: Callable[..., Any], at: int, name: str, x: LazyTensor, *args: Any, **kwargs: Any
) -> Any:
    """Apply a torch method, such as `select`, along a token dimension of a lazy tensor [*tokens,
    W]. Return a lazy tensor, or a tuple of lazy tensors from methods such as `split`. Results are
    views, except those of `index_select`, which may repeat tokens.

    Return NotImplemented for the dimension of size W. The caller then applies the method to the
    complete tensor.

    Args:
        method: torch's method.
        at: index in `args` of the method's argument `dim`.
        name: name of the method.
        x: the lazy tensor.
        args: the method's positional arguments, without x.
        kwargs: the method's keyword arguments.
    """
    positional = list(args)
    dim = positional[at] if len(positional) > at else kwargs.get("dim", 0)
    if not is_of_tokens(x, dim):
        return NotImplemented
    if len(positional) > at:
        positional[at] = dim % x.dim()  # positions [*tokens, k] have the same dimension
    else:
        kwargs["dim"] = dim % x.dim()
    if name in SPLITTING_OPERATIONS:
        parts = range(
            len(method(torch.empty(*x.shape[:-1], 1, device="meta"), *positional, **kwargs))
        )
        return tuple(
            x.with_tokens(lambda t, part=part: method(t, *positional, **kwargs)[part])
            for part in parts
        )
    copies = name == "index_select"
    return x.with_tokens(
        lambda t: method(t, *positional, **kwargs), unique=not copies, view=not copies
    )


def view(x: LazyTensor, *shape: Any) -> Any:
    """Return a view of a lazy tensor with reshaped token dimensions, [*tokens, W] -> [*sizes, W].

    Return NotImplemented if the last dimension would change. The caller then reshapes the complete
    tensor.

    Args:
        x: the lazy tensor.
        shape: arguments of torch's view: sizes of the result, as integers or one sequence, with W
            or -1 at the end.
    """
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if (
        isinstance(sizes, torch.dtype | Tensor)
        or not len(sizes)
        or sizes[-1] not in (-1, x.shape[-1])
    ):
        return NotImplemented
    # the last dimension would mix tokens
    if sizes[-1] == -1 and math.prod(sizes[:-1]) * x.shape[-1] != x.numel():
        return NotImplemented
    return x.with_tokens(lambda t: t.reshape(*sizes[:-1], t.shape[-1]))


def flatten(x: LazyTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Merge the token dimensions `start_dim` to `end_dim` of a lazy tensor [*tokens, W]. Return
    NotImplemented if the last dimension is among them; the caller then flattens the complete
    tensor."""
    if not is_of_tokens(x, start_dim) or not is_of_tokens(x, end_dim):
        return NotImplemented
    return x.with_tokens(lambda t: t.flatten(start_dim % x.dim(), end_dim % x.dim()))


def take_along_dim(x: LazyTensor, indices: Any, dim: Any = None) -> Any:
    """Select tokens of a lazy tensor [*tokens, W], like torch.take_along_dim along a token
    dimension. The result is a lazy tensor, not a view, and may repeat tokens.

    Return NotImplemented if `dim` is the last dimension, and for indices that differ between the W
    entries of a token. The caller then computes the complete tensor.

    Args:
        x: the lazy tensor.
        indices: [..., n, 1], positions along `dim`; the last dimension must have size 1.
        dim: the token dimension.
    """
    if (
        not isinstance(indices, Tensor)
        or indices.dim() != x.dim()
        or indices.shape[-1] != 1
        or not is_of_tokens(x, dim)
    ):
        return NotImplemented
    return x.with_tokens(
        lambda t: torch_own.take_along_dim(t, indices, dim % x.dim()), unique=False, view=False
    )


def squeeze(x: LazyTensor, dim: Any = None) -> Any:
    """Remove the token dimension `dim` of size 1 from a lazy tensor [*tokens, W], or all token
    dimensions of size 1 if `dim` is None. Return NotImplemented if the last dimension would be
    removed; the caller then squeezes the complete tensor."""
    if dim is None and x.shape[-1] != 1:
        return x.with_tokens(
            lambda t: t.reshape(*(size for size in x.shape[:-1] if size != 1), t.shape[-1])
        )
    if not is_of_tokens(x, dim):
        return NotImplemented
    return x.with_tokens(lambda t: t.squeeze(dim % x.dim()))


def unsqueeze(x: LazyTensor, dim: int) -> Any:
    """Insert a dimension of size 1 before dimension `dim` of a lazy tensor [*tokens, W]. Return
    NotImplemented for a place after the last dimension; the caller then uses the complete
    tensor."""
    at = dim + x.dim() + 1 if dim < 0 else dim
    if at == x.dim():
        return NotImplemented
    return x.with_tokens(lambda t: t.unsqueeze(at))


def transpose(x: LazyTensor, dim0: int, dim1: int) -> Any:
    """Exchange two token dimensions of a lazy tensor [*tokens, W], or move the dimension of size W
    to the second place and back. Return NotImplemented for other dimensions; the caller then
    transposes the complete tensor."""
    order = list(range(x.dim()))
    a = dim0 % x.dim()
    b = dim1 % x.dim()
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


def permute(x: LazyTensor, *dims: Any) -> Any:
    """Permute the token dimensions of a lazy tensor [*tokens, W], or move the dimension of size W
    to the second place and back. Losses of torch expect the vocabulary in the second dimension.

    Return NotImplemented for other permutations; the caller then permutes the complete tensor.
    """
    order_of_dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    order = [dim % x.dim() for dim in order_of_dims]
    last = x.dim() - 1
    if x.classes is not None:
        in_order = [dim for dim in range(x.dim()) if dim != x.classes] + [x.classes]
        if order == in_order:
            return x.with_classes(None)
        return NotImplemented
    if order[-1] == last:
        return x.with_tokens(lambda t: t.permute(order))
    if x.dim() > 2 and order == [0, last, *range(1, last)]:
        return x.with_classes(1)
    return NotImplemented


def to(x: LazyTensor, *args: Any, **kwargs: Any) -> Any:
    """Cast a lazy tensor to a wider dtype on the same device, as `torch.Tensor.to` does, and return
    a lazy tensor. Values are computed in float32 or wider in any case. Return NotImplemented for
    other casts and for other devices; the caller then uses the complete tensor."""
    targets = [*args, *kwargs.values()]
    dtypes = [value for value in targets if isinstance(value, torch.dtype)]
    dtypes += [value.dtype for value in targets if isinstance(value, Tensor)]
    if names_other_device(x, targets):
        return NotImplemented
    dtype = dtypes[0] if dtypes else x.dtype
    if dtype == x.dtype:
        return x.copy_with() if kwargs.get("copy") else x
    if x.casts_to(dtype):
        return x.copy_with(dtype=dtype)
    return NotImplemented


def _iterate(x: LazyTensor) -> Any:
    """Return an iterator over the first dimension of a lazy tensor [*tokens, W], for `iter(x)`.
    Return NotImplemented for a lazy tensor [W]; the caller then iterates over the complete
    tensor."""
    if x.dim() > 1:
        return iter(x.unbind(0))
    return NotImplemented


def _make_contiguous(x: LazyTensor, *_: Any, **__: Any) -> Any:
    """Return the result of `x.contiguous()`: x itself if the complete tensor would be contiguous,
    otherwise a lazy copy."""
    if not x.is_view or (x.classes is None and x.origin.is_contiguous()):
        return x
    return x.copy_with()


def _cast_to_float32(x: LazyTensor, *_: Any, **__: Any) -> Any:
    """Return the result of `x.float()` for a lazy tensor. float64 stays float64. Return
    NotImplemented for integers and bools; the caller then casts the complete tensor."""
    if x.casts_to(torch.float32):
        return to(x, torch.float32)
    return to(x, torch.promote_types(x.dtype, torch.float32))


# Names of torch's functions and of equal methods. See `foreign.py`.
TOKEN_RULES: dict[str, Callable[..., Any]] = {
    "__getitem__": index,
    "__iter__": _iterate,
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
    "contiguous": _make_contiguous,
    "float": _cast_to_float32,
    "to": to,
    **{
        name: functools.partial(apply_along_dim, torch_method, at, name)
        for name, at in TOKEN_DIM_ARGUMENT.items()
        if (torch_method := tensor_method(name)) is not None
    },
    # Methods that use the stand-in's dtype and device only.
    **{
        name: lambda x, *args, name=name, **kwargs: getattr(
            torch.empty(0, dtype=x.dtype, device=x.device), name
        )(*args, **kwargs)
        for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
    },
}
