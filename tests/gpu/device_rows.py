"""What the device at hand does, and what the host spends on it: `python tests/gpu/device_rows.py
[--row NAME]`.

"rates": those that the planner reckons with, measured (`streambp plan --measure-device`). "blocks
NAME": attention as it is called in chunks of 8,192 queries, against 8,192, 32,768 and 65,536 keys,
TFLOP/s forward and backward beside one causal call over all of it. "memory": microseconds of one
look at the free memory. "host": microseconds of Python for one layer and chunk, forward and
backward, of a model so narrow that no kernel takes as long. "pinning": GiB/s at which host memory
is pinned. "kernels": the 20 largest of one step of four layers of Qwen3-8B's shape at 16,384
tokens. "kernels 64k" and "kernels 64k TRL": at 65,536, with attention's outputs, keys and values
saved, and of TRL's selective checkpointing.

Nothing is judged but that it ran. Exit code 0 if every row did, 1 if one did not, 2 without a GPU.
`--device cpu --tiny` runs the same code on a CPU.
"""

from __future__ import annotations

import argparse
import collections
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from paper_repro.figures import GIB, kernel_times
from paper_repro.methods import Method, StreamBP, Unavailable
from paper_repro.recipes import METHODS
from paper_repro.rows import Deadline, Result, each
from streambp.attention.backend import choose_backend
from streambp.attention.kernels import Task
from streambp.attention.spans import Block, BlockKind
from streambp.device import is_accelerator, reports_memory
from streambp.errors import StreamBPError
from streambp.offload.engines import AcceleratorEngine
from streambp.offload.free_memory import UNLIMITED_BYTES, FreeMemory, free_memory, host_limit
from streambp.planner.measure_device import CPU_SIZES, measure_device, seconds_of_run
from streambp.planner.work import pairs
from tests.gpu import script
from tests.gpu.report import backends

LARGEST, CHUNK = 20, 16384
STEPS: tuple[tuple[str, int, Callable[[], Method]], ...] = (
    ("kernels", 16384, METHODS["streambp-default"]),
    ("kernels 64k", 65536, lambda: StreamBP(saves=("attn_out", "kv"), liger=True)),
    ("kernels 64k TRL", 65536, METHODS["trl-selective-liger"]),
)


def report(args: argparse.Namespace) -> Iterator[Result]:
    rows: list[tuple[str, Callable[[], str]]] = [
        ("rates", functools.partial(rates, args)),
        *(
            (f"blocks {name}", functools.partial(blocks, name, args))
            for name in backends(args.device)
        ),
        ("memory", functools.partial(memory, args)),
        ("host", functools.partial(host, args)),
        ("pinning", functools.partial(pinning, args)),
        *(
            (name, functools.partial(kernels, length, method(), args))
            for name, length, method in STEPS
        ),
    ]
    yield from each(
        [(n, lambda n=n, row=row: (f"{n:<16}{row()}", True)) for n, row in rows],
        args.row,
        Deadline(args.minutes),
    )


def rates(args: argparse.Namespace) -> str:
    speeds = measure_device(args.device, CPU_SIZES if args.tiny else None)
    attention = f"{speeds.forward / 1e12:.3g} / {speeds.backward / 1e12:.3g} in attention forward / backward"
    other_rates = f"{speeds.bandwidth / 1e12:.3g} TB/s in other kernels, {speeds.link / 1e9:.3g} GB/s each way"
    return f"{speeds.products / 1e12:.3g} TFLOP/s in products, {attention}, {other_rates}"


def blocks(name: str, args: argparse.Namespace) -> str:
    """q, k and v are slices of [B, T, H, D] buffers, as in a layer."""
    queries, lengths = (64, (64, 256)) if args.tiny else (8192, (8192, 32768, 65536))
    heads, kv_heads, size = (4, 2, 64) if args.tiny else (32, 8, 128)
    if name == "math" and not args.tiny:
        queries, lengths = 2048, (8192,)
    device = torch.device(args.device)
    clock, texts = functools.partial(seconds_of_run, device=device, times=3), []
    full = [(BlockKind.FULL, queries, keys) for keys in lengths]
    for kind, rows, keys in [
        *full,
        (BlockKind.CAUSAL, queries, queries),
        (BlockKind.CAUSAL, lengths[-1], lengths[-1]),
    ]:
        # [B, H, T, D]
        q = torch.randn(1, rows, heads, size, device=device, dtype=torch.bfloat16).transpose(1, 2)
        k, v = (
            torch.randn(1, keys, kv_heads, size, device=device, dtype=torch.bfloat16).transpose(
                1, 2
            )
            for _ in range(2)
        )
        q0 = keys if kind is BlockKind.FULL else 0
        block = Block(kind, 0, 1, q0, q0 + rows, 0, keys)
        try:
            kernel = choose_backend(name, q, v, 0.0).kernel(block)
        except StreamBPError as error:
            return f"refused: {error}"
        task = Task(block, size**-0.5)
        o, lse = kernel.forward(q, k, v, task)
        flops = 2 * heads * pairs(rows, keys, kind is BlockKind.CAUSAL, None) * size
        forward = clock(functools.partial(kernel.forward, q, k, v, task))
        backward = clock(functools.partial(kernel.backward, o, q, k, v, o, lse, task))
        rate = f"{2 * flops / forward / 1e12:.4g} / {5 * flops / backward / 1e12:.4g}"
        texts.append(f"{kind.value} {rows:,} x {keys:,} {rate} ({kernel.name})")
    return "TFLOP/s forward / backward: " + "; ".join(texts)


