"""Measure a device's speeds (FLOP/s, bytes/s; `Rates`) from the runtime of typical kernels: about
three seconds and 2 GiB on a GPU.

Kernels run faster alone than inside a step, where they share power and heat. On an H200, products
sustained 0.87 of their rate alone and attention 0.95. A GPU is therefore heated for a second first,
and measured rates are multiplied by these two factors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from streambp.attention.backend import choose_backend
from streambp.attention.kernels import Kernel, Task
from streambp.attention.spans import Block, BlockKind
from streambp.device import is_accelerator
from streambp.planner.count import StepCount
from streambp.planner.work import pairs
from streambp.rates import DISPATCH_SECONDS, Rates

MIN_SAMPLE_SECONDS, MAX_RUNS = (
    0.005,
    50,
)  # minimal seconds of a sample, and maximal number of runs in a sample
SUSTAINED_FRACTIONS = {"products": 0.87, "attention": 0.95}


@dataclasses.dataclass(frozen=True)
class MeasuredSizes:
    """Sizes of the kernels that are run to measure a device.

    Attributes:
        rows: several values of n, the rows of matrix products. Each measurement multiplies [n,
            hidden] by [hidden, inner], and the result by [inner, hidden].
        hidden: columns of the products' input.
        inner: columns of the first product's result.
        length: number of queries of the measured attention, and of its keys.
        heads: query heads of the attention.
        kv_heads: key and value heads of the attention.
        head_size: columns of a head.
        tokens: rows of the RMSNorm's input [tokens, hidden], which measures memory bandwidth.
        copied: bytes of each copy between device and host.
        times: number of timed samples of each kernel, whose median counts.
        heat: seconds of untimed work before the first sample, which heat the GPU.
    """

    rows: tuple[int, ...]
    hidden: int
    inner: int
    length: int
    heads: int
    kv_heads: int
    head_size: int
    tokens: int
    copied: int
    times: int
    heat: float


GPU_SIZES = MeasuredSizes((1024, 8192), 4096, 12288, 16384, 32, 8, 128, 16384, 2**28, 7, 1.0)
CPU_SIZES = MeasuredSizes((256,), 256, 768, 512, 4, 2, 64, 1024, 2**22, 3, 0.0)


def measure_device(kind: str, sizes: MeasuredSizes | None = None) -> Rates:
    """Return measured speeds (FLOP/s, bytes/s) of the current accelerator or this machine's CPU.

    Args:
        kind: device type, such as "cuda" or "cpu".
        sizes: sizes of the measured kernels; None: `GPU_SIZES` or `CPU_SIZES`, sizes that are usual
            in training steps.
    """
    device = torch.device(kind)
    gpu = is_accelerator(device)
    if gpu:
        device = torch.device(kind, torch.accelerator.current_device_index())
    sizes = sizes or (GPU_SIZES if gpu else CPU_SIZES)
    if gpu:
        dtype = torch.bfloat16
    else:
        dtype = torch.float32
    clock = functools.partial(seconds_of_run, device=device, times=sizes.times)
    with torch.no_grad():
        # Products with many rows and with few rows, to the inner size and back. The first ones heat
        # the device.
        weight = torch.randn(sizes.hidden, sizes.inner, device=device, dtype=dtype)  # [h, m]
        flops = seconds = 0.0
        heated = time.perf_counter()
        for rows in reversed(sizes.rows):
            x = torch.randn(rows, sizes.hidden, device=device, dtype=dtype)  # [n, h]
            while time.perf_counter() - heated < sizes.heat:
                x @ weight
                wait(device)
            seconds += clock(lambda x=x, weight=weight: (x @ weight) @ weight.mT)  # type: ignore[misc]
            flops += 4 * rows * sizes.hidden * sizes.inner
        products = flops / seconds
        del weight, x
        forward, backward = _attention(clock, sizes, device, dtype)
        x = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=dtype)  # [n, h]
        weight = torch.ones(sizes.hidden, device=device, dtype=dtype)
        with StepCount(None) as count:
            _norm(x.to("meta"), weight.to("meta"))
        # bytes as the planner counts them. See `planner/work.py`.
        bandwidth = count.work.traffic / clock(lambda: _norm(x, weight))
        # Copies in both directions at the same time.
        on_device, to_host = (
            torch.empty(sizes.copied, dtype=torch.uint8, device=device) for _ in range(2)
        )
        host = []
        for _ in range(2):
            host.append(torch.empty(sizes.copied, dtype=torch.uint8, pin_memory=gpu))
        streams = [torch.Stream(device) if gpu else contextlib.nullcontext() for _ in range(2)]

        def copies() -> None:
            """Start a copy to the host and a copy from the host at the same time, on two streams of
            the device, to measure the bandwidth of simultaneous copies."""
            for stream, target, source in zip(
                streams, (host[0], to_host), (on_device, host[1]), strict=True
            ):
                with stream:
                    target.copy_(source, non_blocking=True)

        link = sizes.copied / clock(copies)
    if gpu:
        factor = SUSTAINED_FRACTIONS
    else:
        factor = dict.fromkeys(SUSTAINED_FRACTIONS, 1.0)
    if gpu:
        name = torch.get_device_module(device).get_device_name(device)
    else:
        name = f"this {kind.upper()}"
    source = f"measured with torch {torch.__version__}"
    forward = forward * factor["attention"]
    backward = backward * factor["attention"]
    return Rates(
        name,
        products * factor["products"],
        forward,
        backward,
        bandwidth,
        link,
        DISPATCH_SECONDS,
        source=source,
    )


def seconds_of_run(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the seconds of one call of `run`, whose work is on a device: the median of `times`
    samples.

    A sample is the average of several calls, at most MAX_RUNS, that take MIN_SAMPLE_SECONDS
    together. The cost of a synchronization then matters little. A first call and a first sample are
    not counted.
    """
    run()
    samples = list[float]()
    runs = 1
    for _ in range(1 + times):
        wait(device)
        start = time.perf_counter()
        for _ in range(runs):
            run()
        wait(device)
        samples.append(max((time.perf_counter() - start) / runs, 1e-9))
        if len(samples) == 1:  # the first sample determines the number of runs in later samples
            runs = min(MAX_RUNS, math.ceil(MIN_SAMPLE_SECONDS / samples[0]))
    return statistics.median(samples[1:])


