"""What a step says of itself beside its seconds: whether its gradients are numbers, which kernels ran, what memory it took.

[Note: measurement] Forward and backward, gradients None at the start. The first step pins memory and makes kernels, and
what "auto" has learnt from it changes the second; so the third is the one that counts, and the first is told beside it.
The second is watched: which kernels ran, how long, and how many gradient buffers the layers allocated. On a GPU the peak is
the allocator's; on a CPU it is counted: the bytes of all storages made since the step began and still alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import streambp
from streambp.attention import attend
from streambp.device import allocator_bytes, allocator_count, is_accelerator
from streambp.head import blocks
from streambp.layer import function
from streambp.planner.count import LiveBytes

GIB = 2**30
LONGEST_TIMELINE = 65536  # tokens of a whole model; beyond them a step has millions of launches
COPIES = ("Memcpy", "Memset")
FUSED = {
    "cudnn": "cudnn",
    "flash_attention_for_cpu": "cpu flash",
    "flash": "flash",
    "efficient": "memory-efficient",
}
SHOWN = 3  # of a list of parameters
BUFFERS = "gradient buffers"
# Functions that are called where something of ours happens, and what that is.
OURS = (
    (function, "tag_reusable", BUFFERS),
    (blocks, "fold_rows", "head statistics"),
    (blocks, "write_gradient", "head gradient"),
    (attend, "merge_in_triton", "merge"),
    (attend, "merge_in_torch", "merge in torch"),
)
LIGERS = {"LigerRMSNormFunction": "Liger's norm", "LigerSiLUMulFunction": "Liger's SwiGLU"}
HEAD, NOT_FUSED = ("head statistics", "head gradient"), "merge in torch"


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of three steps; [Note: measurement]. None: not known on this device.

    first, seconds: of the first step and the third. peak_gib, reserved_gib: the allocator's, of the third.
    retries: how often the allocator gave memory back to the device and asked again, in the third.
    kernel_share: the second step's time in which a kernel ran, over the third's seconds; far below 1 the host is late.
    buffers: gradient buffers that streamed layers allocated; one a step where each writes over the one it was given.
    loss, norm: of the third step, and of all gradients together.
    ran: torch's fused attention kernels that ran, and of `OURS` what was called. on_device: names of all kernels of a GPU.
    problems: what must not be.
    """

    first: float
    seconds: float
    peak_gib: float | None
    reserved_gib: float | None
    retries: int | None
    kernel_share: float | None
    buffers: int
    loss: float
    norm: float
    ran: tuple[str, ...]
    on_device: frozenset[str]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.seconds:.3f} s (first {self.first:.3f})"]
        if self.peak_gib is not None:
            parts.append(
                f"peak {self.peak_gib:.2f} GiB" + of(self.reserved_gib, " of {:.2f} reserved")
            )
        parts.append(of(self.retries, "{} retries"))
        parts.append(of(self.kernel_share, "kernels {:.0%} of the time"))
        parts += [f"loss {self.loss:.4f}", f"|gradient| {self.norm:.4e}"]
        return ", ".join(part for part in parts if part)


def of(value: float | None, text: str) -> str:
    """Nothing where the value is not known."""
    return "" if value is None else text.format(value)


def run_steps(
    model: nn.Module,
    forward: Callable[[], Tensor],
    update: Callable[[], None] | None = None,
    timeline: bool = True,
    steps: int = 3,
) -> Figures:
    """Three steps, or two where each takes long: then the first is watched. [Note: measurement]

    Args:
        forward: gives the loss, a scalar with a graph.
        update: what an optimizer does with the gradients; None: they are dropped before the next step.
        timeline: also take the times of kernels on a GPU; a step of millions of launches takes minutes to read.
    """
    device = next(model.parameters()).device
    on_gpu = is_accelerator(device)
    seconds: list[float] = []
    attention, calls, retries = AttentionSeen(), {BUFFERS: 0}, None
    spans: list[tuple[str, float, float]] = []
    for number in range(steps):
        if update is None:
            model.zero_grad(set_to_none=True)
        # Entered within, so that an error of one does not leave another on for later rows.
        with contextlib.ExitStack() as watched:
            if number == steps - 2:
                watched.enter_context(attention)
                watched.enter_context(counted_calls(calls))
                if device.type == "cuda" and timeline:
                    watched.enter_context(kernel_times(spans))
            if on_gpu:
                torch.accelerator.synchronize(device)
                torch.accelerator.reset_peak_memory_stats(device)
                retries = allocator_count(device, "num_alloc_retries")
            start = time.perf_counter()
            loss = forward()
            loss.backward()
            if on_gpu and number == steps - 2:
                torch.accelerator.synchronize(device)
        if update is not None:
            update()
        if on_gpu:
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
        loss = loss.detach()
    share = busy(spans) / seconds[-1] if spans else None
    peaks: tuple[float | None, float | None] = (None, None)
    if on_gpu:
        retries = allocator_count(device, "num_alloc_retries") - (retries or 0)
        peaks = (
            allocator_bytes(device, "peak") / GIB,
            torch.accelerator.max_memory_reserved(device) / GIB,
        )
    norm, problems = judged_gradients(model) if update is None else judged_weights(model)
    problems += [] if math.isfinite(float(loss)) else [f"the loss is {float(loss)}"]
    names = frozenset(name for name, _, _ in spans)
    buffers = calls.pop(BUFFERS)
    ran = tuple(sorted(attention.names | {name for name, number in calls.items() if number}))
    return Figures(
        seconds[0], seconds[-1], *peaks, retries, share, buffers, float(loss), norm, ran, names, tuple(problems)
    )  # fmt: skip


