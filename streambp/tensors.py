"""Check tensors that programs pass to public functions, and replace tensors in containers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from streambp.errors import StreamBPError
from streambp.known_names import FULL_SHAPE, LOCAL_SHARD

DtypeKind = Literal["floating", "whole", "any"]
KIND_TEXTS = {
    "floating": "a floating tensor",
    "whole": "a tensor of whole numbers",
    "any": "a tensor",
}
FLATTEN_METHOD = "__tensor_flatten__"  # method that returns the names of inner tensors
ANY_DIMS = "..."


def check_tensors(**specifications: tuple[Any, str, DtypeKind]) -> None:
    """Check that arguments are tensors with the expected kind of dtype and the expected dimensions,
    such as "... h" or "B T".

    Args:
        specifications: a tuple (argument, dimensions, kind of dtype) by the argument's name. A
            dimension with the same name must have the same size in all arguments. "..." are any
            leading dimensions, equal in all arguments. An argument that is None is skipped.

    Raises:
        StreamBPError: an argument is no tensor, or has another kind or shape.
    """
    sizes: dict[str, tuple[Any, str]] = {}  # by dimension, its size and the argument that set it
    for name, (tensor, text, kind) in specifications.items():
        if tensor is None:
            continue
        shape = _shape_text(text)
        if not isinstance(tensor, Tensor):
            raise StreamBPError(
                f"{name} is a {type(tensor).__name__}; it must be {KIND_TEXTS[kind]} {shape}."
            )
        if not _is_dtype_kind(tensor.dtype, kind):
            raise StreamBPError(
                f"{name} is of {tensor.dtype}; it must be {KIND_TEXTS[kind]} {shape}."
            )
        dims = text.split()
        dims_by_name = []
        for dim in dims:
            if dim != ANY_DIMS:
                dims_by_name.append(dim)
        count = tensor.dim() - len(dims_by_name)
        named_sizes: dict[str, Any]
        if ANY_DIMS in dims:
            named_sizes = {ANY_DIMS: tuple(tensor.shape[: max(0, count)])}
        else:
            named_sizes = {}
        named_sizes.update(zip(dims_by_name, tensor.shape[max(0, count) :], strict=False))
        if count < 0 or (count > 0 and ANY_DIMS not in dims):
            raise StreamBPError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}.")
        for dim, size in named_sizes.items():
            expected, whose = sizes.setdefault(dim, (size, name))
            if expected != size:
                if dim == ANY_DIMS:
                    requirement = "equal leading dimensions"
                else:
                    requirement = f"{dim} = {expected}"
                raise StreamBPError(
                    f"{name} has shape {tuple(tensor.shape)}, but {whose} has "
                    f"{tuple(specifications[whose][0].shape)}; {name} must be {shape} with "
                    f"{requirement}."
                )


def _is_dtype_kind(dtype: torch.dtype, kind: DtypeKind) -> bool:
    """True if a dtype belongs to a kind: "floating", "whole" (integers, without bool) or "any"."""
    if kind == "floating":
        return dtype.is_floating_point
    return kind == "any" or not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _shape_text(text: str) -> str:
    """Return dimensions such as "B T" in the form of a shape, for an error message."""
    return "[" + ", ".join(text.split()) + "]"


def strip_view(result: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return a tensor [...] with the memory of `result` that autograd does not treat as a view.

    Called for results of a custom autograd Function's forward: torch refuses in-place operations on
    a view that such a forward returns, and `F.linear` with a bias returns a view.

    Args:
        result: a contiguous tensor that no other code reads.
        shape: the shape of the returned tensor; None: that of `result`.
    """
    if shape is None:
        if not result._is_view():
            return result
        shape = result.shape
    unviewed_result: Tensor = torch.ops.aten._unsafe_view(result, shape)
    return unviewed_result


