"""Gradient error against float64 of bf16 and float32 backward, unpatched and streamed, in chunks of several sizes.

python -m paper_repro.precision --output paper_repro/results/precision.csv [--device cuda] [--tokens 8192]

The oracle is the unpatched model in float64 with its inner float32 casts lifted (on a GPU: in float32). Errors are relative
L2 norms over the whole gradient, every parameter included.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import streambp
from paper_repro.figures import versions
from paper_repro.harness import device_name
from paper_repro.rows import Deadline, add_minutes, first_line
from tests.families import build, make_batch
from tests.oracle import Gradients, gradients, lift_float32_casts, relative_l2

FIELDS = (
    "dtype",
    "tokens",
    "chunks",
    "seed",
    "unpatched",
    "streambp",
    "ratio",
    "device",
    "versions",
)
SIZES = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=3)
    add_minutes(parser)
    args = parser.parse_args()
    deadline = Deadline(args.minutes)
    with args.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for seed in range(args.seeds):
            if not deadline.left:
                print(
                    f"not run, {args.minutes:g} minutes are over: seeds from {seed} on", flush=True
                )
                break
            try:
                for row in measure(seed, args):
                    writer.writerow(row)
                    file.flush()
            except Exception as error:  # the next seed may do
                print(
                    f"seed {seed}: FAILED, {type(error).__name__}: {first_line(error)}", flush=True
                )


def measure(seed: int, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    # the same weights in every dtype
    model = build("qwen3", seed=seed, **SIZES).to(args.device).bfloat16().float()
    batch = {
        name: x.to(args.device)
        for name, x in make_batch("plain", length=args.tokens, seed=seed).items()
    }
    truth = oracle(model, batch)
    for dtype in (torch.bfloat16, torch.float32):
        if args.device == "cuda" and dtype == torch.float32:
            continue  # that is the oracle there
        model.to(dtype)
        noise = relative_l2(gradients(model, **batch)[1], truth)
        for chunks in (1, 4, 16):
            streambp.patch(
                model,
                streambp.StreamConfig(kernels="own", chunk_size=args.tokens // chunks, saves=()),
            )
            error = relative_l2(gradients(model, **batch)[1], truth)
            if not math.isfinite(error):
                raise FloatingPointError(f"gradients of {chunks} chunks in {dtype} are not finite")
            streambp.unpatch(model)
            row = {
                "dtype": str(dtype).removeprefix("torch."),
                "tokens": args.tokens,
                "chunks": chunks,
                "seed": seed,
            }
            errors = {
                "unpatched": f"{noise:.4e}",
                "streambp": f"{error:.4e}",
                "ratio": f"{error / noise:.4f}",
            }
            print("  ".join(str(value) for value in (*row.values(), *errors.values())), flush=True)
            yield {**row, **errors, "device": device_name(args.device), "versions": versions()}
    model.to(torch.float32)


def oracle(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Gradients:
    if batch["input_ids"].is_cuda:
        return gradients(model, **batch)[1]
    with pytest.MonkeyPatch.context() as patcher:
        lift_float32_casts(patcher)
        gradient = gradients(model.double(), **batch)[1]
    model.float()
    return gradient


if __name__ == "__main__":
    main()
