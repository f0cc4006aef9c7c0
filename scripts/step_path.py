"""What one warm, plain training step runs of streambp: `python scripts/step_path.py`.

The step is a forward with labels and a backward of a small Qwen3 (3 layers, 4 chunks, no options),
after two steps that warm it up. `--saves auto` saves what fits, as the default does: here that is
all, which is more code than computing it again. With `--chunks 1` besides, it is the step of
`streambp.patch(model)`, which runs a short sequence as unpatched. The script prints how many of the
package's files and functions the step runs, how many calls it makes, and how many functions run
before the first chunk. Counts are the same on every machine; they do not measure time.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import streambp

LAYERS, TOKENS = 3, 64
FIRST_CHUNK = "run_forward"


class StepPath:
    """Calls of the package's functions, in the order in which a step makes them."""

    def __init__(self, package: Path) -> None:
        self.package = str(package) + os.sep
        self.calls: list[tuple[str, str]] = []

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self.package):
            name = f"{frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name}"
            self.calls.append((frame.f_code.co_filename.removeprefix(self.package), name))


def plain_step(saves: Any, chunks: int) -> Any:
    """A function that makes one step of a small model that is patched with these
    `StreamConfig.saves`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = streambp.patch(
        Qwen3ForCausalLM(config), streambp.StreamConfig(chunk_size=TOKENS // chunks, saves=saves)
    )
    tokens = torch.randint(64, (1, TOKENS))

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--files", action="store_true", help="also print each file with its functions and calls"
    )
    parser.add_argument(
        "--before",
        action="store_true",
        help="also print the functions before the first chunk, in order",
    )
    parser.add_argument("--saves", choices=("none", "auto"), default="none")
    parser.add_argument("--chunks", type=int, default=4)
    args = parser.parse_args()
    step = plain_step("auto" if args.saves == "auto" else (), args.chunks)
    step()
    step()
    path = StepPath(Path(streambp.__file__).parent)
    # the profiler sees the thread that it was set in
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(path.see)
        try:
            step()
        finally:
            sys.setprofile(None)
    report(path.calls, args.files, args.before)


def report(calls: list[tuple[str, str]], each: bool, in_order: bool) -> None:
    functions = set(calls)
    first = next((i for i, (_, name) in enumerate(calls) if name == FIRST_CHUNK), None)
    before = collections.Counter(calls[:first])
    print(f"files      {len({file for file, _ in functions})}")
    print(f"functions  {len(functions)}")
    print(f"calls      {len(calls)}")
    if first is None:
        print("no layer ran in chunks: all of the step as unpatched")
    else:
        print(
            f"before the first chunk: {len(before)} functions in "
            f"{len({file for file, _ in before})} files"
        )
    if each:
        made = collections.Counter(file for file, _ in calls)
        for file, count in made.most_common():
            print(f"{count:6} {file}  ({sum(f == file for f, _ in functions)} functions)")
    if in_order:
        for (file, name), count in before.items():
            print(f"{count:6} {file}:{name}")


if __name__ == "__main__":
    main()
