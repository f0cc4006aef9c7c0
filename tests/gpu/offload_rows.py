"""What offloading is to reach on one GPU, row by row: `python tests/gpu/offload_rows.py [--row
NAME] [--minutes 8]`.

Each row trains three steps of a Qwen3-shaped model with random weights in a process of its own, and
prints the figures of `paper_repro/figures.py`, the share of the third step that compute waited for
copies, and the process' host memory. The first step pins memory, and so does the second where it
saves what the first has chosen. A row fails where a gradient is not finite (with an optimizer: a
weight), where a layer did not stream, or where no fused kernel attended on a GPU. All rows take
about half an hour: those for which --minutes do not suffice are named, for another call.

Exit code 0 if every row holds, 1 if one does not, 2 without a GPU. `--device cpu --tiny` runs the
same code on a CPU, where nothing is measured against a bar.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from paper_repro.figures import GIB, LONGEST_TIMELINE, Figures, run_steps, wrong_paths
from paper_repro.rows import Deadline, Result, each, run_child
from streambp.offload import manager_of
from tests.device import limit_memory
from tests.gpu import script
from tests.gpu.script import ROOT

SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """bars: GiB on the device, share of stalls, GiB on the host; None: not judged. limit: GiB that
    the allocator may have.

    train: makes the optimizer's step, given the model; None: forward and backward alone, gradients
    None at the start.
    """

    shape: str
    length: int
    config: streambp.StreamConfig
    bars: tuple[float | None, float | None, float | None]
    limit: float | None = None
    lora: bool = False
    optimizer: Callable[[Any, bool], Any] | None = None


def adamw(model: Any, on_gpu: bool) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=on_gpu)


def adamw_on_the_host(model: Any, on_gpu: bool) -> Any:
    if not on_gpu:
        return adamw(model, on_gpu)
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True
    )


# bars are those of the model's own norms and MLPs
own_kernels = functools.partial(streambp.StreamConfig, kernels="own")
LEAN_SETTINGS = {"saves": ("attn_out",), "offload": "cpu"}
ROWS = {
    "8B 65,536": Row("8B", 65536, own_kernels(**LEAN_SETTINGS), (34.6, 0.02, None)),
    "8B 65,536 auto": Row("8B", 65536, own_kernels(offload="auto"), (None, 0.02, None)),
    "8B 262,144": Row("8B", 262144, own_kernels(saves=(), offload="cpu", gpu_memory="4GiB"), (40.0, None, None)),
    "8B LoRA step 131,072": Row(
        "8B", 131072, own_kernels(**LEAN_SETTINGS, host_memory="90GiB"), (80.0, None, 115.0), 80.0,
        True, adamw
    ),
    "4B full step 131,072": Row(
        "4B", 131072, own_kernels(saves=(), offload="cpu", host_memory="60GiB"), (80.0, None, 115.0), 80.0, False,
        adamw_on_the_host,
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--here", choices=list(ROWS), help="this row alone, in this process")


def report(args: argparse.Namespace) -> Iterator[Result]:
    if args.here:
        yield run(args.here, args.device, args.tiny)
        return
    deadline = Deadline(args.minutes)
    options = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    yield from each(
        ((name, functools.partial(in_a_child, name, options, deadline)) for name in ROWS),
        args.row,
        deadline,
    )


def in_a_child(name: str, options: list[str], deadline: Deadline) -> tuple[str, bool]:
    lines: list[str] = []
    ended = run_child(
        [sys.executable, __file__, "--here", name, *options], ROOT, deadline, lines.append
    )
    if ended.code not in (0, 1) or not lines:
        lines.append(f"{name}: FAILED, {ended}")
    return "\n".join(lines), ended.code == 0


def build(row: Row, device: str, tiny: bool) -> tuple[Any, torch.Tensor]:
    sizes = SHAPES["tiny" if tiny else row.shape]
    layers, heads, kv_heads, vocabulary = (4, 2, 1, 128) if tiny else (36, 32, 8, 151936)
    config = Qwen3Config(
        **sizes, vocab_size=vocabulary, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=128, attn_implementation="sdpa",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config).train()
            ids = torch.randint(0, config.vocab_size, (1, 192 if tiny else row.length))
    finally:
        torch.set_default_dtype(torch.float32)
    if row.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    return model, ids


def run(name: str, device: str, tiny: bool) -> tuple[str, bool]:
    """One line, and whether the row's bars hold."""
    row, on_gpu = ROWS[name], device == "cuda"
    if on_gpu and row.limit is not None:
        limit_memory(torch.device(device, 0), int(row.limit * GIB))
    model, ids = build(row, device, tiny)
    streambp.patch(model, dataclasses.replace(row.config, host_memory=None) if tiny else row.config)
    optimizer = None if row.optimizer is None else row.optimizer(model, on_gpu)
    start_stats = {"stall_out": 0.0, "stall_back": 0.0}

    def forward() -> torch.Tensor:
        if device != "cpu":
            start_stats.update(manager_of(model).stats())
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    timeline = ids.shape[1] <= LONGEST_TIMELINE
    figures = run_steps(model, forward, None if optimizer is None else update, timeline)
    stats = manager_of(model).stats()
    stall = (
        sum(stats[key] - start_stats[key] for key in ("stall_out", "stall_back")) / figures.seconds
    )
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    problems = [*figures.problems, *wrong_paths(model)]
    problems += missed(row, figures, stall, host) if on_gpu else []
    bars_text = " / ".join("-" if bar is None else f"{bar:g}" for bar in row.bars)
    return (
        f"{name:<24}{figures}, stalls {stall:6.2%}, host {host:6.1f} GiB, "
        f"{stats['gb_per_s_out']:5.1f} out {stats['gb_per_s_back']:5.1f} back GB/s, "
        f"bars {bars_text}: "
        f"{'FAILED: ' + '; '.join(problems) if problems else 'holds'}\n    "
        f"{', '.join(figures.ran)}; {figures.buffers} gradient buffers a step; "
        f"{streambp.describe(model).offload}"
    ), not problems


def missed(row: Row, figures: Figures, stall: float, host: float) -> list[str]:
    """What a GPU is asked for: a fused kernel that attended, and the row's bars."""
    problems = (
        []
        if any(kernel.endswith("backward") for kernel in figures.ran)
        else ["no fused kernel attended"]
    )
    peak = math.nan if figures.peak_gib is None else figures.peak_gib
    for label, value, bar in zip(
        ("peak", "stalls", "host"), (peak, stall, host), row.bars, strict=True
    ):
        if bar is not None and not value <= bar:
            problems.append(f"{label} {value:.3g} above {bar:g}")
    return problems


if __name__ == "__main__":
    sys.exit(script.main(__doc__, report, add_arguments))
