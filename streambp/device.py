"""Query devices: the memory that this process may use, the errors that come from a device, and the
states of random generators.
"""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")


@functools.lru_cache
def is_accelerator(device: torch.device) -> bool:
    """True if a device runs asynchronously, in streams that `torch.accelerator` supports.

    CUDA, ROCm and Intel devices have such streams. False for a CPU and for Apple's devices. The
    latter have a single stream, in which copies and kernels run one after the other.
    """
    if device.type == "cpu":
        accelerator = None
    else:
        accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type:
        return False
    try:
        return torch.Stream(device) != torch.Stream(device)
    except RuntimeError:
        return False


@functools.lru_cache
def reports_memory(device: torch.device) -> bool:
    """True if the device can report at any time how much of its memory is free, and how much this
    process has reserved."""
    if device.type == "cuda":
        return True
    try:
        return is_accelerator(device) and memory_limit(device) > 0
    except (AttributeError, RuntimeError):  # an older torch, or an allocator without statistics
        return False


def memory_limit(device: torch.device) -> int:
    """Return the bytes that this process may reserve on an accelerator, including the bytes
    reserved already.

    The limit is the smaller of two: the grant of `torch.cuda.set_per_process_memory_fraction`, and
    the memory that other processes (an inference server, for example) leave free.
    """
    if device.type != "cuda":
        free, total = torch.accelerator.get_memory_info(device)
        return min(total, free + allocator_bytes(device, "reserved"))
    if device.index is None:  # the fraction needs a device number
        device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    granted = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(int(granted), free + allocator_bytes(device, "reserved"))


def allocator_bytes(device: torch.device, kind: Literal["allocated", "reserved", "peak"]) -> int:
    """Return a number of bytes from torch's allocator on an accelerator: allocated, reserved, or
    the peak of allocated.

    The function is fast enough to be called several times in each layer.
    `torch.cuda.memory_allocated` takes half a millisecond, because it builds a sorted list of all
    statistics.
    """
    name: str = kind
    when = "current"
    if kind == "peak":
        name = "allocated"
        when = "peak"
    if device.type != "cuda":
        return int(torch.accelerator.memory_stats(device).get(f"{name}_bytes.all.{when}", 0))
    counts = torch.cuda.memory_stats_as_nested_dict(device)
    return int(counts[f"{name}_bytes"]["all"][when]) if counts else 0  # {} before CUDA's first use


def names_other_device(x: Tensor, arguments: Iterable[Any]) -> bool:
    """True if the arguments of a call x.to(...) name another device than the device of x [...].

    A number means the accelerator of this number. A device type without a number means the current
    device, as in `x.to`.

    Args:
        x: the tensor.
        arguments: all arguments of the call.
    """
    devices = []
    for w in arguments:
        if isinstance(w, str | torch.device) or type(w) is int:
            devices.append(torch.device(w))
    devices += [w.device for w in arguments if isinstance(w, Tensor)]
    for device in devices:
        if device.type != x.device.type:
            return True
        unsaid = device.index is None and is_accelerator(device)
        if (torch.accelerator.current_device_index() if unsaid else device.index) not in (
            None,
            x.device.index,
        ):
            return True
    return False


def allocator_count(device: torch.device, name: Literal["num_alloc_retries", "num_ooms"]) -> int:
    """Return how many times torch's allocator emptied its cache for lack of memory
    ("num_alloc_retries"), or raised OutOfMemoryError ("num_ooms"). 0 for devices that do not count
    this.

    Each emptied cache costs a synchronization with the device.
    """
    if not reports_memory(device):
        return 0
    if device.type != "cuda":
        return int(torch.accelerator.memory_stats(device).get(name, 0))
    return int(torch.cuda.memory_stats_as_nested_dict(device).get(name, 0))


def forget_error(device: torch.device) -> None:
    """Clear the error that a failed call left in CUDA's runtime.

    The runtime stores an error until it is queried. torch queries after every kernel launch, so the
    next launch would raise although it is unrelated. This function launches a small kernel and
    ignores its error. An error of the device itself is not cleared, and the next launch raises as
    well.
    """
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1.0)


DEVICE_LIBRARY_PATTERN = re.compile(
    r"\b(CUDA|cuDNN|CUDNN\w*|cuBLAS\w*|CUBLAS\w*|HIP|MIOpen|hipBLAS\w*|FlashAttention|Triton)\b"
)
OUT_OF_MEMORY_PATTERN = re.compile(
    r"out[ _]of[ _]memory|ALLOC_FAILED|bad_alloc|can't allocate memory", re.IGNORECASE
)
MEMORY_OWNER_PATTERN = re.compile(
    r"CUDA|cuDNN|cuBLAS|cuSPARSE|cuSOLVER|HIP|MIOpen|rocBLAS|Triton|RMM|bad_alloc|Allocator",
    re.IGNORECASE,
)
MEMORY_ERRORS = (RuntimeError, MemoryError)  # classes that `is_out_of_memory` accepts
KERNEL_MODULES = (
    "streambp.attention.kernels",
    "triton.",
)  # modules that contain little but kernel calls


