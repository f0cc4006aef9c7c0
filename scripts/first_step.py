"""Seconds of the first steps of a patched model, and where the first one spends them.

    python scripts/first_step.py [--device cuda] [--shape Qwen3-8B] [--tokens 2048] [--lora]
    python scripts/first_step.py --device cpu --shape mini

A first step counts itself, tries each layer, and compiles kernels; a program meets it once a
process. The model without a patch, checkpointed, takes the same steps first, so that what it
compiles is compiled. Then come the functions of the patched model's first step by the seconds below
them, and by their own. Calls are the same in each run of a commit; of two commits they say what a
change costs where the clock does not.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import streambp
from paper_repro.shapes import build
from streambp.device import is_accelerator


def seconds_of(model: nn.Module, ids: torch.Tensor) -> float:
    """Of a forward and backward, until the device is done."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    if is_accelerator(ids.device):
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="Qwen3-8B")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--lines", type=int, default=45, help="functions to print, by each order")
    args = parser.parse_args()
    model = build(args.shape, args.lora, torch.device(args.device), 0)
    ids = torch.randint(0, 1000, (1, args.tokens), device=args.device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    print(
        "unpatched, checkpointed:",
        *(f"{seconds_of(model, ids):.2f}" for _ in range(2)),
        "s",
        flush=True,
    )
    model.gradient_checkpointing_disable()
    start = time.perf_counter()
    streambp.patch(model)
    print(f"patch: {time.perf_counter() - start:.2f} s", flush=True)
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # a profile sees its own thread
        cpu_seconds = time.process_time()
        profile.enable()
        first = seconds_of(model, ids)
        profile.disable()
        cpu_seconds = time.process_time() - cpu_seconds
    print(
        "patched:",
        f"{first:.2f}",
        *(f"{seconds_of(model, ids):.2f}" for _ in range(2)),
        "s;",
        streambp.last_step(model),
    )
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    print(f"first step, profiled: {cpu_seconds:.2f} s of processor time, {calls:,} calls")
    for order in ("cumulative", "tottime"):
        pstats.Stats(profile).strip_dirs().sort_stats(order).print_stats(args.lines)


if __name__ == "__main__":
    main()
