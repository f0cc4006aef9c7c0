"""The default itself, `streambp.patch(model)`, at Qwen3-8B's shape: `python
tests/gpu/default_rows.py [--row NAME]`.

1. Rows of the harness, each in a process of its own, with what the last step chose, the memory that
   was predicted for it and the allocator's peak: "lengths" (2,048 to 65,536 tokens), and at 16,384
   tokens "accumulation" (two micro-batches), "AdamW" (its states are there from the second step
   on), "LoRA", "moved" (patched on the CPU, and moved) and "expandable" (torch's expandable
   segments). A row fails where its steps do: `paper_repro/figures.py`.
2. "limit SHARE WHEN": a real lack of memory. Four layers of that shape at 32,768 tokens have a step
   whose peak is known; then the process may have SHARE of it, from between two steps on, between
   forward and backward, or from a chunk's middle. The step has to end with the gradients of before,
   or to raise advice; memory is back at its start, and the next step with all memory is right.

Exit code 0 if every row holds, 1 if one does not, 2 without a GPU. `--device cpu --tiny` runs the
same code on a CPU, whose memory has no limit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from paper_repro.figures import GIB, wrong_paths
from paper_repro.harness import Job, run
from paper_repro.rows import Deadline, Result, each
from streambp.device import allocator_bytes, reports_memory
from streambp.layer import function
from tests.device import limit_memory
from tests.gpu import script
from tests.gpu.script import failed

METHOD = "streambp-default"
LENGTHS, LENGTH = (2048, 4096, 16384, 65536), (16384,)
EXPANDABLE_SEGMENTS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
JOBS: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": LENGTHS},
    "accumulation": {"micro_batches": 2},
    "AdamW": {"adamw": True},
    "LoRA": {"lora": True},
    "moved": {"moved": True},
    "expandable": {"lengths": LENGTHS[2:]},
}
SHARES, TIMES = (0.9, 0.6), ("between steps", "before backward", "in a chunk")
MAX_RELATIVE_DIFFERENCE = 2**-5  # relative: two steps in bf16 that save, and so round, otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=Path, help="also keep the rows of the harness in this file")


def report(args: argparse.Namespace) -> Iterator[Result]:
    deadline = Deadline(args.minutes)
    rows: list[tuple[str, Callable[[], Result]]] = []
    with contextlib.ExitStack() as stack:
        output = args.csv or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "rows.csv"
        rows += [(name, functools.partial(job_row, name, args, output, deadline)) for name in JOBS]
        steps = functools.lru_cache(lambda: LimitedSteps(args))
        for share in SHARES:
            for when in TIMES:
                name = f"limit {share} {when}"
                rows.append((name, functools.partial(limit_row, name, share, when, steps)))
        yield from each(rows, args.row, deadline)


def job_row(name: str, args: argparse.Namespace, output: Path, deadline: Deadline) -> Result:
    settings = {"shape": "Qwen3-8B", "lengths": LENGTH, **JOBS[name]}
    if args.tiny:
        settings |= {"shape": "mini", "lengths": (64, 200) if name == "lengths" else (200,)}
    with contextlib.ExitStack() as stack:
        if name == "expandable":
            environment = dict(os.environ)
            stack.callback(lambda: (os.environ.clear(), os.environ.update(environment)))
            os.environ.update(EXPANDABLE_SEGMENTS)
        rows = run(
            Job(name, METHOD, device=args.device, until_oom=False, **settings), output, deadline
        )
    problems = [f"{row.tokens:,} tokens: {row.status}" for row in rows if row.status != "ok"]
    text = "; ".join(
        f"{row.tokens:,} tokens {row.seconds} s, {row.peak_gib} GiB"
        for row in rows
        if row.status == "ok"
    )
    return f"{name:<24}{text}{failed(problems)}", not problems


class LimitedSteps:
    """A model that has taken three steps, what the last one gave, and its peak."""

    def __init__(self, args: argparse.Namespace) -> None:
        sizes = {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
        sizes |= {"vocab_size": 151936}
        if args.tiny:
            sizes = {
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
            }
            sizes |= {"vocab_size": 128}
        config = Qwen3Config(
            **sizes,
            num_hidden_layers=4,
            head_dim=128,
            attn_implementation="sdpa",
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        with self.device:
            self.model = Qwen3ForCausalLM(config).to(torch.bfloat16).train()
            self.ids = torch.randint(0, config.vocab_size, (1, 160 if args.tiny else 32768))
        self.device = self.model.device
        streambp.patch(self.model, streambp.StreamConfig(chunk_size=24 if args.tiny else "auto"))
        self.before_backward: Callable[[], None] | None = None
        for _ in range(2):
            self()
        if reports_memory(self.device):
            torch.accelerator.reset_peak_memory_stats(self.device)
        self()
        self.expected = {name: gradient.cpu() for name, gradient in self.gradients().items()}
        self.start = self.allocated()
        self.peak = allocator_bytes(self.device, "peak") if reports_memory(self.device) else 0

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        loss = self.model(self.ids, labels=self.ids, use_cache=False).loss
        if self.before_backward is not None:
            self.before_backward()
        loss.backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def compare_gradients(self, problems: list[str]) -> str:
        """From those of the start, which come to the device one by one: the host takes minutes for
        as many numbers."""
        gradients_now, squares = self.gradients(), [0.0, 0.0]
        problems += ["not all parameters have a gradient"] * (
            gradients_now.keys() != self.expected.keys()
        )
        for name, gradient in gradients_now.items():
            expected = self.expected[name].to(gradient.device)
            for index, x in enumerate((gradient.float() - expected.float(), expected.float())):
                squares[index] += float(torch.linalg.vector_norm(x)) ** 2
        error = math.sqrt(squares[0] / squares[1])
        problems += [f"gradients are {error:.1e} off"] * (not error <= MAX_RELATIVE_DIFFERENCE)
        return f"gradients apart by {error:.1e}"

    def allocated(self) -> int:
        """Bytes, without gradients."""
        self.model.zero_grad(set_to_none=True)
        return allocator_bytes(self.device, "allocated") if reports_memory(self.device) else 0


def limit_row(name: str, share: float, when: str, steps: Callable[[], LimitedSteps]) -> Result:
    limited_steps, problems = steps(), []
    size = int(limited_steps.start + share * (limited_steps.peak - limited_steps.start))
    lowered: list[int] = []

    def lower(*_: Any) -> None:
        if reports_memory(limited_steps.device) and not lowered:
            torch.accelerator.empty_cache()
            lowered.append(max(size, allocator_bytes(limited_steps.device, "reserved")))
            limit_memory(limited_steps.device, lowered[0])

    limited_steps.before_backward = lower if when == "before backward" else None
    try:
        with pytest.MonkeyPatch.context() as patch:
            if when == "between steps":
                lower()
            elif when == "in a chunk":
                real = function._differentiate
                patch.setattr(function, "_differentiate", lambda *args: (lower(), real(*args))[1])  # type: ignore[func-returns-value]
            limited_steps()
            text = ""
    except torch.OutOfMemoryError as error:
        text = f"raised {type(error).__name__}"
        problems += [f"no advice in {error}"] * ("StreamConfig" not in str(error))
    finally:
        limited_steps.before_backward = None
        if reports_memory(limited_steps.device):
            limit_memory(limited_steps.device, None)
    text = text or limited_steps.compare_gradients(problems)
    text += f"; {streambp.last_step(limited_steps.model)}"
    deadline = time.monotonic() + 5.0
    while (
        bytes_left := limited_steps.allocated() - limited_steps.start
    ) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)  # autograd's thread lets go of what failed once it gets Python's lock
    problems += [f"{bytes_left:,} bytes are left of it"] * (bytes_left > 0)
    limited_steps()
    next_text = limited_steps.compare_gradients(problems)
    problems += wrong_paths(limited_steps.model)
    had = (
        "no limit"
        if not lowered
        else f"{lowered[0] / GIB:.3g} of {limited_steps.peak / GIB:.3g} GiB"
    )
    problems += ["the limit was not lowered"] * (
        reports_memory(limited_steps.device) and not lowered
    )
    return f"{name:<28}{had}: {text}; the next: {next_text}{failed(problems)}", not problems


if __name__ == "__main__":
    sys.exit(script.main(__doc__, report, add_arguments))
