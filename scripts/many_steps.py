"""Does a step cost more after a thousand steps? `OMP_NUM_THREADS=1 python scripts/many_steps.py
[--steps 1000] [MODE ...]`.

Each mode trains a small Llama on batches of random sizes: `chunk` (chunks of 16 tokens, no saves),
`auto` (the defaults), `prefixes` (rows that begin alike, computed once) and `launch` (as `streambp
launch` sets it, a loss of its own on lazy logits). Twenty times on the way one batch, the same each
time, is trained twice: the second time its calls of functions are counted, and afterwards the
objects that Python's collector knows and the process's resident memory. The script prints the
slopes of these three over the second half of the steps, where whatever is filled once is full.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import streambp
from streambp.launch.settings import LAUNCH_DEFAULTS

VOCABULARY, PROMPT, POINTS = 64, 72, 20
MODES = {
    "chunk": streambp.StreamConfig(chunk_size=16, saves=()),
    "auto": streambp.StreamConfig(),
    "prefixes": streambp.StreamConfig(chunk_size=64, rows="packed"),
    "launch": LAUNCH_DEFAULTS,
}


@dataclasses.dataclass(frozen=True)
class Point:
    """What was seen after so many steps. calls: of Python functions in a step. resident: bytes;
    None where nobody tells."""

    step: int
    calls: int
    objects: int
    resident: int | None


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(mode: str, length: int, rows: int) -> Tensor:
    """Random tokens [B, T]; in the mode `prefixes` T is longer by a prompt that all rows share."""
    tokens = torch.randint(VOCABULARY, (rows, length))
    return (
        tokens
        if mode != "prefixes"
        else torch.cat((torch.randint(VOCABULARY, (1, PROMPT)).expand(rows, -1), tokens), 1)
    )


def trained(model: Any, optimizer: torch.optim.Optimizer, mode: str, tokens: Tensor) -> None:
    """One step on tokens [B, T]."""
    if mode == "launch":  # a program that knows nothing of it
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    else:
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def counted(step: Callable[[], None]) -> int:
    """Calls of Python functions in a step."""
    calls = 0

    def see(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    # the profiler sees the thread that it was set in
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(see)
        try:
            step()
        finally:
            sys.setprofile(None)
    return calls


def resident() -> int | None:
    """Bytes of the process in memory, where the system tells."""
    statm = Path("/proc/self/statm")
    return (
        int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None
    )


def run(mode: str, steps: int) -> list[Point]:
    """Trains so many steps; what was seen at POINTS of them."""
    model = streambp.patch(small_llama(), MODES[mode])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(1)
    fixed_batch, points = batch(mode, 41, 2), []
    for step in range(1, steps + 1):
        length, rows = (
            int(torch.randint(low, high, (), generator=random)) for low, high in ((2, 120), (1, 4))
        )
        trained(model, optimizer, mode, batch(mode, length, rows))
        if step % max(1, steps // POINTS) == 0:
            trained(model, optimizer, mode, fixed_batch)
            calls = counted(lambda: trained(model, optimizer, mode, fixed_batch))
            gc.collect()
            points.append(Point(step, calls, len(gc.get_objects()), resident()))
    return points


def slope(points: list[Point], name: str) -> float:
    """Of a field, for a step, by least squares over the second half of the points; NaN where nobody
    tells it."""
    second_half = points[len(points) // 2 :]
    values = [getattr(point, name) for point in second_half]
    if None in values:
        return float("nan")
    x = torch.tensor([point.step for point in second_half], dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def summary_line(mode: str, points: list[Point]) -> str:
    first, last = points[0], points[-1]
    slopes = ", ".join(
        f"{name} {slope(points, name):+.3f}" + (" bytes" if name == "resident" else "")
        for name in ("objects", "calls", "resident")
    )
    grown = (
        ""
        if last.resident is None or first.resident is None
        else f", MiB {first.resident >> 20} to {last.resident >> 20}"
    )
    return (
        f"{mode:9} a step, steps {points[len(points) // 2].step} to {last.step}: {slopes}; objects "
        f"{first.objects:,} to {last.objects:,}, calls of a step {first.calls:,} to "
        f"{last.calls:,}{grown}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "modes", nargs="*", metavar="MODE", help=f"of {', '.join(MODES)}; all if none is given"
    )
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    for mode in args.modes or MODES:
        print(summary_line(mode, run(mode, args.steps)), flush=True)


if __name__ == "__main__":
    main()
