"""Processor time of plans, and whether their memory is the same as another commit's.

    OMP_NUM_THREADS=1 python scripts/plan_time.py                       # this tree
    OMP_NUM_THREADS=1 python scripts/plan_time.py --against /path/to/tree/of/another/commit

Each model is planned in a process of its own, for one tree (it comes first in PYTHONPATH) and then
for the other, so that a machine that is busy is so for both. Printed are seconds of processor time
without imports, the least of `--times` runs: of the first plan beside what it may take, and of a
second one of the same model where the tree keeps what was counted. Memory is every number of every
method's phases, in both regimes, and of the host; the exit code is 1 where one of them differs
between the trees.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES_DIFFERENCE = (
    0.05  # by which lines of the same bytes may differ: they are solved for in float64
)
LAW_FEATURES = ("one", "tokens", "chunk", "chunks")  # of the features of a law, the first
# seconds of a first plan; 1 of a second
MAX_SECONDS = {"Qwen3-8B": 6, "Qwen3-30B-A3B": 9, "gemma3-27b": 12, "Qwen3.5-9B": 20}
MODELS = tuple(MAX_SECONDS)
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32}


def configs() -> dict[str, Callable[[], Any]]:
    """The models' shapes."""
    import transformers as t

    dense = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    }
    sparse = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    }
    experts = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    gemma = {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024, "vocab_size": 262208,
        "query_pre_attn_scalar": 168,
    }  # fmt: skip
    loaded_configs = (
        functools.partial(t.Qwen3Config, **QWEN3, **dense),
        functools.partial(t.Qwen3MoeConfig, **QWEN3, **sparse, **experts),
        functools.partial(t.Gemma3TextConfig, **gemma),
        t.Qwen3_5TextConfig,
    )
    return dict(zip(MODELS, loaded_configs, strict=True))


def count(name: str) -> dict[str, Any]:
    """Seconds of plans of a model in this process, and the numbers of the first."""
    import inspect

    from streambp.planner import plan
    from streambp.planner.profile import to_json

    config = configs()[name]()
    has_cache = "cache" in inspect.signature(plan).parameters
    spent = []
    for _ in range(1 + has_cache):
        begun = time.process_time()
        result = plan(config, 65536, gpu_memory="141GiB", **({"cache": True} if has_cache else {}))
        spent.append(time.process_time() - begun)
    methods = to_json(result.profile)["methods"]
    numbers = {
        f"{method['name']}, {regime}, {number} {phase['name']}, {field}": value
        for method in methods
        for regime in ("first", "accumulating")
        for number, phase in enumerate(method[regime])
        for field, value in zip(LAW_FEATURES, phase["law"], strict=False)
    }
    for method in methods:
        numbers |= {
            f"{method['name']}, host, {field}": value
            for field, value in zip(LAW_FEATURES, method["host"], strict=False)
        }
    return {"spent": spent, "numbers": numbers}


def counted(tree: Path, name: str, times: int) -> dict[str, Any]:
    """`count` in processes with that tree; the least seconds."""
    runs = [_counted(tree, name) for _ in range(times)]
    return runs[0] | {
        "spent": [min(spent) for spent in zip(*(run["spent"] for run in runs), strict=True)]
    }


def _counted(tree: Path, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": folder}
        command = [sys.executable, "-W", "ignore", __file__, "--count", name]
        process = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    counts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return counts


def differing(ours: dict[str, float], theirs: dict[str, float]) -> list[str]:
    """The numbers that are not the same."""
    names = [
        name
        for name in ours.keys() & theirs.keys()
        if abs(ours[name] - theirs[name]) > MAX_BYTES_DIFFERENCE
    ]
    return sorted(names) + sorted(ours.keys() ^ theirs.keys())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, metavar="TREE", help="of another commit")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL")
    parser.add_argument(
        "--times", type=int, default=1, metavar="N", help="runs of each (default %(default)s)"
    )
    parser.add_argument("--count", choices=MODELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.count:
        print(json.dumps(count(arguments.count)))
        return 0
    wrong = 0
    for name in arguments.models:
        ours = counted(ROOT, name, arguments.times)
        line = (
            f"{name:16} {ours['spent'][0]:6.1f} s (bar {MAX_SECONDS[name]}), a second plan "
            f"{ours['spent'][1]:.2f} s (bar 1)"
        )
        if arguments.against is not None:
            theirs = counted(arguments.against, name, arguments.times)
            different = differing(ours["numbers"], theirs["numbers"])
            wrong += len(different)
            share = theirs["spent"][0] / ours["spent"][0]
            line += f"; the other tree {theirs['spent'][0]:6.1f} s, {share:.2f} x; "
            line += f"{len(ours['numbers'])} memory numbers, {len(different) or 'none'} different"
            line += "".join(f"\n    {name_of_difference}" for name_of_difference in different[:5])
        print(line, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
