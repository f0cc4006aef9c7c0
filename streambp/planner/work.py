"""Compute the cost of a step's operations: FLOPs of products and attention, bytes read and written,
dispatches, copies.

An operation reads its inputs once and writes its outputs once; it also reads a tensor that it
changes in place. A broadcast dimension is read once. Views and empty tensors move nothing. Fills
and `copy_` do not read their destination. Gathers and scatters move the selected elements twice. A
matrix product that adds to a sum moves the sum twice. All other costs of matrix products and
attention are in their FLOPs. A product with a size of at most `MAX_SKINNY_SIZE` costs its
bytes instead: products of adapters are a hundredth of a LoRA layer's FLOPs and a fifth of its time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Work(NamedTuple):
    """Cost of a torch operation, of a part of a training step, or of the full step: FLOPs, bytes
    and dispatches.

    Attributes:
        products: FLOPs of matrix products.
        forward: FLOPs of attention forward, for the computed query-key pairs.
        backward: FLOPs of attention backward, for the computed query-key pairs.
        traffic: bytes that operations read and write; 0 for attention and most matrix products,
            whose seconds follow from their FLOPs.
        dispatches: number of operations that torch starts.
        to_host: bytes copied to the host.
        from_host: bytes copied from the host.
    """

    products: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    traffic: float = 0.0
    dispatches: float = 0.0
    to_host: float = 0.0
    from_host: float = 0.0

    def plus(self, addend: Work, times: float = 1.0) -> Work:
        """Return this cost plus `times` times `addend`, field by field; times=-1 subtracts."""
        return Work(
            *[value + times * other_value for value, other_value in zip(self, addend, strict=True)]
        )


def tensors(value: Any) -> list[Tensor]:
    """Return every tensor, of any shape, in nested tuples, lists and dicts, such as the arguments
    of a torch operation."""
    if isinstance(value, Tensor):
        return [value]
    members: list[Tensor] = []
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for part in value:
            if isinstance(part, Tensor):
                members.append(part)
            elif isinstance(part, tuple | list | dict) and part:
                members += tensors(part)
    return members


GROUPED_PRODUCT = aten._grouped_mm.default if hasattr(aten, "_grouped_mm") else None
FACTOR_INDEX = {  # index of the first factor among the arguments
    aten.mm.default: 0, aten.addmm.default: 1, aten.addmm_.default: 1, aten.mm.dtype: 0, aten.addmm.dtype_out: 1,
    aten.bmm.default: 0, aten.baddbmm.default: 1, GROUPED_PRODUCT: 0,
}  # fmt: skip
# the least of a product's three sizes, up to which memory bounds it: FLOPs a byte, of an H100 about
# 250
MAX_SKINNY_SIZE = 64
ACCUMULATING_PRODUCTS = frozenset({aten.addmm_.default, aten.addmm.dtype_out})

ATTENTION_FORWARDS = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._flash_attention_forward.default,
    aten._scaled_dot_product_efficient_attention.default,
)
ATTENTION_BACKWARDS = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
ATTENTION_OPERATORS = frozenset(ATTENTION_FORWARDS + ATTENTION_BACKWARDS)
CAUSAL_INDEX = {  # index of is_causal among the arguments
    ATTENTION_FORWARDS[0]: 4, ATTENTION_FORWARDS[1]: 4, ATTENTION_FORWARDS[2]: 8,
    ATTENTION_FORWARDS[3]: 6,
    ATTENTION_BACKWARDS[0]: 11, ATTENTION_BACKWARDS[1]: 7, ATTENTION_BACKWARDS[2]: 11,
    ATTENTION_BACKWARDS[3]: 11,
}  # fmt: skip
BIAS_INDEX = {ATTENTION_FORWARDS[3]: 3, ATTENTION_BACKWARDS[3]: 4}  # index of the scores' bias


def _attention_shapes(func: Any, args: Any) -> tuple[int, int, int, int, int, int, int]:
    """Return the sizes of an attention operation's call, from which its FLOPs and its workspace are
    computed: rows, H, H_kv, queries, keys, D, D_v.

    Args:
        func: the operation, an overload of `torch.ops.aten`.
        args: positional arguments of the operation.
    """
    q, k, v = args[1:4] if func in ATTENTION_BACKWARDS else args[:3]
    if func in (
        ATTENTION_FORWARDS[2],
        ATTENTION_BACKWARDS[2],
    ):  # token major, [B, T, H, D] or [T, H, D]
        rows = q.shape[0] if q.dim() == 4 else 1
        return rows, q.shape[-2], k.shape[-2], q.shape[-3], k.shape[-3], q.shape[-1], v.shape[-1]
    return q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def pairs(queries: int, keys: int, causal: bool, window: int | None) -> int:
    """Return the number of query-key pairs that attention computes. The FLOPs of attention are
    proportional to this number.

    Args:
        queries: number of queries.
        keys: number of keys.
        causal: True if the queries are the last positions of the keys, and each query reads the
            keys up to its own position. False: each query reads all keys of its window.
        window: maximal number of keys that a query reads up to its own position, and, unless
            `causal`, also from its own position on; None: no limit.
    """
    number = queries * keys
    if not causal and window is not None and window < keys:
        # the first and the last queries have fewer keys on one side
        number = min(number, queries * (2 * window - 1) - window * (window - 1))
    if causal:
        if queries == keys:
            number = number // 2
        else:
            number = number - queries * queries // 2
    if causal and window is not None and window < keys:
        full = max(0, min(queries, keys - window))  # queries with more keys than the window
        windowed = queries - full
        number = full * window + windowed * (keys - queries) + windowed * (windowed + 1) // 2
    return number


def attention_flops(func: Any, args: Any, kwargs: Any) -> int:
    """Return the FLOPs of an attention operation: two matrix products in forward, and five in
    backward, which recomputes the scores.

    Args:
        func: the operation, an overload of `torch.ops.aten`.
        args: positional arguments of the operation.
        kwargs: keyword arguments of the operation, such as the window's size.
    """
    rows, heads, _, queries, keys, size, value_size = _attention_shapes(func, args)
    causal = len(args) > CAUSAL_INDEX[func] and args[CAUSAL_INDEX[func]] is True
    left_size = kwargs.get("window_size_left")
    if func in ATTENTION_BACKWARDS:
        products = 3 * size + 2 * value_size
    else:
        products = size + value_size
    return (
        2
        * rows
        * heads
        * pairs(
            queries, keys, causal, None if left_size is None or left_size < 0 else left_size + 1
        )
        * products
    )


def workspace(func: Any, args: Any, kernels: str) -> int:
    """Return the bytes that an attention backward allocates and frees within one call, such as dQ
    in float32. torch's dispatch modes do not see these allocations.

    Args:
        func: the operation of attention backward, an overload of `torch.ops.aten`.
        args: positional arguments of the operation.
        kernels: "flash" or "cudnn", the kernels that run on the GPU.
    """
    if func is ATTENTION_BACKWARDS[1]:
        return 0
    rows, heads, kv_heads, queries, keys, size, value_size = _attention_shapes(func, args)
    total = 4 * rows * heads * queries * (size + 1)
    if func is ATTENTION_BACKWARDS[3]:
        return total + 4 * rows * heads * keys * (size + value_size)
    if kernels == "flash" and heads != kv_heads:
        total += args[1].element_size() * rows * heads * keys * (size + value_size)
    return total


EMPTY_CREATORS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
FILLING_OPERATORS = frozenset(
    {"zero_", "fill_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
)
COPY_OPERATORS = frozenset({"copy_"})
GATHERING_OPERATORS = frozenset({"index", "index_select", "gather", "embedding"})
SCATTER_SOURCE_INDEX = {  # index of the source that is written to selected elements
    "index_put_": 2, "index_put": 2, "index_add_": 3, "index_add": 3, "index_copy_": 3,
    "scatter_": 3, "scatter": 3, "scatter_add_": 3, "scatter_add": 3, "embedding_dense_backward": 0,
}  # fmt: skip


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor that an operation reads or writes. Elements that share memory
    count once: dimensions with stride 0 (broadcast) count as size 1."""
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or n == 0)
    return math.prod(sizes) * tensor.element_size()


