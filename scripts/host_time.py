"""Processor time of a warm training step of a model with many tiny layers: what streaming costs the
host.

checkpointing              unpatched, with gradient checkpointing
plain, lora                patched, the sequence in one chunk
8 chunks                   patched, the sequence in eight
auto, auto 8 chunks        the same with saves="auto"; the others save nothing
uncompared ...             with compare_backward=False: the rest of the case's time is the witness
first plain, first lora    the first step of a new model, in which each layer is tried

    OMP_NUM_THREADS=1 python scripts/host_time.py                       # this tree
    OMP_NUM_THREADS=1 python scripts/host_time.py --against /path/to/tree/of/another/commit

Printed are milliseconds of processor time, the minimum over all steps, and their ratio to
checkpointing, or to the other tree, then of saves="auto" to the same without saves, and to the same
without the witness, of the same model. With another tree two processes, one for each (it comes
first in PYTHONPATH), take turns, so that a machine that is busy or slows down does so for both.
Processes of one tree differ by some percent for as long as they live: `--processes 9` makes nine
pairs, one after the other. A ratio is the median over the pairs, of the minimum in each process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import streambp

ROOT = Path(__file__).resolve().parent.parent
UNCOMPARED_PREFIX = "uncompared "
STREAMED_CASES = ("plain", "8 chunks", "lora", "auto", "auto 8 chunks")
# which is not streamed
WARM_CASES = (
    "checkpointing",
    *STREAMED_CASES,
    *(UNCOMPARED_PREFIX + case for case in STREAMED_CASES if case != "auto"),
)
# the other tree may be older
HAS_COMPARE_BACKWARD = "compare_backward" in streambp.StreamConfig.__dataclass_fields__
CASES_WITHOUT_SAVES = {"auto": "plain", "auto 8 chunks": "8 chunks"}
CASES = (*WARM_CASES, "first plain", "first lora")


def build(case: str, layers: int, length: int, width: int = 32) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
    )
    model: torch.nn.Module = Qwen3ForCausalLM(config).train()
    if case == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model
    settings: dict[str, Any] = (
        {"compare_backward": False}
        if case.startswith(UNCOMPARED_PREFIX) and HAS_COMPARE_BACKWARD
        else {}
    )
    case = case.removeprefix(UNCOMPARED_PREFIX)
    saves: tuple[str, ...] | Literal["auto"] = "auto" if case.startswith("auto") else ()
    if case.endswith("8 chunks"):
        settings["chunk_size"] = length // 8
    if case == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        model.enable_input_require_grads()
    return streambp.patch(model, streambp.StreamConfig(saves=saves, **settings))


def stepper(
    case: str, layers: int, length: int, width: int, models: dict[str, torch.nn.Module]
) -> Callable[[], float]:
    """A function that runs one step and returns its processor time in milliseconds.

    Args:
        models: of cases that were built before; without the witness it is the model of the case
            with it.
    """
    base = case.removeprefix(UNCOMPARED_PREFIX)
    if base not in models:
        models[base] = build(base, layers, length, width)
    model, tokens = models[base], torch.randint(0, 64, (1, length))
    layer_states: list[Any] = []
    if HAS_COMPARE_BACKWARD and base != WARM_CASES[0]:
        steps = model._streambp.steps  # type: ignore[union-attr]
        # Other trees may have another name for the list; there the witness cannot be turned off.
        layer_states = getattr(steps, "layer_states", [])
    configs = [
        dataclasses.replace(layer_state.config, compare_backward=base == case)
        for layer_state in layer_states
    ]

    def step() -> float:
        for layer_state, config in zip(layer_states, configs, strict=True):
            layer_state.config = config
        start = time.process_time()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        spent = time.process_time() - start
        model.zero_grad(set_to_none=True)
        return spent * 1e3

    return step


def serve(arguments: argparse.Namespace) -> None:
    """Run a few steps of a case for each line that comes in, and print the shortest."""
    step_of = functools.partial(
        stepper, layers=arguments.layers, length=arguments.length, width=arguments.width
    )
    models: dict[str, torch.nn.Module] = {}
    steps = {case: step_of(case, models=models) for case in WARM_CASES if case in arguments.cases}
    for step in steps.values():
        step()
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        case = line.strip()
        if case in steps:
            print(min(steps[case]() for _ in range(arguments.steps)), flush=True)
        else:
            print(step_of(case.removeprefix("first "), models={})(), flush=True)


def served(tree: Path, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    command += [
        f"--{name}={getattr(arguments, name)}" for name in ("layers", "length", "width", "steps")
    ]
    command += ["--cases", *arguments.cases]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def ask(process: subprocess.Popen[str], case: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{case}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    trees = [ROOT, *([arguments.against.resolve()] if arguments.against else [])]
    times_by_case: dict[tuple[str, Path], list[float]] = {}  # for each process the shortest step
    for _ in range(arguments.processes):
        processes = [served(tree, arguments) for tree in trees]
        for turn in range(arguments.rounds):
            for case in arguments.cases:
                for tree, process in zip(trees, processes, strict=True):
                    step_time, case_times = (
                        ask(process, case),
                        times_by_case.setdefault((case, tree), []),
                    )
                    case_times.append(step_time if turn == 0 else min(step_time, case_times.pop()))
        for process in processes:
            process.communicate()
    for case in arguments.cases:
        times, *times_against = (times_by_case[case, tree] for tree in trees)
        references = times_against or [
            times_by_case[case, ROOT] for case in WARM_CASES[:1] if case in arguments.cases
        ]
        peers = CASES_WITHOUT_SAVES.get(case, ""), UNCOMPARED_PREFIX + case  # of the same run
        references += [times_by_case[peer, ROOT] for peer in peers if peer in arguments.cases]
        ratios = [
            statistics.median(map(operator.truediv, times, reference)) for reference in references
        ]
        pairs = zip(references, ratios, strict=True)
        yield f"{case:<24} {min(times):8.1f} ms" + "".join(
            f"   against {min(x):8.1f} ms   ratio {r:.3f}" for x, r in pairs
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="the root of another checkout")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="CASE",
        help=", ".join(CASES),
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--length", type=int, default=128, help="tokens of the one row")
    parser.add_argument("--width", type=int, default=32, help="features of a layer")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each tree and case")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="of each tree, one after the other: some are slower for life",
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    for row in rows(arguments):
        print(row)


if __name__ == "__main__":
    main()
