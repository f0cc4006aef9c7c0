"""Processor time of a training step whose rows share a prompt: computed once, against computed for each row.

    OMP_NUM_THREADS=1 python scripts/prefix_time.py                            # 16 rows: a prompt of 256, completions of 32
    OMP_NUM_THREADS=1 python scripts/prefix_time.py --prompt 256 --completion 32 --rows 16 --layers 4 --hidden 256

Labels are of completions. Printed are seconds of processor time, the minimum over all steps, of a batch whose rows share
their prompt and of one that shares nothing, and the ratio of rows to tree beside the ratio of their tokens; the second is
also what looking for prefixes costs where there are none. Rows and tree take turns, so that a machine that is busy or slows
down does so for both. The last column is the look alone.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import streambp
from streambp.prefixes.tree import find_tree


def build(arguments: argparse.Namespace, share: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=arguments.hidden // 8,
    )
    return streambp.patch(Qwen3ForCausalLM(config).train(), streambp.StreamConfig(share_prefixes=share))


def batch_of(arguments: argparse.Namespace, shared: bool) -> dict[str, torch.Tensor]:
    length = arguments.prompt + arguments.completion
    ids = torch.randint(0, 1024, (arguments.rows, length), generator=torch.Generator().manual_seed(1))
    if shared:
        ids[:, : arguments.prompt] = ids[0, : arguments.prompt].clone()
    labels = ids.clone()
    labels[:, : arguments.prompt] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Seconds of processor time."""
    start = time.process_time()
    model(**batch, use_cache=False).loss.backward()
    spent = time.process_time() - start
    model.zero_grad(set_to_none=True)
    return spent


def look(batch: dict[str, torch.Tensor]) -> float:
    """Milliseconds of processor time that finding the tree takes, or that there is none; the minimum of some."""
    spent = []
    for _ in range(20):
        start = time.process_time()
        find_tree(batch["input_ids"])
        spent.append(time.process_time() - start)
    return 1000 * min(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"prompt": 256, "completion": 32, "rows": 16, "layers": 4, "hidden": 256, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    rows, tree = build(arguments, False), build(arguments, True)
    per_row = arguments.prompt + arguments.completion
    for shared in (True, False):
        batch = batch_of(arguments, shared)
        for model in (rows, tree):
            step(model, batch)
        pairs = [(step(rows, batch), step(tree, batch)) for _ in range(arguments.steps)]
        plain, once = (min(times) for times in zip(*pairs, strict=True))
        tokens = arguments.prompt * shared + arguments.rows * (per_row - arguments.prompt * shared)
        what = "prompt shared" if shared else "nothing shared"
        times = f"rows {plain:.3f} s, tree {once:.3f} s, ratio {plain / once:.3f}"
        ratio = arguments.rows * per_row / tokens
        print(f"{what}: {times}, ratio of tokens {ratio:.2f}, look {look(batch):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