def traffic_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that one torch operation reads and writes, for a prediction of its seconds.
    Attention and matrix products count 0 bytes, because their FLOPs determine their seconds.
    Products that are added to a tensor in place (`addmm_`) count this tensor's bytes twice, read
    and written. Attention with a bias of all pairs of positions counts the bytes of the bias, and
    in backward those of its gradient.

    Args:
        func: the operation, an overload of `torch.ops.aten` that returns no view.
        args: positional arguments of the operation.
        kwargs: keyword arguments of the operation.
        result: the operation's result.
    """
    name = func._overloadpacket.__name__
    output_bytes = sum(map(_size, tensors(result)))
    if func in ACCUMULATING_PRODUCTS:
        return 2 * output_bytes
    if func in BIAS_INDEX:
        bias = args[BIAS_INDEX[func]]
        if not isinstance(bias, Tensor):
            return 0
        size = _size(bias)
        if func in ATTENTION_BACKWARDS:
            size += sum(map(_size, tensors(result)[3:]))  # the bias's gradient
        return size
    if func in FACTOR_INDEX or func in ATTENTION_OPERATORS or name in EMPTY_CREATORS:
        return 0
    if name in FILLING_OPERATORS:
        return output_bytes
    if name in COPY_OPERATORS:
        return _size(args[1]) + output_bytes
    if name in GATHERING_OPERATORS:
        return 2 * output_bytes
    if name in SCATTER_SOURCE_INDEX:
        if len(args) > SCATTER_SOURCE_INDEX[name]:
            source = args[SCATTER_SOURCE_INDEX[name]]
        else:
            source = None
        if isinstance(source, Tensor):
            selected = 2 * _size(source)
        else:
            selected = output_bytes
        if name.endswith("_"):
            return selected
        return selected + output_bytes
    read = [x for name, x in kwargs.items() if name != "out"]
    return output_bytes + sum(map(_size, tensors((args, read))))


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """Return the cost of one torch operation: its FLOPs, one dispatch, and the bytes read and
    written.

    Args:
        func: the operation, an overload of `torch.ops.aten`.
        args: positional arguments of the operation.
        kwargs: keyword arguments of the operation.
        result: the operation's result.
    """
    if func in FACTOR_INDEX:
        a, b = args[FACTOR_INDEX[func] :][:2]
        # In a grouped product, every row of a meets one matrix of b, or every column one group.
        terms = math.prod(a.shape[-2:] if func is GROUPED_PRODUCT else a.shape)
        size = traffic_of(func, args, kwargs, result)
        if (
            a.dim() == 2
            and func is not GROUPED_PRODUCT
            and min(*a.shape, b.shape[-1]) <= MAX_SKINNY_SIZE
        ):
            if func in ACCUMULATING_PRODUCTS:
                output_bytes = 0
            else:
                output_bytes = _size(tensors(result)[0])
            size += _size(a) + _size(b) + output_bytes
        return Work(2 * terms * b.shape[-1], traffic=size, dispatches=1)
    if func in ATTENTION_OPERATORS:
        flops = attention_flops(func, args, kwargs)
        size = traffic_of(func, args, kwargs, result)
        if func in ATTENTION_BACKWARDS:
            return Work(backward=flops, traffic=size, dispatches=1)
        return Work(forward=flops, traffic=size, dispatches=1)
    return Work(traffic=traffic_of(func, args, kwargs, result), dispatches=1)