def counted_peak(model: nn.Module, forward: Callable[[], Tensor]) -> float:
    """GiB of one more step on a CPU; counting slows a step down, so it has one of its own."""
    model.zero_grad(set_to_none=True)
    with LiveBytes() as count:
        forward().backward()
    return count.peak / GIB


def judged_gradients(model: nn.Module) -> tuple[float, list[str]]:
    """The norm of all gradients, and what is wrong: a trained parameter has none, one is no number, or all are zero."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names_without_grad = [name for name, p in trained if p.grad is None]
    norms = {name: float(norm_of(p.grad)) for name, p in trained if p.grad is not None}
    problems = [f"no gradient of {listed(names_without_grad)}"] if names_without_grad else []
    return total_of(norms, "gradient", problems)


def judged_weights(model: nn.Module) -> tuple[float, list[str]]:
    """The same of the trained weights: an optimizer that was given NaN leaves NaN."""
    return total_of(
        {name: float(norm_of(p)) for name, p in model.named_parameters() if p.requires_grad},
        "weight",
        [],
    )


def total_of(norms: dict[str, float], label: str, problems: list[str]) -> tuple[float, list[str]]:
    wild = [name for name, norm in norms.items() if not math.isfinite(norm)]
    total = math.sqrt(sum(norm**2 for norm in norms.values())) if not wild else math.nan
    if wild:
        problems.append(f"{label} not finite: {listed(wild)}")
    elif total == 0.0:
        problems.append(f"every {label} is zero")
    return total, problems


def norm_of(x: Tensor) -> Tensor:
    """In float32 or wider: a sum of half-precision squares overflows."""
    return torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float32))


def listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )


def wrong_paths(model: nn.Module) -> list[str]:
    """Layers of a patched model that did not stream."""
    layers = streambp.describe(model).layers
    return [
        f"{layer.name} {layer.path}: {layer.reason}" for layer in layers if layer.path != "streams"
    ]


class AttentionSeen(TorchDispatchMode):
    """Names of the fused attention kernels that ran, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if "attention" in name and func.namespace == "aten":
            kind = next((short for part, short in FUSED.items() if part in name), name)
            self.names.add(kind + (" backward" if name.endswith("backward") else ""))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted_calls(calls: dict[str, int]) -> Iterator[None]:
    """Count into `calls` how often each of `OURS` is called, and each of `LIGERS` where Liger was imported."""

    def counted(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        return call

    ops = sys.modules.get("liger_kernel.ops")
    targets: list[tuple[Any, str, str]] = [*OURS]
    targets += [
        (getattr(ops, kind), "forward", name) for kind, name in LIGERS.items() if hasattr(ops, kind)
    ]
    calls.update(dict.fromkeys((name for _, _, name in targets), 0))
    real = [vars(owner)[attribute] for owner, attribute, _ in targets]
    try:
        for owner, attribute, name in targets:
            function = counted(getattr(owner, attribute), name)
            setattr(
                owner, attribute, staticmethod(function) if isinstance(owner, type) else function
            )
        yield
    finally:
        for original, (owner, attribute, _) in zip(real, targets, strict=True):
            setattr(owner, attribute, original)


@contextlib.contextmanager
def kernel_times(spans: list[tuple[str, float, float]]) -> Iterator[None]:
    """Name, start and end in seconds of everything that ran on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            start = event.start_ns() * 1e-9
            spans.append((event.name(), start, start + event.duration_ns() * 1e-9))


def busy(spans: Iterable[tuple[str, float, float]]) -> float:
    """Seconds in which at least one kernel ran, copies and fills left out."""
    total, until = 0.0, -math.inf
    for start, end in sorted(
        (start, end) for name, start, end in spans if not name.startswith(COPIES)
    ):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def commit() -> str:
    """Of this code; "unknown" in a copy without git."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        process = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return process.stdout.strip() or "unknown"


def versions() -> str:
    """Of everything that takes part, "torch 2.13.0; ...; cuDNN 91900"."""
    texts = []
    for name in (
        "torch",
        "transformers",
        "triton",
        "trl",
        "peft",
        "liger-kernel",
        "deepspeed",
        "fla-core",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            texts.append(f"{name} {importlib.metadata.version(name)}")
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return "; ".join([*texts, f"cuDNN {cudnn}"] if cudnn else texts)