def wait(device: torch.device) -> None:
    """Wait until all work on a device has ended, to time it; return at once for the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _attention(
    clock: Callable[..., float], sizes: MeasuredSizes, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Measure the FLOP/s of attention's forward and backward on a device, and return both. The
    attention is causal, and runs in the kernel that streambp would use on this device.

    Args:
        clock: function that times its argument, another function, and returns the seconds of a
            call.
        sizes: sizes of the measured kernels.
        device: the device.
        dtype: dtype of q, k and v.
    """
    shape = (sizes.length, sizes.head_size)
    q = torch.randn(1, sizes.heads, *shape, device=device, dtype=dtype)  # [B, H, T, D]
    # [B, H_kv, T, D]
    k, v = (torch.randn(1, sizes.kv_heads, *shape, device=device, dtype=dtype) for _ in range(2))
    block = Block(BlockKind.CAUSAL, 0, 1, 0, sizes.length, 0, sizes.length)
    kernel: Kernel = choose_backend("auto", q, v, 0.0).kernel(block)
    task = Task(block, sizes.head_size**-0.5)
    o, lse = kernel.forward(q, k, v, task)
    flops = 2 * sizes.heads * pairs(sizes.length, sizes.length, True, None) * sizes.head_size
    forward = clock(lambda: kernel.forward(q, k, v, task))
    backward = clock(lambda: kernel.backward(o, q, k, v, o, lse, task))
    return 2 * flops / forward, 5 * flops / backward


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMSNorm of x [n, h] with weight [h], computed by plain torch. The time of this
    function measures the device's memory bandwidth."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
