"""Devices as this process finds them: how much memory it may have there, and which errors are theirs."""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from streambp.errors import StreamBPError


class DeviceMemoryError(StreamBPError, torch.OutOfMemoryError):
    """The device ran out of memory in a streamed step. Still a torch.OutOfMemoryError, for those who wait for one."""


@functools.lru_cache
def is_accelerator(device: torch.device) -> bool:
    """Whether a device works beside the host, in streams that torch's general interface makes (`torch.accelerator`).

    CUDA's, ROCm's and Intel's do. Apple's has a single stream: copies and kernels come one after the other there.
    """
    found = None if device.type == "cpu" else torch.accelerator.current_accelerator()
    if found is None or device.type != found.type:
        return False
    try:
        return torch.Stream(device) != torch.Stream(device)
    except RuntimeError:
        return False


@functools.lru_cache
def tells_memory(device: torch.device) -> bool:
    """Whether it is known at any time what a device has free, and what of it this process has."""
    if device.type == "cuda":
        return True
    try:
        return is_accelerator(device) and memory_limit(device) > 0
    except (AttributeError, RuntimeError):  # an older torch, or a device whose allocator does not tell
        return False


def memory_limit(device: torch.device) -> int:
    """Bytes that this process may have reserved on an accelerator, those that it has among them.

    The smaller of what `torch.cuda.set_per_process_memory_fraction` grants it and what other processes (an inference
    server beside a trainer, say) leave over now.
    """
    if device.type != "cuda":
        free, total = torch.accelerator.get_memory_info(device)
        return min(total, free + counted_bytes(device, "reserved"))
    if device.index is None:  # the fraction is asked for by number alone
        device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    granted = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(int(granted), free + counted_bytes(device, "reserved"))


def counted_bytes(device: torch.device, kind: Literal["allocated", "reserved", "peak"]) -> int:
    """Bytes that torch's allocator has given out on an accelerator, holds there, or has given out at most.

    `torch.cuda.memory_allocated` makes a sorted list of all that the allocator counts, half a millisecond in Python, and is
    asked for several times in each layer of each pass.
    """
    name, when = ("allocated", "peak") if kind == "peak" else (kind, "current")
    if device.type != "cuda":
        return int(torch.accelerator.memory_stats(device).get(f"{name}_bytes.all.{when}", 0))
    counts = torch.cuda.memory_stats_as_nested_dict(device)
    return int(counts[f"{name}_bytes"]["all"][when]) if counts else 0  # {} where CUDA was not used yet


def is_elsewhere(x: Tensor, wanted: Iterable[Any]) -> bool:
    """Whether arguments of `x.to` name another device than that of x [...]. As there, a number is one of the accelerator's,
    and a kind of device without a number stands for the current one."""
    devices = [torch.device(w) for w in wanted if isinstance(w, str | torch.device) or type(w) is int]
    devices += [w.device for w in wanted if isinstance(w, Tensor)]
    for device in devices:
        if device.type != x.device.type:
            return True
        unsaid = device.index is None and is_accelerator(device)
        if (torch.accelerator.current_device_index() if unsaid else device.index) not in (None, x.device.index):
            return True
    return False


def allocator_count(device: torch.device, name: Literal["num_alloc_retries", "num_ooms"]) -> int:
    """How often torch's allocator has given its cache back to a device's driver, and waited, for want of memory; or how
    often it has raised an OutOfMemoryError."""
    if not tells_memory(device):
        return 0
    if device.type != "cuda":
        return int(torch.accelerator.memory_stats(device).get(name, 0))
    return int(torch.cuda.memory_stats_as_nested_dict(device).get(name, 0))


def forget_error(device: torch.device) -> None:
    """Clear the error that a failed call to CUDA's runtime left behind.

    The runtime keeps it until it is asked for, and torch asks after every launch of a kernel: the next one, which has
    nothing to do with it, would raise. So a launch that nobody needs comes first. An error of the device itself stays: the
    launch after it raises as well.
    """
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1.0)


