"""Restore the values of tensors and arrays after a trial.

Small tensors are copied before the trial. Large tensors are copied before the first write.
"""

from __future__ import annotations

import array
import ctypes
import io
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from streambp.tensors import full_shape

BUFFER_TYPES = (bytearray, memoryview, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
MEMORY_FILE_TYPES = (io.BytesIO, io.StringIO)  # files in memory
ARRAY_TYPES = (
    np.ndarray,
    array.array,
    *BUFFER_TYPES,
    *MEMORY_FILE_TYPES,
)  # mutable numbers outside of torch


class SavedValues(NamedTuple):
    """A tensor [...] or other block of numbers, and a copy of its values, to restore them after a
    test run of a layer.

    Attributes:
        name: the name for messages.
        holder: the tensor, NumPy array, other array, block of memory or file in memory.
        copy: the copied values.
        version: the tensor's version counter; None: it has no counter.
    """

    name: str
    holder: Any
    copy: Any
    version: int | None


def save_values(name: str, tensor: Tensor) -> SavedValues:
    """Return a copy of a tensor's values [...] with the tensor's version counter. `restore_values`
    restores both after a test run of a layer."""
    with _disable_current_modes(), torch.no_grad():
        version = None if tensor.is_inference() else tensor._version
        return SavedValues(name, tensor, tensor.detach().clone(), version)


def restore_values(values: SavedValues) -> None:
    """Write the copied values [...] back into their tensor or array, and restore the version
    counter.

    Autograd graphs that saved the tensor stay valid with the old counter.
    """
    holder, saved = values.holder, values.copy
    if isinstance(holder, np.ndarray):
        holder[...] = saved
        return
    if isinstance(holder, MEMORY_FILE_TYPES):
        holder.seek(0)
        holder.truncate()
        holder.write(saved.getvalue())  # type: ignore[arg-type]
        holder.seek(saved.tell())
        return
    if isinstance(holder, array.array | bytearray):
        holder[:] = saved
        return
    if isinstance(holder, BUFFER_TYPES):
        memoryview(holder).cast("B")[:] = saved
        return
    with _disable_current_modes(), torch.inference_mode(holder.is_inference()), torch.no_grad():
        if holder.shape != saved.shape or holder.dtype != saved.dtype:
            holder.data = saved
        else:
            holder.detach().copy_(saved)
    if values.version is not None:
        torch._C._autograd._unsafe_set_version_counter((holder,), (values.version,))


class CopyOnWrite(TorchDispatchMode):
    """Torch dispatch mode for a test run of a module, to restore large tensors afterwards. A
    tensor's values are copied before the first operation that writes to the tensor in place.
    Tensors that no operation writes to are never copied.

    Args:
        tensors: the tensors, as (name, tensor).

    Attributes:
        copies: the earlier values of the tensors that were written to.
        names: names of the tensors that were written to since this set was last emptied.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.copies: list[SavedValues] = []
        self.names: set[str] = set()
        self._watched: dict[int, list[tuple[str, Tensor]]] = {}
        self._copied: set[int] = set()
        for name, tensor in tensors:
            storage = tensor.untyped_storage()._cdata
            self._watched.setdefault(storage, []).append((name, tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments if isinstance(func, torch._ops.OpOverload) else ()
        for index, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                argument_value = args[index] if index < len(args) else kwargs.get(argument.name)
                for x in (
                    argument_value
                    if isinstance(argument_value, list | tuple)
                    else (argument_value,)
                ):
                    if isinstance(x, Tensor) and x.layout == torch.strided:
                        self._keep(x)
        return func(*args, **kwargs)

    def _keep(self, target: Tensor) -> None:
        storage = target.untyped_storage()._cdata
        for name, tensor in self._watched.get(storage, ()):
            self.names.add(name)
            if storage not in self._copied:
                self.copies.append(save_values(name, tensor))
        self._copied.add(storage)


def changed_values(snapshots: Iterable[SavedValues]) -> list[SavedValues]:
    """Return the entries whose tensors or arrays differ now from their copies, because a test run
    has written to them. Synchronizes once with each device."""
    entries: list[SavedValues] = []
    by_device: dict[torch.device, list[tuple[SavedValues, Tensor]]] = {}
    with _disable_current_modes(), torch.no_grad():
        for values in snapshots:
            holder, saved = values.holder, values.copy
            if _is_released(holder):
                continue
            if isinstance(holder, ARRAY_TYPES):
                entries += [values] if content_of(holder) != content_of(saved) else []
            elif (
                holder.shape != saved.shape or holder.dtype != saved.dtype
            ):  # replaced through `.data`
                entries.append(values)
            else:
                # comparing bytes makes NaN equal to NaN
                current_bytes, saved_bytes = (
                    x.detach().reshape(-1).view(torch.uint8) for x in (holder, saved)
                )
                by_device.setdefault(holder.device, []).append(
                    (values, (current_bytes != saved_bytes).any())
                )
        for pairs in by_device.values():
            flags = torch.stack([differs for _, differs in pairs]).tolist()
            entries += [
                values for (values, _), differs in zip(pairs, flags, strict=True) if differs
            ]
    return entries


def content_of(numbers: Any) -> tuple[bytes | str, int]:
    """Return the numbers or text in an array, a block of memory or a file in memory, for a
    comparison with an earlier copy. The result is a pair: the bytes or text, and the current
    position in a file (0 for other values)."""
    if isinstance(numbers, MEMORY_FILE_TYPES):
        return numbers.getvalue(), numbers.tell()
    if isinstance(numbers, np.ndarray | array.array):
        return numbers.tobytes(), 0
    return bytes(memoryview(numbers).cast("B")), 0


def copy_memory(value: Any, limit: int) -> Any:
    """Return a copy of a block of memory (bytearray, ctypes) or of a file in memory (io.BytesIO),
    for `restore_values`. None if the value cannot be written to, or has more than `limit` bytes."""
    if type(value) in MEMORY_FILE_TYPES:
        if value.closed or len(value.getvalue()) > limit:
            return None
        copy = type(value)(value.getvalue())
        copy.seek(value.tell())
        return copy
    if not isinstance(value, BUFFER_TYPES) or isinstance(value, ctypes.py_object):
        return None
    view = memoryview(value)
    if view.readonly or not view.c_contiguous or view.nbytes > limit:
        return None
    return bytes(view.cast("B"))


def _is_released(holder: Any) -> bool:
    """True if `holder` is a parameter whose values ZeRO-3 has freed on this rank until a forward
    gathers them. Its data has no elements then, also while a gather is pending.

    A snapshot neither copies nor restores such data: a test may gather the parameter, and the empty
    data would replace the gathered values.
    """
    return isinstance(holder, Tensor) and full_shape(holder) != holder.shape


def can_be_copied(tensor: Tensor) -> bool:
    """True if a tensor [...] has values that a copy can restore: plain, strided and with memory of
    its own for each element. The snapshot before a layer's test run leaves other tensors out."""
    plain = (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
    )
    if not plain or tensor.is_meta or _is_released(tensor):
        return False
    if tensor.numel() and not tensor.untyped_storage().nbytes():  # freed by an engine
        return False
    return torch._debug_has_internal_overlap(tensor) != 1
