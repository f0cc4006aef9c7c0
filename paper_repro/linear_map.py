"""The idea on a linear map: y = relu(x W1) W2 differentiated whole, and in D pieces of the rows of x.

python -m paper_repro.linear_map [--output FILE]

The chain rule is linear in the output: dW = sum over pieces i of J_i(W)^T g_i (paper, section 3.1). The gradients are the
same numbers in another order of addition, the products the same, and the intermediate of one piece is all that lives.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from paper_repro.rows import Deadline, Result, add_arguments, each, print_rows
from streambp.planner.count import LiveBytes
from tests.counting import LinearFlops

TOKENS, WIDTH, INNER = 8192, 512, 2048
BAR, FAILED = 1e-12, "  FAILED: the pieces do not add up to the whole"
FIELDS = ("pieces", "peak_mib", "gflop", "seconds", "relative_error")


def whole(x: Tensor, weights: list[Tensor]) -> Tensor:
    return torch.relu(x @ weights[0]) @ weights[1]


def differentiate(x: Tensor, weights: list[Tensor], upstream: Tensor, chunks: int) -> list[Tensor]:
    """dW1 and dW2, one piece of the rows at a time."""
    sums = [torch.zeros_like(weight) for weight in weights]
    for part, gradient in zip(x.chunk(chunks), upstream.chunk(chunks), strict=True):
        for total, gradient_part in zip(
            sums, torch.autograd.grad(whole(part, weights), weights, gradient), strict=True
        ):
            total += gradient_part
    return sums


def measure(chunks: int, x: Tensor, weights: list[Tensor], upstream: Tensor) -> dict[str, object]:
    """One row of the table; the third run is the one that is timed."""
    truth = torch.autograd.grad(whole(x, weights), weights, upstream)
    with LiveBytes() as count, LinearFlops() as flops:
        gradients = differentiate(x, weights, upstream, chunks)
    for _ in range(2):
        start = time.perf_counter()
        float(differentiate(x, weights, upstream, chunks)[0].sum())  # waits for the device
        seconds = time.perf_counter() - start
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, truth, strict=True))
    memory = {
        "pieces": chunks,
        "peak_mib": round(count.peak / 2**20, 2),
        "gflop": round(flops.total / 1e9, 2),
    }
    return {**memory, "seconds": round(seconds, 3), "relative_error": f"{error:.1e}"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="CSV file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    x, upstream = (
        torch.randn(TOKENS, WIDTH, dtype=torch.float64, device=args.device) for _ in range(2)
    )
    sizes = ((WIDTH, INNER), (INNER, WIDTH))
    weights = [
        torch.randn(*size, dtype=torch.float64, device=args.device).requires_grad_()
        for size in sizes
    ]
    with (
        contextlib.nullcontext()
        if args.output is None
        else args.output.open("w", newline="") as file
    ):
        writer = None if file is None else csv.DictWriter(file, FIELDS, lineterminator="\n")
        if writer is not None:
            writer.writeheader()

        def row(chunks: int) -> Result:
            columns = measure(chunks, x, weights, upstream)
            if writer is not None and file is not None:
                writer.writerow(columns)
                file.flush()
            exact = float(columns["relative_error"]) <= BAR
            return "  ".join(f"{name} {value:>8}" for name, value in columns.items()) + FAILED * (
                not exact
            ), exact

        rows = [(str(chunks), functools.partial(row, chunks)) for chunks in (1, 2, 4, 8, 16, 32)]
        return int(not print_rows(each(rows, args.row, Deadline(args.minutes))))


if __name__ == "__main__":
    sys.exit(main())
