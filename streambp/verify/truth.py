"""The reference of `verify`, called the truth: the unpatched model in a wider dtype on the host."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from streambp.errors import UnsupportedModelError
from streambp.known_names import EAGER, EXPERTS_IMPLEMENTATION
from streambp.layer.packed_experts import mxfp4_parameters
from streambp.tensors import inner_bytes, replace_attribute


def least_precise_dtype(model: nn.Module) -> torch.dtype:
    """Return the least precise dtype of a model's parameters; float32 if it has none. The bytes of
    weights in MXFP4 do not count, because they stand for the same numbers in every dtype.

    Raises:
        UnsupportedModelError: the truth cannot be computed for a parameter of such a dtype.
    """
    packed_ids = set(map(id, mxfp4_parameters(model)))
    dtypes = []
    for name, parameter in model.named_parameters():
        if id(parameter) in packed_ids:
            continue
        if not parameter.is_floating_point() or parameter.itemsize < 2:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UnsupportedModelError(
                f"{name} is {dtype}; a truth can be computed for float16, bfloat16, float32 and "
                "float64 parameters only. Verify the checkpoint without quantisation."
            )
        dtypes.append(parameter.dtype)
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def copy_to_host(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the model on the host, with parameters and buffers in `dtype`. Tensors of a
    wider dtype and tensors of integers keep their dtype. Quantized weights of tensor subclasses,
    such as torchao's, are decoded.

    Tensors are copied straight to the host (by `copy.deepcopy`'s memo), so the device never holds a
    second model.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        value = parameter.detach()
        if inner_bytes(value) is not None:
            value = value.dequantize()
        host = value.to("cpu", wide_dtype(parameter, dtype), copy=True)
        memo[id(parameter)] = nn.Parameter(host, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", wide_dtype(buffer, dtype), copy=True)
    return copy.deepcopy(model, memo)


def wide_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor's copy in the truth, whose dtype is `dtype`: the wider of both
    dtypes. Integers keep their dtype. The tensor [...] may have any shape."""
    if tensor.is_floating_point():
        return torch.promote_types(tensor.dtype, dtype)
    return tensor.dtype


@contextlib.contextmanager
def lift_casts() -> Iterator[None]:
    """Context manager in which casts to float32 give float64: `torch.float32` as an argument of a
    torch function, and `Tensor.float()`. The reference (the truth) of a float32 model is a float64
    model that runs inside, because transformers' code casts to float32 in norms and softmax.

    The default dtype is float64 inside, because `torch.full((), torch.finfo(scores.dtype).min)` for
    float64 scores would otherwise overflow float32. A patched model cannot use this: it recomputes
    layers in backward, where torch disables function modes.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _CastsLifted():
            yield
    finally:
        torch.set_default_dtype(default)


class _CastsLifted(TorchFunctionMode):
    """Function mode that replaces `torch.float32` by `torch.float64` in the arguments of every
    torch function, and `Tensor.float()` by `Tensor.double()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        kwargs = kwargs or {}
        wide_args = map(_widen, args)
        wide_values = map(_widen, kwargs.values())
        return func(*wide_args, **dict(zip(kwargs, wide_values, strict=True)))


def _widen(value: Any) -> Any:
    """Return torch.float64 for torch.float32, and any other value unchanged. `_CastsLifted` applies
    this function to each argument of a torch function."""
    if value is torch.float32:
        return torch.float64
    return value


@contextlib.contextmanager
def float64_experts(model: nn.Module) -> Iterator[None]:
    """Context manager in which a float64 model computes its experts (MoE) one after the other. The
    alternative, torch's grouped matrix products, does not support float64."""
    configs = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs[id(config)] = config
    with replace_attribute(configs.values(), EXPERTS_IMPLEMENTATION, itertools.repeat(EAGER)):
        yield


def available_memory() -> int | None:
    """Return the bytes of host memory that a process can still allocate; None if unknown. `verify`
    checks that the truth fits, a copy of the unpatched model in a wider dtype."""
    try:
        limits = [
            int(re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0])
            * 1024
        ]
    except (OSError, IndexError):
        return None
    group = Path("/sys/fs/cgroup")
    for limit, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        # "max", or the other cgroup version: no limit here
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((group / limit).read_text()) - int((group / usage_file).read_text()))
    return min(limits)