def is_out_of_memory(error: BaseException) -> bool:
    """True if this error means that a device has no memory left.

    torch's own allocator has a class for such errors. Other sources report in the message: cuBLAS
    and cuDNN (handles, workspaces), the driver (kernels loaded at their first call, events), Triton
    and pluggable allocators. NCCL's errors do not count: a collective that failed on one rank
    cannot be repeated.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, MEMORY_ERRORS):
        message = str(error)
    else:
        message = ""
    return (
        bool(OUT_OF_MEMORY_PATTERN.search(message) and MEMORY_OWNER_PATTERN.search(message))
        and "nccl" not in message.lower()
    )


def make_room(device: torch.device, allocators: bool) -> None:
    """Free memory after a computation has run out of device memory, before the computation is
    repeated. Out-of-memory errors inside of this function are ignored.

    Two things are freed. A backward that fails inside another backward leaves tasks in autograd's
    queue. Such a task keeps the failed backward's graph alive until another inner backward runs, so
    this function runs a small backward. The cache of torch's allocator is emptied too, because the
    library that failed may need the memory.

    Args:
        device: the device without memory.
        allocators: True if torch's own allocator raised the error and so has emptied its cache
            already; False: empty the cache here.
    """
    with contextlib.suppress(*MEMORY_ERRORS):
        if torch._C._current_graph_task_id() != -1:
            with torch.enable_grad():
                z = torch.zeros((), device=device, requires_grad=True)
                torch.autograd.grad(z * 1, z)
        if is_accelerator(device) and not allocators:
            forget_error(device)
            torch.accelerator.empty_cache()


def is_kernel_error(error: BaseException, device: torch.device) -> bool:
    """True if an error comes from a device, its libraries or a kernel, and not from wrong
    arguments. Callers then try another kernel.

    torch names the library in its messages. The text of a kernel's own checks is unknown, so on
    accelerators every error counts that was raised in code that calls kernels. The kernels of a CPU
    accept all valid shapes, so this does not apply to a CPU.
    """
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True
    if isinstance(error, RuntimeError) and DEVICE_LIBRARY_PATTERN.search(str(error)):
        return True
    return device.type != "cpu" and passes_kernel_module(error)


def passes_kernel_module(error: BaseException) -> bool:
    """True if the error's traceback passes through code that calls kernels: streambp's module of
    attention kernels, or Triton's modules (`KERNEL_MODULES`). `is_kernel_error` treats such an
    error as an error of the kernel, except on a CPU."""
    modules = (
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return any(module.startswith(KERNEL_MODULES) for module in modules)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return autocast's dtype for a device type such as "cuda"; None if autocast is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    on = knows_autocast(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


# the dtype with the same number of digits
DTYPE_OF_PRECISION = {"tf32": torch.float16, "bf16": torch.bfloat16}


def matmul_dtype(device: str) -> torch.dtype | None:
    """Return a dtype with the precision in which matrix products of float32 tensors may be computed
    on a device type such as "cuda": float16 for TF32, bfloat16 for bf16. None: full float32.

    The program sets this precision (`torch.set_float32_matmul_precision`, `allow_tf32`).
    """
    backend = torch.backends.mkldnn if device == "cpu" else torch.backends.cuda
    return DTYPE_OF_PRECISION.get(backend.matmul.fp32_precision)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that disables autocast for a device type such as "cuda". The context
    manager does nothing if autocast is off."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


# called for each attention of each chunk
knows_autocast = functools.lru_cache(torch.amp.is_autocast_available)


def has_data(x: Tensor) -> bool:
    """True if x, of any shape [...], has values. Tensors on meta and fake tensors have none."""
    return not x.is_meta and not isinstance(x, FakeTensor)


DEVICES_WITHOUT_GENERATOR = ("cpu", "meta")  # devices whose random state is the CPU's


class RandomState(NamedTuple):
    """State of torch's random generators, of the CPU and of one device, to draw the same numbers
    again.

    Attributes:
        cpu: state of the CPU's default generator.
        device: the device.
        accelerator: state of the device's generator; None if the device is a CPU or meta.
    """

    cpu: torch.Tensor
    device: torch.device
    accelerator: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Return the generators' current states. `accelerator` is None if the device is a CPU or
        meta."""
        if device.type in DEVICES_WITHOUT_GENERATOR:
            return cls(torch.default_generator.get_state(), device, None)
        return cls(
            torch.default_generator.get_state(),
            device,
            torch.get_device_module(device).get_rng_state(device),
        )

    def is_current(self) -> bool:
        """True if no random number was drawn since the states were captured."""
        state = RandomState.capture(self.device)
        cpu_is_equal = torch.equal(self.cpu, state.cpu)
        return cpu_is_equal and (
            self.accelerator is None or torch.equal(self.accelerator, state.accelerator)  # type: ignore[arg-type]
        )

    def restore(self) -> None:
        """Set torch's generators to the captured states."""
        torch.default_generator.set_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Context manager in which torch's generators start from the captured states, so that they
        draw the same numbers again. Afterwards the generators have the states from before."""
        outer = RandomState.capture(self.device)
        self.restore()
        try:
            yield
        finally:
            outer.restore()


def run_and_watch_draws(run: Callable[[], T], device: torch.device) -> tuple[T, bool]:
    """Return the result of `run()`, and True if `run` drew random numbers from torch's generators.

    Args:
        run: a forward.
        device: device of the forward.
    """
    random = RandomState.capture(device)
    result = run()
    return result, not random.is_current()
