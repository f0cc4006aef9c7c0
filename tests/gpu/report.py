"""Proves the CUDA path and prints a table: `python tests/gpu/report.py [--row NAME] [--minutes 8]`.

1. Gradient error of a small bf16 model against a float32 oracle, for every backend, saves and kind
   of spans, beside the unpatched model's own error; the oracle has the bf16 model's weights, so
   that no error is that of rounding weights. Each row must be at most 1.15 x the unpatched error,
   their mean at most 1.05 x: one draw's ratio is up to a tenth off by chance. Rows are named "plain
   cudnn kv" and so on.
2. Forward and backward on two Qwen3-8B-shaped layers with their head, beside transformers' gradient
   checkpointing: the figures of `paper_repro/figures.py`. Rows are named by their length.

Every row also asserts that all layers streamed, and that the kernels which attended are those that
were asked for: torch's operations are watched, so what counts is what ran. Rows of figures ask for
our Triton kernels as well, for gradients that are finite and as large as with checkpointing, and
for one gradient buffer a step.

Exit code 0 if every row passes, 1 if one does not, 2 without a GPU. `--device cpu --tiny` runs the
same code on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from paper_repro.figures import HEAD, NOT_FUSED, AttentionSeen, Figures, run_steps, wrong_paths
from paper_repro.rows import Deadline, Result, each
from tests.gpu import script
from tests.gpu.script import failed
from tests.oracle import Gradients, gradients, relative_l2

SAVES = ((), ("attn_out",), ("kv",), ("attn_out", "kv"))
SPAN_CASES = ("plain", "left-padded", "right-padded", "packed", "window")
ROW_BAR, MEAN_BAR = 1.15, 1.05
MIN_ROWS = 8  # rows of which the mean is judged


def report(args: argparse.Namespace) -> Iterator[Result]:
    deadline = Deadline(args.minutes)
    errors = {f"{spans} {attention} {'+'.join(saves) or 'none'}": (spans, attention, saves) for spans, attention, saves in
              itertools.product(SPAN_CASES, backends(args.device), SAVES)}  # fmt: skip
    times = {
        str(length): length for length in ((256, 512) if args.tiny else (8192, 16384, 32768, 65536))
    }
    cases: dict[str, SpanCase] = {}
    yield f"{'row':<34}{'ours':>10}{'unpatched':>12}{'ratio':>8}   layers, kernels", True
    ratios: list[float] = []
    rows = [
        (name, functools.partial(error_row, name, *row, args, cases, ratios))
        for name, row in errors.items()
    ]
    rows += [(name, functools.partial(time_row, length, args)) for name, length in times.items()]
    yield from each(rows, args.row, deadline)
    if len(ratios) >= MIN_ROWS:
        yield mean_row(ratios)


def mean_row(ratios: list[float]) -> Result:
    """Of the rows' logarithms: what one row owes to chance, all of them do not."""
    mean = (
        math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        if all(r > 0 for r in ratios)
        else math.nan
    )
    good = mean <= MEAN_BAR
    return f"{f'mean of {len(ratios)} rows':<34}{mean:>30.3f}" + (
        "" if good else f"   FAILED: more than {MEAN_BAR}"
    ), good


@dataclasses.dataclass
class SpanCase:
    """What all rows of one kind of spans share: the bf16 model, the batch, the true gradient and
    the model's own error."""

    model: Qwen3ForCausalLM
    batch: dict[str, torch.Tensor]
    truth: Gradients
    noise: float


def error_row(
    name: str,
    spans: str,
    attention: str,
    saves: tuple[str, ...],
    args: argparse.Namespace,
    cases: dict[str, SpanCase],
    ratios: list[float],
) -> Result:
    length = 96 if args.tiny else 2048
    if spans not in cases:
        cases.clear()
        cases[spans] = make_known(spans, length, args.device, 256 if args.tiny else 512)
    model, batch, truth, noise = (
        getattr(cases[spans], field.name) for field in dataclasses.fields(SpanCase)
    )
    streambp.patch(
        model,
        streambp.StreamConfig(
            kernels="own", chunk_size=length // 4 + 3, saves=saves, attention=attention
        ),
    )
    try:
        # its layers are tried, and compared with the unpatched ones, which attend by themselves
        gradients(model, **batch)
        with AttentionSeen() as watched:
            _, gradient = gradients(model, **batch)
        problems = wrong_paths(model) + wrong_kernels(attention, spans, watched.names, args.device)
    finally:
        streambp.unpatch(model)
    ratio = relative_l2(gradient, truth) / noise
    ratios.append(ratio)
    problems += [f"error above {ROW_BAR} x the model's own"] * (not ratio <= ROW_BAR)
    kernels = ", ".join(sorted(watched.names)) or "math"
    return (
        f"{name:<34}{ratio * noise:>10.3e}{noise:>12.3e}{ratio:>8.3f}   stream, "
        f"{kernels}{failed(problems)}",
        not problems,
    )


