"""Processor time of a warm training step with saves="auto", beside the unpatched model and gradient
checkpointing.

plain            unpatched, nothing is recomputed
checkpointing    unpatched, with transformers' gradient checkpointing
saves=()         patched, layers recompute everything
saves="auto"     patched, what fits is kept; a short step runs as unpatched, with --streamed it streams too

    OMP_NUM_THREADS=1 python scripts/auto_time.py --lengths 256 4096
    OMP_NUM_THREADS=1 python scripts/auto_time.py --lengths 256 4096 --cases plain 'saves="auto"'

One thread, one process, the cases take turns; printed are milliseconds of processor time, the
minimum over all steps, and the ratios to plain and to checkpointing. `describe` tells what "auto"
kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import streambp

CASES = ("plain", "checkpointing", "saves=()", 'saves="auto"')


def build(case: str, arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    size = arguments.hidden
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=size // 32,
        num_key_value_heads=max(1, size // 64),
        head_dim=32,
        max_position_embeddings=max(arguments.lengths),
    )
    model: torch.nn.Module = Qwen3ForCausalLM(config).train()
    if case == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.startswith("saves"):
        config = streambp.StreamConfig(
            saves="auto" if "auto" in case else (), unpatched_runs=not arguments.streamed
        )
        streambp.patch(model, config)
    return model


def stepper(model: torch.nn.Module, length: int) -> Callable[[], float]:
    """A function that runs one step and returns its processor time in milliseconds."""
    tokens = torch.randint(0, 512, (1, length))

    def step() -> float:
        start = time.process_time()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        spent = time.process_time() - start
        model.zero_grad(set_to_none=True)
        return spent * 1e3

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 4096], help="tokens of the one row"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="processor time for each length"
    )
    parser.add_argument("--streamed", action="store_true", help="with unpatched_runs=False")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {case: build(case, arguments) for case in arguments.cases}
    peers = [peer for peer in CASES[:2] if peer in models]
    for length in arguments.lengths:
        steps = {case: stepper(model, length) for case, model in models.items()}
        for step in steps.values():
            step()
            step()
        times = dict.fromkeys(models, float("inf"))
        end = time.process_time() + arguments.seconds
        while time.process_time() < end:
            for case, step in steps.items():
                times[case] = min(times[case], step())
        for case in models:
            ratios = "   ".join(f"{times[case] / times[peer]:.3f} of {peer}" for peer in peers)
            print(f"T = {length:<6} {case:<14} {times[case]:9.1f} ms   {ratios}", flush=True)
        if CASES[3] in models:
            print(streambp.last_step(models[CASES[3]]), flush=True)


if __name__ == "__main__":
    main()
