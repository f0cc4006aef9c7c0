"""Processor time of a warm step on a CPU with compiled regions (`kernels="compiled"`), beside the
modules as they are.

    OMP_NUM_THREADS=1 python scripts/compiled_time.py                   # lengths 2,048 and 4,096
    OMP_NUM_THREADS=1 python scripts/compiled_time.py --modules         # whole MLPs and norms, as a user compiles them
    OMP_NUM_THREADS=1 python scripts/compiled_time.py --lengths 512 --repeats 2 --backend aot_eager

A model of four layers of 512 features, float32, in four chunks, nothing saved. Both step in turns
in one process. Printed are seconds of processor time, the minimum of the repeats, their ratio, and
how often compiled code ran in a step. What the compiler takes is not in it: its first steps come
before.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from transformers import Qwen3Config, Qwen3ForCausalLM

import streambp
from streambp.model import compiled_regions

CHUNKS = 4
COMPILED_MODULES = ("mlp", "input_layernorm", "post_attention_layernorm")


class CountingBackend:
    """A backend that counts how often its graphs run."""

    def __init__(self, name: str) -> None:
        self.inner = lookup_backend(name)
        self.runs = 0

    def __call__(self, graph: Any, examples: Any) -> Callable[..., Any]:
        """The graph compiled, and counted."""
        compiled = self.inner(graph, examples)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


def step(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Seconds of processor time of forward and backward for tokens [1, T]."""
    start = time.process_time()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    spent = time.process_time() - start
    model.zero_grad(set_to_none=True)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument(
        "--modules", action="store_true", help="compile whole MLPs and norms with Module.compile"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    eager = Qwen3ForCausalLM(config).train()
    compiled = copy.deepcopy(eager)
    backend = CountingBackend(arguments.backend)
    compiled_regions.lookup_backend = lambda name: backend  # type: ignore[attr-defined, assignment]
    for layer in compiled.model.layers if arguments.modules else ():
        for name in COMPILED_MODULES:
            getattr(layer, name).compile(backend=backend, dynamic=True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {arguments.backend}")
    for length in arguments.lengths:
        tokens = torch.randint(0, 1024, (1, length))
        for model in (eager, compiled):
            kernels: Any = "own" if model is eager or arguments.modules else "compiled"
            streambp.patch(
                model, streambp.StreamConfig(chunk_size=length // CHUNKS, saves=(), kernels=kernels)
            )
            step(model, tokens)
        runs_before = backend.runs
        spent = [
            [step(model, tokens) for model in (eager, compiled)] for _ in range(arguments.repeats)
        ]
        runs = (backend.runs - runs_before) // arguments.repeats
        eager_seconds, compiled_seconds = (min(row[index] for row in spent) for index in (0, 1))
        print(
            f"T={length:,}: eager {eager_seconds:.2f} s, compiled {compiled_seconds:.2f} s, "
            f"{compiled_seconds / eager_seconds:.2f} x, {runs} runs a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
