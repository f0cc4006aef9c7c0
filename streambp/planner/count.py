"""Counts bytes of live storages and FLOPs of a step, on tensors with or without data.

`LiveBytes` counts what operations allocate; it works on real tensors too, which is how its predictions are tested.
`StepCount` adds what a step on tensors without data needs: an answer where the model looks at values, the memory that GPU
kernels take inside of themselves, and FLOPs.

[Note: kernel workspaces] FlashAttention's backward allocates, and frees before it returns, dQ in float32 and one float32 a
query and head; with grouped queries also dK and dV for every query head. cuDNN's does the same except for the latter.
Memory-efficient attention's has dQ, dK and dV in float32; it is given a key head for each query head. A dispatch mode
cannot see these, so their sizes are added here from the operators' arguments.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from streambp.device import has_data

aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations created while this mode was on and that are still alive;
    their peak, and the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.largest = 0
        self.tracked = 0  # storages so far
        self._alive: dict[int, tuple[int, int, weakref.ref[Any]]] = {}  # storage -> its number, its bytes, what sees it go

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled during a count, and keeping dynamo out costs as much as an operation

    def reset_peak(self) -> None:
        """Let the peak start from the bytes that are alive now."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.call(func, args, kwargs)
        fresh = [s for s in (x.untyped_storage() for x in tensors(result)) if s._cdata not in self._alive]
        if fresh:
            before = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
            for storage in fresh:
                if storage._cdata not in before and storage._cdata not in self._alive:
                    self._track(storage)
        return result

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation."""
        return func(*args, **kwargs)

    def alive(self, first: int, stop: int) -> int:
        """Bytes that are still alive of the storages numbered [first, stop)."""
        return sum(size for number, size, _ in self._alive.values() if first <= number < stop)

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._alive[key] = (self.tracked, size, weakref.ref(storage, functools.partial(self._gone, key)))
        self.tracked += 1
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)

    def _gone(self, key: int, _: Any) -> None:
        self.live -= self._alive.pop(key)[1]


CHANGED_IN_PLACE = frozenset(getattr(aten, name).default for name in ("copy_", "zero_", "neg_")) | frozenset(
    getattr(getattr(aten, name), kind) for name in ("add_", "mul_", "div_", "sub_") for kind in ("Tensor", "Scalar")
)


class Shapes:
    """Results of operations on meta tensors, remembered by the shapes of their inputs: a step repeats the same few hundred
    operations thousands of times, and most of a count's time is torch finding out their outputs' shapes.

    Only operations are remembered whose outputs are fresh tensors, their first argument changed in place, or their `out`.

    Args:
        mode: of fake tensors; None: the tensors are on meta.
    """

    IN_PLACE, OUT = "in place", "out"

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode
        self._known: dict[Any, Any] = {}
        self._never: set[Any] = set()  # operations that return views

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, or make its outputs by what is remembered of one like it."""
        if func in self._never:
            return func(*args, **kwargs)
        key = self._key(func, args, kwargs)
        known = None if key is None else self._known.get(key)
        if known is Shapes.IN_PLACE:
            return args[0]
        if known is Shapes.OUT:
            return kwargs["out"]
        if known is not None:
            made = [None if one is None else self._make(*one) for one in known[1]]
            return tuple(made) if known[0] else made[0]
        result = func(*args, **kwargs)
        if key is not None:
            self._remember(key, func, args, kwargs, result)
        return result

    def _make(self, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        if self.mode is None:
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        with no_dispatch():
            storage = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self.mode, storage, torch.device("cpu"))

    def _known_kind(self, tensor: Any) -> bool:
        if self.mode is None:
            return tensor.device.type == "meta" and type(tensor) in (Tensor, torch.nn.Parameter)
        return isinstance(tensor, FakeTensor) and tensor.constant is None

    def _key(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            key = (func, *map(self._part, args), *kwargs, *map(self._part, kwargs.values()))
            hash(key)
        except TypeError:
            return None
        return key

    def _part(self, value: Any) -> Any:
        """What an argument says about the output's shape.

        Raises:
            TypeError: a tensor of another kind.
        """
        if isinstance(value, Tensor):
            if not self._known_kind(value):
                raise TypeError(f"{type(value).__name__} on {value.device}")
            return value.shape, value.stride(), value.dtype
        if isinstance(value, list | tuple):
            return tuple(map(self._part, value)) if any(isinstance(one, Tensor) for one in value) else tuple(value)
        return type(value), "nan" if value != value else value  # nan would never be found again

    def _remember(self, key: Any, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = func._schema
        written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if written:
            if func in CHANGED_IN_PLACE and result is args[0]:
                self._known[key] = Shapes.IN_PLACE
            elif "out" in kwargs and result is kwargs["out"]:
                self._known[key] = Shapes.OUT
            return
        several = isinstance(result, tuple)
        outputs = result if several else (result,)
        given = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        views = any(
            x.untyped_storage()._cdata in given for x in tensors(outputs)
        )  # _unsafe_view's schema says it makes none
        if views or any(out.alias_info is not None for out in schema.returns):
            self._never.add(func)
            return
        if all(x is None or (isinstance(x, Tensor) and self._known_kind(x)) for x in outputs):
            metadata = [None if x is None else (x.shape, x.stride(), x.dtype) for x in outputs]
            self._known[key] = (several, metadata)


class StepCount(LiveBytes):
    """`LiveBytes` for a step without data; `linear_flops` and `attention_flops` add up.

    Args:
        kernels: "flash" or "cudnn", whose workspaces are added to the peak; None: none are. [Note: kernel workspaces]
        shapes: what is known about operations already.
    """

    def __init__(self, kernels: str | None, shapes: Shapes | None = None) -> None:
        super().__init__()
        self.kernels = kernels
        self.shapes = shapes or Shapes()
        self.linear_flops = 0
        self.attention_flops = 0

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation, or make its outputs, and add its FLOPs and its kernel's workspace."""
        if func is aten._local_scalar_dense.default and not has_data(args[0]):
            return _scalar(args[0])
        if func is aten._to_copy.default and args[0].dim() == 0 and _brings_data(args[0], kwargs.get("device")):
            return torch.tensor(_scalar(args[0]), dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
        if func in LINEAR_FLOPS:
            self.linear_flops += LINEAR_FLOPS[func](*args, **kwargs)
        elif func in ATTENTION:
            self.attention_flops += _attention_flops(func, args)
            if self.kernels is not None and func in BACKWARDS:
                self.peak = max(self.peak, self.live + _workspace(func, args, self.kernels))
        return self.shapes.call(func, args, kwargs)


def add_flops(number: int) -> None:
    """Add FLOPs that no operation stands for to the counts that are running."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, StepCount):
            mode.linear_flops += number


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for part in value:
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, tuple | list | dict) and part:
                found += tensors(part)
    return found


def _brings_data(tensor: Tensor, device: Any) -> bool:
    """Whether a copy to this device asks for a value that does not exist."""
    return tensor.device.type == "meta" and device is not None and torch.device(device).type != "meta"


def _scalar(tensor: Tensor) -> bool | int | float:
    """What a value that does not exist is taken for: conditions hold. In the models' forwards these ask whether a mask
    keeps every token, whether a batch is not packed, whether an index lies in its range."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a.shape) * b.shape[-1]


def _addmm(_: Tensor, a: Tensor, b: Tensor, *__: Any, **___: Any) -> int:
    return _mm(a, b)


LINEAR_FLOPS: dict[Any, Callable[..., int]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.addmm_.default: _addmm,
    aten.mm.dtype: _mm,
    aten.addmm.dtype_out: _addmm,
    aten.bmm.default: _mm,
    aten.baddbmm.default: _addmm,
}
if hasattr(aten, "_grouped_mm"):
    LINEAR_FLOPS[aten._grouped_mm.default] = lambda a, b, *_, **__: (
        2 * a.shape[-2] * a.shape[-1] * b.shape[-1]  # every row of a meets one matrix of b, or every column one group
    )

FORWARDS = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._flash_attention_forward.default,
    aten._scaled_dot_product_efficient_attention.default,
)
BACKWARDS = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
ATTENTION = frozenset(FORWARDS + BACKWARDS)
CAUSAL_AT = {  # the position of is_causal among the arguments
    FORWARDS[0]: 4, FORWARDS[1]: 4, FORWARDS[2]: 8, FORWARDS[3]: 6,
    BACKWARDS[0]: 11, BACKWARDS[1]: 7, BACKWARDS[2]: 11, BACKWARDS[3]: 11,
}  # fmt: skip


def _shapes(func: Any, args: Any) -> tuple[int, int, int, int, int, int, int]:
    """Rows, H, H_kv, queries, keys, D, D_v of an attention call."""
    q, k, v = args[1:4] if func in BACKWARDS else args[:3]
    if func in (FORWARDS[2], BACKWARDS[2]):  # token major, [B, T, H, D] or [T, H, D]
        rows = q.shape[0] if q.dim() == 4 else 1
        return rows, q.shape[-2], k.shape[-2], q.shape[-3], k.shape[-3], q.shape[-1], v.shape[-1]
    return q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def _attention_flops(func: Any, args: Any) -> int:
    """Two products forward; five backward, where the scores are computed again."""
    rows, heads, _, queries, keys, size, value_size = _shapes(func, args)
    pairs = queries * keys
    if len(args) > CAUSAL_AT[func] and args[CAUSAL_AT[func]] is True:
        pairs = pairs // 2 if queries == keys else pairs - queries * queries // 2
    products = 3 * size + 2 * value_size if func in BACKWARDS else size + value_size
    return 2 * rows * heads * pairs * products


def _workspace(func: Any, args: Any, kernels: str) -> int:
    """Bytes. [Note: kernel workspaces]"""
    if func is BACKWARDS[1]:
        return 0
    rows, heads, kv_heads, queries, keys, size, value_size = _shapes(func, args)
    total = 4 * rows * heads * queries * (size + 1)
    if func is BACKWARDS[3]:
        return total + 4 * rows * heads * keys * (size + value_size)
    if kernels == "flash" and heads != kv_heads:
        total += args[1].element_size() * rows * heads * keys * (size + value_size)
    return total