def make_known(spans: str, length: int, device: str, width: int) -> SpanCase:
    """The truth is that of the rounded weights: a rounded weight is no error of the gradient."""
    model, batch = small_model(spans, length, device, width)
    _, truth = gradients(model.bfloat16().float(), **batch)
    model.bfloat16()
    return SpanCase(model, batch, truth, relative_l2(gradients(model, **batch)[1], truth))


def wrong_kernels(attention: str, spans: str, kernels_run: set[str], device: str) -> list[str]:
    """A kernel that was asked for must have run forward and backward; no fused one where products
    were asked for.

    Windows and packed rows are FlashAttention's work, and small blocks may be, with cuDNN as well.
    """
    if attention == "math":
        return [f"{', '.join(sorted(kernels_run))} ran instead of products"] if kernels_run else []
    if device == "cpu":
        expected = "cpu flash"
    elif device != "cuda":
        return []  # which kernels a device has is its own affair
    else:
        expected = "flash" if spans in ("packed", "window") else attention
    return [
        f"{kernel} did not run"
        for kernel in (expected, f"{expected} backward")
        if kernel not in kernels_run
    ]


def backends(device: str) -> tuple[str, ...]:
    """cuDNN needs Hopper or later."""
    if device != "cuda":
        return ("auto", "math")
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    return ("cudnn", "flash", "math") if hopper else ("flash", "math")


def small_model(
    spans: str, length: int, device: str, width: int
) -> tuple[Qwen3ForCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=width // 128, num_key_value_heads=width // 256, head_dim=128, attn_implementation="sdpa",
        use_sliding_window=spans == "window", sliding_window=length // 5, max_window_layers=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device).train()
    ids = torch.randint(0, 1024, (2, length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if spans == "packed":
        position_ids = torch.cat(
            [torch.arange(length // 3), torch.arange(7), torch.arange(length - length // 3 - 7)]
        )
        batch["position_ids"] = position_ids.expand(2, -1).clone()
    if "padded" in spans:
        mask = torch.ones_like(ids)
        pads = (
            slice(0, length // 5) if spans == "left-padded" else slice(length - length // 5, length)
        )
        mask[0, pads] = 0
        batch["attention_mask"], batch["labels"][mask == 0] = mask, -100
    return model, {name: value.to(device) for name, value in batch.items()}


def time_row(length: int, args: argparse.Namespace) -> Result:
    ours, problems = figures_of(length, args, True)
    stock, stock_problems = figures_of(length, args, False)
    problems += [f"checkpointing: {problem}" for problem in stock_problems]
    if ours is not None and stock is not None:
        problems += compare_figures(ours, stock)
    texts = [
        "out of memory" if figures is None else f"{figures}, {', '.join(figures.ran)}"
        for figures in (ours, stock)
    ]
    return (
        f"{length:<8} streambp {texts[0]}\n{'':<8} checkpointing {texts[1]}{failed(problems)}",
        not problems,
    )


def compare_figures(ours: Figures, stock: Figures) -> list[str]:
    """How two bf16 runs of one model differ beyond rounding, which enters a norm by its square
    alone."""
    pairs = (
        ("loss", ours.loss, stock.loss, 2**-8),
        ("gradient norm", ours.norm, stock.norm, 2**-6),
    )
    return [
        f"{label} {a:.4e} instead of {b:.4e}"
        for label, a, b, bar in pairs
        if not abs(a / b - 1) <= bar
    ]


def figures_of(
    length: int, args: argparse.Namespace, streamed: bool
) -> tuple[Figures | None, list[str]]:
    """Of three steps, None if memory ran out; and what did not run as it should."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    if args.tiny:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    config = Qwen3Config(
        **sizes, vocab_size=128 if args.tiny else 151936, head_dim=128, num_hidden_layers=2, attn_implementation="sdpa",
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.randint(0, config.vocab_size, (1, length))
    if streamed:
        chunk_size = length // 4 + 3 if args.tiny else "auto"
        streambp.patch(
            model, streambp.StreamConfig(kernels="own", saves=("attn_out",), chunk_size=chunk_size)
        )
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        figures = run_steps(model, lambda: model(ids, labels=ids, use_cache=False).loss)
    except torch.OutOfMemoryError:
        return None, []
    problems = list(figures.problems)
    if streamed:
        problems += wrong_paths(model) + wrong_figures(
            figures.buffers, set(figures.ran), args.device
        )
    return figures, problems


def wrong_figures(buffers: int, ran: set[str], device: str) -> list[str]:
    """Of plain spans: the preferred kernel attends, the head and merges run in Triton, and dx is
    written over dy."""
    attention = ran - {*HEAD, "merge", NOT_FUSED}
    problems = wrong_kernels(backends(device)[0], "plain", attention, device)
    if device == "cuda":
        problems += [f"{kernel} did not run in Triton" for kernel in HEAD if kernel not in ran]
        problems += [f"{NOT_FUSED} ran"] * (NOT_FUSED in ran)
    return problems + [f"{buffers} gradient buffers a step instead of one"] * (buffers != 1)


if __name__ == "__main__":
    sys.exit(script.main(__doc__, report))