T = TypeVar("T", bound=Tensor)
# types without inner tensors
LEAF_TYPES = (Tensor, int, float, str, type(None), torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class TensorSlot:
    """Placeholder for a tensor. The tensors of nested arguments are put into a list, and a copy of
    the arguments has placeholders in their places.

    Attributes:
        number: the tensor's index in the list.
    """

    number: int


def memory_state(tensor: Tensor | None) -> tuple[Any, ...]:
    """Return a tuple to compare with a later one of the same tensor [...]: the two differ if the
    tensor was written to in place or got other memory in between. Callers cache a result of the
    tensor until then. The tuple is () for None.

    The last entry is the version counter, None for an inference tensor. A detached alias of a
    parameter has the same tuple as the parameter.
    """
    if tensor is None:
        return ()
    version = None
    if not tensor.is_inference():
        version = tensor._version
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested lists, tuples and dicts in which `change` has replaced each tensor
    and each `TensorSlot` (a placeholder for a tensor).

    Args:
        value: the nested value.
        change: function from a tensor or `TensorSlot` to its replacement.
    """
    if isinstance(value, Tensor | TensorSlot):
        return change(value)
    if isinstance(value, tuple | list):
        parts = list(map(rebuild, value, itertools.repeat(change)))
        if type(value) in (tuple, list):
            return type(value)(parts)
        return value
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        copied = copy.copy(value)
        for key, part in value.items():
            copied[key] = rebuild(part, change)
        return copied
    return value


def restoring_iterator(entries: Iterable[tuple[dict[str, Any], str]]) -> Iterator[Any]:
    """Return an iterator that restores entries of dictionaries to their present values when it is
    consumed. Entries that do not exist now are removed.

    `deque(iterator, maxlen=0)` consumes the iterator in one call in C. An interrupt (Ctrl-C) cannot
    end such a call half-way, so all entries are restored.

    Args:
        entries: pairs of a dictionary and a key, such as `vars(module)` and "forward".
    """
    present: list[tuple[dict[str, Any], str, Any]] = []
    absent: list[tuple[dict[str, Any], str, None]] = []
    for table, key in entries:
        if key in table:
            present.append((table, key, table[key]))
        else:
            absent.append((table, key, None))
    return itertools.chain(
        itertools.starmap(operator.setitem, reversed(present)),
        itertools.starmap(dict.pop, absent),
    )


@contextlib.contextmanager
def replace_attribute(objects: Collection[Any], name: str, values: Iterable[Any]) -> Iterator[None]:
    """Context manager that sets one attribute of several objects, and restores the previous values
    afterwards.

    Args:
        objects: the objects.
        name: name of the attribute.
        values: the new value for each object, in the same order.
    """
    previous_values = [getattr(holder, name) for holder in objects]
    try:
        for holder, value in zip(objects, values, strict=False):
            setattr(holder, name, value)
        yield
    finally:
        for holder, previous in zip(objects, previous_values, strict=True):
            setattr(holder, name, previous)


def tensors_in(value: Any, kind: type[T]) -> list[T]:
    """Return the tensors of type `kind` in nested lists, tuples and dicts."""
    if isinstance(value, LEAF_TYPES):
        return [value] if isinstance(value, kind) else []
    if type(value) in (tuple, list, dict):
        parts = value.values() if type(value) is dict else value
        leaves: list[T] = []
        for part in parts:
            leaves.extend(tensors_in(part, kind))
        return leaves
    leaves = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, kind):
            leaves.append(leaf)
    return leaves


def change_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[T], change: Callable[[T], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a call with `change` applied to each tensor of
    type `kind`, also inside of nested lists, tuples and dicts.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        kind: the class of the tensors to change.
        change: function from a tensor to its replacement.
    """
    # torch's tree functions are many times slower
    if all(isinstance(value, LEAF_TYPES) for value in (*args, *kwargs.values())):
        positional = tuple([change(value) if isinstance(value, kind) else value for value in args])
        return positional, {
            name: change(value) if isinstance(value, kind) else value
            for name, value in kwargs.items()
        }
    result: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(kind, change, (args, kwargs))
    return result


def inner_bytes(tensor: Tensor) -> int | None:
    """Return the bytes of the inner tensors of a tensor subclass [...], such as torchao's quantised
    weight; None for a plain tensor. For a DTensor, the inner tensors of its shard count."""
    if hasattr(tensor, LOCAL_SHARD):
        return inner_bytes(getattr(tensor, LOCAL_SHARD))
    flatten = getattr(tensor, FLATTEN_METHOD, None)
    if flatten is None:
        return None
    total = 0
    for name in flatten()[0]:
        inner = getattr(tensor, name)
        nested = inner_bytes(inner)
        if nested is None:
            nested = inner.nbytes
        total += nested
    return total


def full_shape(parameter: Tensor) -> torch.Size:
    """Return a parameter's full shape, such as [V, h]. Between gathers, ZeRO-3 replaces the
    parameter's data by a tensor of 0 elements."""
    shape: torch.Size = getattr(parameter, FULL_SHAPE, parameter.shape)
    return shape
