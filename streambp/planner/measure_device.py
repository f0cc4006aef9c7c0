"""Rates of the device at hand, by seconds of the kernels that a step is made of: about three seconds and 2 GiB on a GPU.

Kernels alone are faster than within a step, where they share power and heat: on an H200 products sustained 0.87 of their
rate alone and attention 0.95. A GPU is heated for a second first, and what is measured is taken times these two.
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
from streambp.attention.spans import Block, Kind
from streambp.device import is_accelerator
from streambp.planner.count import StepCount
from streambp.planner.work import pairs
from streambp.rates import DISPATCH, Rates

SAMPLE, MOST_RUNS = 0.005, 50  # seconds of one sample at least, and its runs at most
SUSTAINED = {"products": 0.87, "attention": 0.95}


@dataclasses.dataclass(frozen=True)
class MeasuredSizes:
    """What is measured: matrix products of [n, hidden] with [hidden, inner] and back, attention of `length` queries with
    `heads` and `kv_heads` heads, norms of `tokens` tokens, copies of `copied` bytes; each `times` times, after `heat`
    seconds."""

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


GPU = MeasuredSizes((1024, 8192), 4096, 12288, 16384, 32, 8, 128, 16384, 2**28, 7, 1.0)
CPU = MeasuredSizes((256,), 256, 768, 512, 4, 2, 64, 1024, 2**22, 3, 0.0)


def measure_device(kind: str, sizes: MeasuredSizes | None = None) -> Rates:
    """The rates of the current accelerator, or of this machine's CPU.

    Args:
        kind: its type, such as "cuda" or "cpu".
        sizes: None: those that say most about training steps there.
    """
    device = torch.device(kind)
    gpu = is_accelerator(device)
    if gpu:
        device = torch.device(kind, torch.accelerator.current_device_index())
    sizes = sizes or (GPU if gpu else CPU)
    dtype = torch.bfloat16 if gpu else torch.float32
    clock = functools.partial(seconds_of_run, device=device, times=sizes.times)
    with torch.no_grad():
        # Products with many rows and few, to the inner size and back; the first heats the device.
        weight = torch.randn(sizes.hidden, sizes.inner, device=device, dtype=dtype)  # [h, m]
        flops = taken = 0.0
        heated = time.perf_counter()
        for rows in reversed(sizes.rows):
            x = torch.randn(rows, sizes.hidden, device=device, dtype=dtype)  # [n, h]
            while time.perf_counter() - heated < sizes.heat:
                x @ weight
                wait(device)
            taken += clock(lambda x=x, weight=weight: (x @ weight) @ weight.mT)  # type: ignore[misc]
            flops += 4 * rows * sizes.hidden * sizes.inner
        products = flops / taken
        del weight, x
        forward, backward = _attention(clock, sizes, device, dtype)
        x = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=dtype)  # [n, h]
        weight = torch.ones(sizes.hidden, device=device, dtype=dtype)
        with StepCount(None) as count:
            _norm(x.to("meta"), weight.to("meta"))
        bandwidth = count.work.moved / clock(lambda: _norm(x, weight))  # by what the planner counts. [Note: bytes moved]
        # Copies both ways at once.
        there, back = (torch.empty(sizes.copied, dtype=torch.uint8, device=device) for _ in range(2))
        host = [torch.empty(sizes.copied, dtype=torch.uint8, pin_memory=gpu) for _ in range(2)]
        streams = [torch.Stream(device) if gpu else contextlib.nullcontext() for _ in range(2)]

        def copies() -> None:
            for stream, target, source in zip(streams, (host[0], back), (there, host[1]), strict=True):
                with stream:
                    target.copy_(source, non_blocking=True)

        link = sizes.copied / clock(copies)
    factor = SUSTAINED if gpu else dict.fromkeys(SUSTAINED, 1.0)
    name = torch.get_device_module(device).get_device_name(device) if gpu else f"this {kind.upper()}"
    source = f"measured with torch {torch.__version__}"
    forward, backward = forward * factor["attention"], backward * factor["attention"]
    return Rates(name, products * factor["products"], forward, backward, bandwidth, link, DISPATCH, source=source)


def seconds_of_run(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Seconds of one run of work on a device, the first of which is not counted: the median of `times` samples, of as many
    runs each as hide what a launch and a wait cost the host, which are a part of a small product's time."""
    run()
    samples, runs = list[float](), 1
    for _ in range(1 + times):
        wait(device)
        start = time.perf_counter()
        for _ in range(runs):
            run()
        wait(device)
        samples.append(max((time.perf_counter() - start) / runs, 1e-9))
        if len(samples) == 1:  # it says how many runs the others have
            runs = min(MOST_RUNS, math.ceil(SAMPLE / samples[0]))
    return statistics.median(samples[1:])


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _attention(
    clock: Callable[..., float], sizes: MeasuredSizes, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """FLOP/s forward and backward of a causal block, in the kernel that streamed attention takes here."""
    shape = (sizes.length, sizes.head_size)
    q = torch.randn(1, sizes.heads, *shape, device=device, dtype=dtype)  # [B, H, T, D]
    k, v = (torch.randn(1, sizes.kv_heads, *shape, device=device, dtype=dtype) for _ in range(2))  # [B, H_kv, T, D]
    block = Block(Kind.CAUSAL, 0, 1, 0, sizes.length, 0, sizes.length)
    kernel: Kernel = choose_backend("auto", q, v, 0.0).kernel(block)
    task = Task(block, sizes.head_size**-0.5)
    o, lse = kernel.forward(q, k, v, task)
    flops = 2 * sizes.heads * pairs(sizes.length, sizes.length, True, None) * sizes.head_size
    forward = clock(lambda: kernel.forward(q, k, v, task))
    backward = clock(lambda: kernel.backward(o, q, k, v, o, lse, task))
    return 2 * flops / forward, 5 * flops / backward


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in plain torch."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
