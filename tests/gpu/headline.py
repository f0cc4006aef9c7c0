"""The headline: Qwen3-8B's shape at 65,536 tokens on one GPU. `python tests/gpu/headline.py [--row
NAME] [--minutes 8]`.

1. "check" and "check liger": the gradient of two layers of that shape with a small vocabulary, at
   that length and in the headline's settings, against float32 with the same weights, beside the
   error of the unpatched model; without and with Liger's layer kernels in both. At most 1.15 x.
2. One row for each method of `paper_repro/recipes.py`, all 36 layers, forward and backward: the
   figures of `paper_repro/figures.py`. Each has a process of its own. A row fails where its
   gradients are not finite, where its own kernels did not run, and where loss or gradient norm are
   not those of the first method. Ours have bars, beside TRL's selective checkpointing with Liger's
   kernels of the same call: seconds, and GiB at the peak.

Exit code 0 if every row passes, 1 if one does not, 2 without a GPU. `--device cpu --tiny` runs the
same code on a CPU, and judges no bar. `--csv` keeps the rows of methods.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.integrations import sdpa_attention

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from paper_repro.figures import AttentionSeen, wrong_paths
from paper_repro.harness import Job, Row, run
from paper_repro.methods import Unavailable, liger
from paper_repro.rows import Deadline, Result, each
from tests.gpu import script
from tests.gpu.report import ROW_BAR, backends, wrong_kernels
from tests.gpu.script import card_gib, failed
from tests.oracle import Gradients, gradients, relative_l2

PEER, LEAN, FAST = "trl-selective-liger", "streambp-lean-liger", "streambp-fast-liger"
CHECKS = ("check", "check liger")
DEFAULT = "streambp-default"
ORDER = (
    CHECKS[0],
    PEER,
    LEAN,
    DEFAULT,
    CHECKS[1],
    FAST,
    "trl-selective",
    "streambp-lean",
    "checkpointing",
)
TINY_RUN = (CHECKS[0], "checkpointing", "streambp-lean", "streambp-auto")
# bars: times the peer's seconds, in GiB; and in the peer's memory
SECONDS, GIB, FAST_SECONDS = (1.00, 34.6, 0.93)
# GiB: what this one saves is more than a smaller card and a host of 128 GiB hold together
CARD = {FAST: 100}
SETTINGS = {"saves": ("attn_out",), "offload": "cpu"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=Path, help="also keep the rows of methods in this file")
    parser.add_argument("--length", type=int, help="tokens (65,536)")


def report(args: argparse.Namespace) -> Iterator[Result]:
    args.length = args.length or (100 if args.tiny else 65536)
    deadline, measured = Deadline(args.minutes), dict[str, Row]()
    rows: list[tuple[str, Callable[[], Result]]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        output = args.csv or folder / "rows.csv"
        for name in TINY_RUN if args.tiny else ORDER:
            row = (
                check_row
                if name in CHECKS
                else functools.partial(method_row, output, deadline, measured)
            )
            rows.append((name, functools.partial(row, name, args)))
        yield from each(rows, args.row, deadline)


def check_row(name: str, args: argparse.Namespace) -> Result:
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
        **sizes, vocab_size=8192, head_dim=128, num_hidden_layers=2, attn_implementation="sdpa", tie_word_embeddings=False,
        max_position_embeddings=2**20,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(args.device):
        # the same weights in both dtypes
        model = Qwen3ForCausalLM(config).bfloat16().float().train()
        ids = torch.randint(0, config.vocab_size, (1, args.length))
    batch = {"input_ids": ids, "labels": ids}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    truth = in_float32(model, batch)
    model.bfloat16()
    if name == "check liger":
        try:
            liger(model, fused_linear_cross_entropy=False)
        except Unavailable as error:
            return f"{name:<24}not run: {error}", False
    noise = relative_l2(gradients(model, **batch)[1], truth)
    model.gradient_checkpointing_disable()
    chunk_size = args.length // 4 + 3 if args.tiny else "auto"
    streambp.patch(model, streambp.StreamConfig(kernels="own", **SETTINGS, chunk_size=chunk_size))
    gradients(model, **batch)  # its layers are tried
    error, problems = watched_error(model, batch, truth, args.device)
    ratio = error / noise
    problems += [f"error above {ROW_BAR} x the model's own"] * (not ratio <= ROW_BAR)
    line = (
        f"{name:<24}gradient error {error:.3e}, unpatched {noise:.3e}, ratio {ratio:.3f} (bar "
        f"{ROW_BAR})"
    )
    return line + failed(problems), not problems


def watched_error(
    model: Qwen3ForCausalLM, batch: dict[str, torch.Tensor], truth: Gradients, device: str
) -> tuple[float, list[str]]:
    """Of a streamed step, and what did not run as it should."""
    with AttentionSeen() as attention:
        _, gradient = gradients(model, **batch)
    return relative_l2(gradient, truth), wrong_paths(model) + wrong_kernels(
        backends(device)[0], "plain", attention.names, device
    )


def in_float32(model: Qwen3ForCausalLM, batch: dict[str, torch.Tensor]) -> Gradients:
    """On a GPU by the memory-efficient kernel, whose keys are repeated: plain products would take
    hundreds of GiB."""
    if not batch["input_ids"].is_cuda:
        return gradients(model, **batch)[1]
    with pytest.MonkeyPatch.context() as patch, sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        patch.setattr(sdpa_attention, "use_gqa_in_sdpa", lambda *args, **kwargs: False)
        return gradients(model, **batch)[1]


def method_row(
    output: Path, deadline: Deadline, measured: dict[str, Row], name: str, args: argparse.Namespace
) -> Result:
    if args.device == "cuda" and (card := card_gib()) < CARD.get(name, 0):
        return (
            f"{name:<24}not run: it needs a card of {CARD[name]} GiB, and this one has {card:.0f}",
            True,
        )
    shape, chunk_size = ("mini", args.length // 4 + 3) if args.tiny else ("Qwen3-8B", "auto")
    job = Job("headline", name, shape, (args.length,), chunk_size=chunk_size, device=args.device)
    row = run(job, output, deadline)[-1]
    measured[name] = row
    if row.status != "ok":
        return f"{name:<24}{failed([row.status])}", False
    first = next(
        (
            earlier_row
            for earlier_row in measured.values()
            if earlier_row is not row and earlier_row.status == "ok"
        ),
        None,
    )
    problems = [] if first is None else unlike(row, first)
    text = "gradients as the first's" if first is not None else "the first"
    if args.device == "cuda" and name in (LEAN, FAST):
        bar, missed = bars(row, measured.get(PEER))
        text, problems = f"{text}, {bar}", problems + missed
    return f"{name:<24}{text}{failed(problems)}", not problems


def unlike(row: Row, first_row: Row) -> list[str]:
    """Two runs of one model and batch have one loss and one gradient norm, but for rounding."""
    pairs = (
        ("loss", row.loss, first_row.loss, 2**-8),
        ("gradient norm", row.gradient_norm, first_row.gradient_norm, 2**-6),
    )
    return [
        f"{label} {a} instead of {first_row.method}'s {b}" for label, a, b, bar in pairs
        if a is None or b is None or not abs(a / b - 1) <= bar
    ]  # fmt: skip


def bars(row: Row, peer: Row | None) -> tuple[str, list[str]]:
    """Seconds over the peer's and GiB, and which bar they miss."""
    if peer is None or peer.seconds is None or peer.status != "ok" or row.seconds is None:
        return f"bars not judged without {PEER}", []
    factor, memory = (SECONDS, GIB) if row.method == LEAN else (FAST_SECONDS, peer.peak_gib or 0.0)
    ratio, peak = row.seconds / peer.seconds, row.peak_gib or float("nan")
    problems = [f"bar of seconds: {ratio:.3f} above {factor}"] * (not ratio <= factor)
    problems += [f"bar of memory: {peak:.2f} above {memory:.2f} GiB"] * (not peak <= memory)
    return f"{ratio:.3f} x {PEER}'s seconds in {peak:.2f} GiB (its {peer.peak_gib:.2f})", problems


if __name__ == "__main__":
    sys.exit(script.main(__doc__, report, add_arguments))
