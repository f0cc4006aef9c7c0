"""Print the files and functions of streambp that one warm training step enters.

    python scripts/step_files.py                  # a table of counts
    python scripts/step_files.py --walk           # and the files and functions in order
    python scripts/step_files.py --each           # and each file with its functions and calls
    python scripts/step_files.py --json           # the calls in order, for programs
    python scripts/step_files.py --saves auto     # the saves that fit, as `streambp.patch` has it

The step is a forward with labels and a backward of a small Qwen3 with 3 layers, after steps that
warm the model up. The table has three rows. The first row counts the full step, the second row the
forward up to the first chunk of the first layer, and the third row one chunk of a layer's backward.
Without a chunk, because a short sequence may run unpatched, the last two rows are left out. Counts
are the same on every machine; they do not measure time.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import streambp
from streambp.offload.free_memory import FreeMemory

LAYERS = 3
TOKENS = 64
WARM_UP_STEPS = 3
FREE_BYTES = 2**33
FIRST_CHUNK = "run_forward"
GRADIENT_CHUNK = "_chunk_backward"
CHUNK_OF_TABLE = 5  # the second layer's second chunk of four: neither a layer's first nor its last
SAVES: dict[str, Any] = {"named": ("attn_out", "mlp.up_proj"), "none": (), "auto": "auto"}

# Python 3.12 and later run comprehensions inside their function, without a frame.
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")

Call = tuple[str, str]  # file and function


class StepCalls:
    """Calls of the package's functions, in the order in which a step makes them."""

    def __init__(self, package: Path) -> None:
        self.package = str(package) + os.sep
        self.calls: list[Call] = []

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        """Append the call if the function belongs to the package and is no comprehension. A
        callback of `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or code.co_name in COMPREHENSIONS:
            return
        if code.co_filename.startswith(self.package):
            name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
            self.calls.append((code.co_filename.removeprefix(self.package), name))

    def before_first_chunk(self) -> list[Call]:
        """Return the calls before the first chunk; [] if no layer ran in chunks."""
        names = [name for _, name in self.calls]
        if FIRST_CHUNK not in names:
            return []
        return self.calls[: names.index(FIRST_CHUNK)]

    def gradient_chunk(self) -> list[Call]:
        """Return the calls of one chunk of a layer's backward; [] if fewer chunks ran."""
        starts = [i for i, (_, name) in enumerate(self.calls) if name == GRADIENT_CHUNK]
        if len(starts) < CHUNK_OF_TABLE + 2:
            return []
        return self.calls[starts[CHUNK_OF_TABLE] : starts[CHUNK_OF_TABLE + 1]]


def make_step(saves: Any, chunks: int) -> Callable[[], None]:
    """Return a function that makes one step of a small patched model.

    Args:
        saves: of `StreamConfig`.
        chunks: number of chunks of the sequence.
    """
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=TOKENS,
    )
    settings = streambp.StreamConfig(chunk_size=TOKENS // chunks, saves=saves)
    model = streambp.patch(Qwen3ForCausalLM(config).train(), settings)
    policy = model._streambp.saves_policy
    if policy is not None:  # else a machine whose memory fills up gives up saves in some steps
        policy.free = FreeMemory(_host=FREE_BYTES, _until=math.inf)
    tokens = torch.randint(256, (1, TOKENS))

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def warm_step(saves: Any = SAVES["named"], chunks: int = 4) -> StepCalls:
    """Return the calls of a warm step."""
    step = make_step(saves, chunks)
    for _ in range(WARM_UP_STEPS):
        step()
    record = StepCalls(Path(streambp.__file__).parent)
    # a profiler sees only the thread that has set it
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(record.record)
        try:
            step()
        finally:
            sys.setprofile(None)
    return record


def files_of(calls: Sequence[Call]) -> int:
    """Return the number of files that the calls enter."""
    return len({file for file, _ in calls})


def print_counts(title: str, calls: Sequence[Call]) -> None:
    """Print a row of the table."""
    print(f"{title:<22} {files_of(calls):5} {len(set(calls)):9} {len(calls):6}")


def print_walk(title: str, calls: Sequence[Call]) -> None:
    """Print the files in the order in which the calls enter them, with their functions."""
    print(f"\n{title}")
    for file, group in itertools.groupby(calls, key=lambda call: call[0]):
        names = dict.fromkeys(name for _, name in group)
        print(f"   {file}: {' '.join(names)}")


def print_each(calls: Sequence[Call]) -> None:
    """Print each file with its number of functions and calls, the most called first."""
    print()
    counts = collections.Counter(file for file, _ in calls)
    for file, count in counts.most_common():
        functions = {name for file_of_call, name in calls if file_of_call == file}
        print(f"{count:6} calls of {len(functions):3} functions of {file}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", choices=tuple(SAVES), default="named")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--walk", action="store_true", help="also print the calls in order")
    parser.add_argument("--each", action="store_true", help="also print the calls of each file")
    parser.add_argument("--json", action="store_true", help="print the calls alone, as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    step = warm_step(SAVES[arguments.saves], arguments.chunks)
    if arguments.json:
        print(json.dumps(step.calls))
        return
    parts = {
        "a step": step.calls,
        "before the first chunk": step.before_first_chunk(),
        "a gradient chunk": step.gradient_chunk(),
    }
    print(f"{'':22} files functions  calls")
    for title, calls in parts.items():
        if calls:
            print_counts(title, calls)
    if arguments.walk:
        for title in ("before the first chunk", "a gradient chunk"):
            print_walk(title, parts[title])
    if arguments.each:
        print_each(step.calls)


if __name__ == "__main__":
    main()