LIBRARIES = re.compile(r"\b(CUDA|cuDNN|CUDNN\w*|cuBLAS\w*|CUBLAS\w*|HIP|MIOpen|hipBLAS\w*|FlashAttention|Triton)\b")
FULL = re.compile(r"out[ _]of[ _]memory|ALLOC_FAILED|bad_alloc|can't allocate memory", re.IGNORECASE)
WHOSE = re.compile(r"CUDA|cuDNN|cuBLAS|cuSPARSE|cuSOLVER|HIP|MIOpen|rocBLAS|Triton|RMM|bad_alloc|Allocator", re.IGNORECASE)
MEMORY_ERRORS = (RuntimeError, MemoryError)  # one of these is what `is_out_of_memory` looks for
KERNELS = ("streambp.attention.kernels", "triton.")  # modules that hold little but calls of kernels


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device has no memory left for what raised this error.

    torch's own allocator has a class for that. cuBLAS and cuDNN (handles, workspaces), the driver (kernels that are loaded
    when they are first called, events), Triton and pluggable allocators say so in their messages. Not NCCL: a collective
    that failed on one rank cannot be repeated.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    told = str(error) if isinstance(error, MEMORY_ERRORS) else ""
    return bool(FULL.search(told) and WHOSE.search(told)) and "nccl" not in told.lower()


def make_room(device: torch.device, allocators: bool) -> None:
    """Before what ran out of memory is tried again: free what the failed attempt left behind.

    A backward that failed inside another has left tasks, and with them its graph, in autograd's queue for the device; the
    next backward inside drops them. What torch's allocator holds in its cache is what others lack.

    Args:
        allocators: torch's own allocator raised, which has emptied its cache already.
    """
    with contextlib.suppress(*MEMORY_ERRORS):
        if torch._C._current_graph_task_id() != -1:
            with torch.enable_grad():
                z = torch.zeros((), device=device, requires_grad=True)
                torch.autograd.grad(z * 1, z)
        if is_accelerator(device) and not allocators:
            forget_error(device)
            torch.accelerator.empty_cache()


def failed_in_a_kernel(error: BaseException, device: torch.device) -> bool:
    """Whether an error is a device's, its libraries' or a kernel's own, not one of the tensors that it was handed.

    torch names the library in its messages. What a kernel's own checks say may be anything, so an error that was raised
    where kernels are called counts as well; not on a CPU, whose kernels take all shapes that fit together.
    """
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True
    if isinstance(error, RuntimeError) and LIBRARIES.search(str(error)):
        return True
    return device.type != "cpu" and raised_among_kernels(error)


def raised_among_kernels(error: BaseException) -> bool:
    """Whether it came through a module of `KERNELS`."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module.startswith(KERNELS) for module in modules)


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast casts to on this kind of device; None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    on = knows_autocast(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


ROUNDED_TO = {"tf32": torch.float16, "bf16": torch.bfloat16}  # the dtype with as many digits


def products_rounded_to(device: str) -> torch.dtype | None:
    """A dtype with as few digits as what the program allows products of float32 to be rounded to on this kind of device
    (`torch.set_float32_matmul_precision`, `allow_tf32`); None: they are computed in float32."""
    backend = torch.backends.mkldnn if device == "cpu" else torch.backends.cuda
    return ROUNDED_TO.get(backend.matmul.fp32_precision)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Within, nothing is cast on this kind of device."""
    return contextlib.nullcontext() if autocast_dtype(device) is None else torch.autocast(device, enabled=False)


knows_autocast = functools.lru_cache(torch.amp.is_autocast_available)  # asked for each attention of each chunk


def has_data(x: Tensor) -> bool:
    """Whether x, of any shape [...], has values: tensors on meta and fake ones, of which steps are counted, have none."""
    return not x.is_meta and not isinstance(x, FakeTensor)
