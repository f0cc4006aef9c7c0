"""Whole-gradient error of streamed bf16 over the unpatched bf16 model's, against float32, on ten small Qwen3 models.

python paper_repro/bf16_precision.py            gradients of the one-pass loss at the expected scale
python paper_repro/bf16_precision.py --scale-1  at scale 1, multiplied in backward: dhidden is rounded twice
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import streambp
from streambp.head import recipe
from tests.families import build, make_batch
from tests.oracle import gradients, relative_l2

SIZES = (
    (256, {"hidden_size": 64}),
    (512, {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16}),
)


class AtScaleOne:
    """OnePassNLL as if nothing were known of the upstream gradient."""

    real = recipe.OnePassNLL

    @classmethod
    def apply(cls, inputs, pending, scale, *values):
        return cls.real.apply(inputs, pending, torch.ones_like(scale), *values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scale-1", action="store_true", help="take the one-pass loss's gradients at scale 1"
    )
    if parser.parse_args().scale_1:
        recipe.OnePassNLL = AtScaleOne
    print(
        f"torch {torch.__version__}\n{'T':>4} {'seed':>4} {'one chunk':>10} {'9 chunks':>10}   ours / unpatched"
    )
    rows = [ratios(length, sizes, seed) for length, sizes in SIZES for seed in range(5)]
    means = torch.tensor(rows).mean(0).tolist()
    print(f"{'mean':>9} {means[0]:>10.3f} {means[1]:>10.3f}")


def ratios(length: int, sizes: dict[str, int], seed: int) -> list[float]:
    model = build("qwen3", seed=seed, num_hidden_layers=3, **sizes)
    batch = make_batch("plain", length=length, seed=seed)
    _, truth = gradients(model.bfloat16().float(), **batch)  # of the same weights
    model.bfloat16()
    noise = relative_l2(gradients(model, **batch)[1], truth)
    errors = []
    for chunk_size in (length, length // 8 - 3):
        streambp.patch(model, streambp.StreamConfig(kernels="own", chunk_size=chunk_size, saves=()))
        errors.append(relative_l2(gradients(model, **batch)[1], truth) / noise)
        if not math.isfinite(errors[-1]):
            raise FloatingPointError(f"gradients of chunks of {chunk_size} are not finite")
    print(f"{length:>4} {seed:>4} {errors[0]:>10.3f} {errors[1]:>10.3f}")
    return errors


if __name__ == "__main__":
    main()
