"""What the scripts of this folder have in common: arguments, exit codes, and a first line that says
what they ran on."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from paper_repro.figures import GIB, commit, versions
from paper_repro.rows import Result, add_arguments, print_rows

# makes the emulated device this process' own, if STREAMBP_TEST_DEVICE says so
from tests import device as tested

ROOT = Path(__file__).parents[2]


def main(
    description: str,
    report: Callable[[argparse.Namespace], Iterable[Result]],
    add: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> int:
    """Print a script's rows and give its exit code: 0 if every row passes, 1 if one does not, 2
    without a GPU.

    Args:
        description: the script's docstring, whose first line is shown.
        report: gives the rows.
        add: adds arguments of its own.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add(parser)
    parser.add_argument("--device", default=tested.REQUESTED_DEVICE if tested.EMULATED else "cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    add_arguments(parser)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "No CUDA device: nothing was proved. Try the script itself with --device cpu --tiny.",
            file=sys.stderr,
        )
        return 2
    # a row's own process is another's child
    environment_rows = () if getattr(args, "here", None) else environment(args.device)
    return int(not print_rows(itertools.chain(environment_rows, report(args))))


def environment(device: str) -> Iterator[Result]:
    name = "CPU" if device == "cpu" else torch.get_device_module(device).get_device_name()
    yield f"{name}; {versions()}; commit {commit()}\n", True


def card_gib() -> float:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(0).total_memory / GIB


def failed(problems: Iterable[str]) -> str:
    """The end of a row's line."""
    return f"   FAILED: {'; '.join(problems)}" if problems else ""
