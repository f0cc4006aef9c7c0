"""Casts of float8 weights in a warm step of a small model, and the processor time that caching the
casts spares.

    OMP_NUM_THREADS=1 python scripts/float8_casts.py                # needs torchao
    OMP_NUM_THREADS=1 python scripts/float8_casts.py --time         # the processor time instead

Casts are counted by replacing torchao's function. The model has two layers of seven Linears, rows of
64 tokens, and float8 is emulated on a CPU. With --time the model has two layers of width 1,024, a row
of 512 tokens and eight chunks, with torchao's recipe "rowwise". The time is the minimum of three
steps, with the cache of `streambp/layer/float8_linears.py` and without it. Losses and gradients of
the two are compared by `torch.equal`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")
SMALL_SIZES = {"hidden_size": 64, "intermediate_size": 64}
WIDE_SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}


def build(recipe: str, dtype: torch.dtype, sizes: dict[str, int]) -> nn.Module:
    """Return a Llama model of two layers, whose Linears train in float8.

    Args:
        recipe: name of torchao's recipe; scales are powers of two.
        dtype: dtype of the weights.
        sizes: fields of the model's configuration.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields = {"num_attention_heads": 4, "num_key_value_heads": 4, **sizes}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=2, **fields))
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=True, round_scales_to_power_of_2=True
    )
    model = model.to(dtype).train()
    convert_to_float8_training(model.model.layers, config=config)
    return model  # type: ignore[no-any-return]


def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run forward and backward of a row [1, T], and return the loss."""
    model.zero_grad()
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


def count_casts(model: nn.Module, ids: torch.Tensor) -> int:
    """Return the number of casts of weights in the second step of a model."""
    import torchao.float8.float8_linear as library

    counts: Counter[str] = Counter()
    cast: Callable[..., Any] = library.hp_tensor_to_float8_dynamic

    def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts[kwargs["gemm_input_role"].value] += 1
        return cast(tensor, *args, **kwargs)

    step(model, ids)
    with mock.patch.object(library, "hp_tensor_to_float8_dynamic", count):
        step(model, ids)
    return counts["weight"]


def print_casts() -> None:
    """Print a line for each recipe: casts unpatched, checkpointed, and in 1, 4 and 8 chunks with
    the cache and without."""
    import streambp
    from streambp.layer import packed_experts

    ids = torch.randint(512, (1, 64))
    for recipe in RECIPES:
        base = build(recipe, torch.float32, SMALL_SIZES)
        checkpointed: Any = copy.deepcopy(base)
        checkpointed.gradient_checkpointing_enable()
        columns = [f"unpatched {count_casts(copy.deepcopy(base), ids)}"]
        columns.append(f"checkpointed {count_casts(checkpointed, ids)}")
        for name, replacements in (
            ("streamed", packed_experts.float8_linears),
            ("cast in each chunk", lambda layer: []),
        ):
            with mock.patch.object(packed_experts, "float8_linears", replacements):
                for chunks in (1, 4, 8):
                    config = streambp.StreamConfig(
                        chunk_size=64 // chunks, saves=(), unpatched_runs=False
                    )
                    model = streambp.patch(copy.deepcopy(base), config)
                    columns.append(f"{name}, chunks {chunks}: {count_casts(model, ids)}")
        print(f"{recipe}: " + "; ".join(columns), flush=True)


def print_times() -> None:
    """Print processor seconds of forward and backward with the cache and without, and if losses and
    gradients are equal."""
    import streambp
    from streambp.layer import packed_experts

    ids = torch.randint(512, (1, 512))
    results = []
    for name, replacements in (
        ("cached", packed_experts.float8_linears),
        ("cast in each chunk", lambda layer: []),
    ):
        with mock.patch.object(packed_experts, "float8_linears", replacements):
            config = streambp.StreamConfig(chunk_size=64, saves=(), unpatched_runs=False)
            model = streambp.patch(build("rowwise", torch.bfloat16, WIDE_SIZES), config)
            seconds = []
            for _ in range(4):
                start = time.process_time()
                loss = step(model, ids)
                seconds.append(time.process_time() - start)
        results.append([loss, *(p.grad for p in model.parameters())])
        print(f"{name}: {min(seconds[1:]):.2f} processor seconds a step", flush=True)
    equal = all(map(torch.equal, *results))
    print(f"losses and gradients are {'equal' if equal else 'different'}")


def main() -> None:
    """Print the counts, or the times."""
    sys.path.insert(0, str(ROOT))
    summary = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--time", action="store_true", help="print the processor time")
    if parser.parse_args().time:
        print_times()
    else:
        print_casts()


if __name__ == "__main__":
    main()