def memory(args: argparse.Namespace) -> str:
    device = torch.device(args.device)
    if not reports_memory(device):
        return "this device does not tell"
    torch.empty(1, device=device)
    counter = FreeMemory()
    driver_time = microseconds(lambda: free_memory(device))
    between = microseconds(lambda: counter(device))
    return (
        f"{driver_time:.1f} us by the driver, {between:.1f} us by torch's own count, of which a "
        "step asks after its first layer"
    )


def microseconds(call: Callable[[], object], times: int = 500) -> float:
    call()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return 1e6 * (time.perf_counter() - start) / times


def host(args: argparse.Namespace) -> str:
    layers, chunks, size = (2, 4, 16) if args.tiny else (8, 8, 512)
    config = Qwen3Config(
        hidden_size=256, intermediate_size=256, vocab_size=256, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=128, attn_implementation="sdpa",
    )  # fmt: skip
    texts = []
    for name in ("streambp", "checkpointing"):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(args.device, torch.bfloat16).train()
        if name == "streambp":
            streambp.patch(
                model, streambp.StreamConfig(kernels="own", chunk_size=size, saves=("attn_out",))
            )
        else:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        ids = torch.randint(0, 256, (1, chunks * size), device=args.device)
        seconds = []
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            wait(args.device)
            start = time.perf_counter()
            model(ids, labels=ids, use_cache=False).loss.backward()
            seconds.append(time.perf_counter() - start)  # before the device has done it
        of = layers * chunks if name == "streambp" else layers
        texts.append(
            f"{1e6 * statistics.median(seconds[2:]) / of:.0f} us a "
            f"layer{' and chunk' * (of > layers)}, {name}"
        )
    return f"{layers} layers, {chunks} chunks, until the host is done: {'; '.join(texts)}"


def pinning(args: argparse.Namespace) -> str:
    device = torch.device(args.device)
    limit = host_limit(None)
    size = min(
        2**20 if args.tiny else 4 * 2**30, 2**30 if limit == UNLIMITED_BYTES else int(limit) // 8
    )
    if not is_accelerator(device):
        return "nothing is pinned for this device"
    engine, start = AcceleratorEngine(device), time.perf_counter()
    buffer = engine.host_buffer(size)
    seconds = time.perf_counter() - start
    return (
        f"{size / GIB / seconds:.3g} GiB/s, {size / GIB:.3g} GiB "
        f"{'pinned' if buffer.is_pinned() else 'NOT pinned'}"
    )


def kernels(length: int, method: Method, args: argparse.Namespace) -> str:
    """Of the second of three steps: the first one tries the layers."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    sizes |= {"vocab_size": 151936}
    if args.tiny:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        sizes |= {"vocab_size": 128}
    config = Qwen3Config(
        **sizes,
        num_hidden_layers=4,
        head_dim=128,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.randint(0, config.vocab_size, (1, 64 if args.tiny else length))
    try:
        method.prepare(model, 24 if args.tiny else CHUNK)
    except Unavailable as error:
        return f"not run: {error}"
    spans: list[tuple[str, float, float]] = []
    seconds = []
    for number in range(3):
        model.zero_grad(set_to_none=True)
        wait(args.device)
        start = time.perf_counter()
        with (
            kernel_times(spans) if number == 1 and args.device == "cuda" else torch.enable_grad(),
            method.step(model),
        ):
            method.nll(model, ids).backward()
            wait(args.device)
        # of the last one, since a timeline takes long to read
        seconds.append(time.perf_counter() - start)
    did = streambp.last_step(model) if method.streams else method.name
    if not spans:
        return f"no times of kernels on this device; {did}"
    total, count = (
        collections.defaultdict[str, float](float),
        collections.Counter(name for name, _, _ in spans),
    )
    for name, begin, end in spans:
        total[name] += end - begin
    largest = sorted(total, key=lambda name: -total[name])[:LARGEST]
    lines = [f"    {1e3 * total[name]:9.2f} ms {count[name]:6} x {name[:100]}" for name in largest]
    return "\n".join(
        [f"{sum(total.values()):.3f} s in all, a step {seconds[-1]:.3f}; {did}", *lines]
    )


def wait(device: str) -> None:
    if is_accelerator(torch.device(device)):
        torch.accelerator.synchronize()


if __name__ == "__main__":
    sys.exit(script.main(__doc__, report))
