"""Errors of LoRA's gradients in bfloat16 against float32, over those of unpatched peft.

    python scripts/lora_precision.py                    # each set-up; the table of docs/explanation/lora.md
    python scripts/lora_precision.py --why              # with biases alone: where the roundings are

A set-up is a family (Qwen2 has biases), the adapters' dtype, autocast, and the deviation of B. Each
number is a ratio of means over models: the error of a streamed model's whole gradient, over that of
the same model unpatched, and the standard error of this ratio. Models are small and random, one for
each seed, on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import peft
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import streambp
from streambp.layer import adapted_linear
from tests.families import build, make_batch
from tests.oracle import gradients
from tests.seeds import seed_torch

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
LENGTH, CHUNK = 97, 40
HALF_DTYPE = torch.bfloat16
FAMILIES = {"qwen3": "Qwen3", "qwen2": "Qwen2, with biases"}


class SetUp(NamedTuple):
    """A model and how it is trained.

    Attributes:
        family: a name of tests/families.py.
        wide: True for float32 adapters, False for bfloat16.
        autocast: True under bfloat16 autocast.
        std: the deviation of B.
        biases: the deviation of the Linears' biases; None: as in the tests, 0.1.
    """

    family: str
    wide: bool
    autocast: bool
    std: float
    biases: float | None = None


def model_of(set_up: SetUp, seed: int) -> nn.Module:
    """Return an unpatched model in bfloat16 with adapters on all its Linears."""
    base = build(set_up.family, HALF_DTYPE, seed, **SIZES)
    seed_torch(1000 + seed)
    config = peft.LoraConfig(r=8, target_modules="all-linear")
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=set_up.wide)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, set_up.std)
            elif name.endswith("bias") and set_up.biases is not None:
                parameter.normal_(0, set_up.biases)
    return model


def error(gradients: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Return the norm of the difference of two whole gradients."""
    parts = [(gradients[name].double() - value.double()).norm() for name, value in true.items()]
    return float(torch.stack(parts).norm())


def other_order(x: Tensor, weight: Tensor, left: Tensor, b: adapted_linear.Factor) -> Tensor:
    """Compute y as `adapted._product`, the base with its bias first."""
    columns = b.parts * b.rank
    left = left.flatten(0, -2).float()
    bias = left[:, columns:] @ b.stack[columns:].float()
    base = (x.flatten(0, -2).float() @ weight.float().mT + bias).to(x.dtype)
    result = base.float() + left[:, :columns] @ b.stack[:columns].float()
    return result.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def rounded_once(x: Tensor, weight: Tensor, left: Tensor, b: adapted_linear.Factor) -> Tensor:
    """Compute y as `adapted._product`, with no rounding before the sum is whole."""
    result = left.flatten(0, -2).float() @ b.stack.float()
    result = result.addmm_(x.flatten(0, -2).float(), weight.float().mT)
    return result.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def one_part(part_dtype: torch.dtype, dtype: torch.dtype) -> int:
    """Return the parts of a factor that is rounded to the product's dtype."""
    return 2 if dtype in adapted_linear.HALF_DTYPES else 1


def variants(why: bool) -> dict[str, tuple[str, Any]]:
    """Return `kernels` and a replacement in `adapted_linear`, by the name of what is measured."""
    setups: dict[str, tuple[str, Any]] = {"one operation": ("auto", None)}
    if why:
        setups |= {
            "streamed, peft's code": ("own", None),
            "adapters added to the base's output": ("auto", ("_product", other_order)),
            "rounded once": ("auto", ("_product", rounded_once)),
            "adapters rounded to bfloat16": ("auto", ("_parts", one_part)),
        }
    return setups


def errors(set_up: SetUp, seed: int, why: bool) -> list[float]:
    """Return the unpatched model's error and that of each variant, for one model.

    No generator: a generator that waits inside autocast leaves it on, also while another model's
    gradients in float32 are computed.
    """
    stock = model_of(set_up, seed)
    batch = make_batch("plain", length=LENGTH, seed=2000 + seed)
    true = gradients(copy.deepcopy(stock).float(), **batch)[1]
    with torch.autocast("cpu", HALF_DTYPE, enabled=set_up.autocast):
        found_errors = [error(gradients(stock, **batch)[1], true)]
        for kernels, change in variants(why).values():
            config = streambp.StreamConfig(
                chunk_size=CHUNK,
                saves=("attn_out", "kv", "*"),
                unpatched_runs=False,
                kernels=kernels,
            )
            ours = streambp.patch(copy.deepcopy(stock), config)
            if change is None:
                gradient = gradients(ours, **batch)[1]
            else:
                with mock.patch.object(adapted_linear, *change):
                    gradient = gradients(ours, **batch)[1]
            found_errors.append(error(gradient, true))
    return found_errors


def ratio(ours: list[float], stock: list[float]) -> str:
    """Return the ratio of the means with its standard error."""
    mean_ratio, stock_mean = (
        statistics.fmean(ours) / statistics.fmean(stock),
        statistics.fmean(stock),
    )
    off = [
        (our_error - mean_ratio * stock_error) / stock_mean
        for our_error, stock_error in zip(ours, stock, strict=True)
    ]
    return f"{mean_ratio:.3f} ± {statistics.stdev(off) / len(off) ** 0.5:.3f}"


def measured(set_up: SetUp, seeds: int, why: bool) -> list[str]:
    """Return the ratio of each variant."""
    columns = list(zip(*(errors(set_up, seed, why) for seed in range(seeds)), strict=True))
    stock = list(columns[0])
    return [ratio(list(column), stock) for column in columns[1:]]


def print_table(seeds: int, families: list[str]) -> None:
    """Print a row for each family, dtype and autocast, with a column for each deviation of B."""
    print("| | adapters | autocast | B's deviation 0.02 | 0.2 |\n|---|---|---|---|---|")
    for family, wide, autocast in itertools.product(families, (True, False), (False, True)):
        cells = [
            measured(SetUp(family, wide, autocast, std), seeds, False)[0] for std in (0.02, 0.2)
        ]
        dtype, cast = ("float32" if wide else "bfloat16"), ("yes" if autocast else "no")
        print(f"| {FAMILIES[family]} | {dtype} | {cast} | {cells[0]} | {cells[1]} |", flush=True)


def print_why(seeds: int) -> None:
    """Print each variant with Qwen2's biases, by the deviations of B and of the biases."""
    columns = [(0.02, 1.0), (0.2, 1.0)]
    print("B's deviation, biases' deviation:", *columns)
    rows = [measured(SetUp("qwen2", True, False, *column), seeds, True) for column in columns]
    for name, *cells in zip(variants(True), *rows, strict=True):
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=32, help="models of each set-up")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--why", action="store_true", help="other orders of rounding, with biases")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.why:
        print_why(arguments.seeds)
    else:
        print_table(arguments.seeds, arguments.families)


if __name__ == "__main__":
    main()
