"""Proves the CUDA path and prints a table: `python tests/gpu/report.py [--output FILE] [--row NAME] [--minutes 8]`.

1. Gradient error of a small bf16 model against a float32 oracle, for every backend, saves and kind of spans, beside the
   unpatched model's own error; each must be at most 1.05 x that. Rows are named "plain cudnn kv" and so on.
2. Seconds and peak memory of forward and backward on two Qwen3-8B-shaped layers with their head, beside transformers'
   gradient checkpointing (third iteration, gradients None at the start). Rows are named by their length.

Every row also asserts that all layers streamed, and that the kernels which attended are those that were asked for: torch's
operations are watched, so what counts is what ran.

Exit code 0 if every row passes, 1 if one does not, 2 without a GPU. `--device cpu --tiny` runs the same code on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from paper_repro.rows import Deadline, Result, add_arguments, each, print_rows
from tests.oracle import Gradients, gradients, relative_l2

ROOT = Path(__file__).parents[2]
SAVES = ((), ("attn_out",), ("kv",), ("attn_out", "kv"))
SPANS = ("plain", "left-padded", "right-padded", "packed", "window")
BAR = 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    add_arguments(parser)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device: nothing was proved. Try the script itself with --device cpu --tiny.", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(args.output.open("w")) if args.output else None
        rows = itertools.chain(((text, True) for text in environment(args.device)), report(args))
        return int(not print_rows(copied_to(file, rows)))


def copied_to(file: TextIO | None, rows: Iterable[Result]) -> Iterator[Result]:
    for text, passed in rows:
        if file is not None:
            print(text, file=file, flush=True)
        yield text, passed


def environment(device: str) -> list[str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return [f"{name}, {versions}, commit {commit.stdout.strip() or 'unknown'}", ""]


def report(args: argparse.Namespace) -> Iterator[Result]:
    deadline = Deadline(args.minutes)
    errors = {f"{spans} {attention} {'+'.join(saves) or 'none'}": (spans, attention, saves) for spans, attention, saves in
              itertools.product(SPANS, backends(args.device), SAVES)}  # fmt: skip
    times = {str(length): length for length in ((256, 512) if args.tiny else (8192, 16384, 32768, 65536))}
    known: dict[str, Known] = {}
    yield f"{'row':<34}{'ours':>10}{'unpatched':>12}{'ratio':>8}   layers, kernels", True
    rows = [(name, functools.partial(error_row, name, *row, args, known)) for name, row in errors.items()]
    rows += [(name, functools.partial(time_row, length, args)) for name, length in times.items()]
    yield from each(rows, args.row, deadline)


@dataclasses.dataclass
class Known:
    """What all rows of one kind of spans share: the bf16 model, the batch, the true gradient and the model's own error."""

    model: Qwen3ForCausalLM
    batch: dict[str, torch.Tensor]
    truth: Gradients
    noise: float


def error_row(
    name: str, spans: str, attention: str, saves: tuple[str, ...], args: argparse.Namespace, known: dict[str, Known]
) -> Result:
    length = 96 if args.tiny else 2048
    if spans not in known:
        known.clear()
        model, batch = small_model(spans, length, args.device, 256 if args.tiny else 512)
        _, truth = gradients(model, **batch)
        model.to(torch.bfloat16)
        known[spans] = Known(model, batch, truth, relative_l2(gradients(model, **batch)[1], truth))
    model, batch, truth, noise = (getattr(known[spans], field.name) for field in dataclasses.fields(Known))
    streambp.patch(model, streambp.StreamConfig(chunk_size=length // 4 + 3, saves=saves, attention=attention))
    try:
        gradients(model, **batch)  # its layers are tried, and compared with the unpatched ones, which attend by themselves
        with KernelsSeen() as seen:
            _, found = gradients(model, **batch)
        problems = wrong_paths(model) + wrong_kernels(attention, spans, seen.names, args.device)
    finally:
        streambp.unpatch(model)
    ratio = relative_l2(found, truth) / noise
    problems += [f"error above {BAR} x the model's own"] * (not ratio <= BAR)
    kernels = ", ".join(sorted(seen.names)) or "math"
    failed = f"   FAILED: {'; '.join(problems)}" if problems else ""
    return f"{name:<34}{ratio * noise:>10.3e}{noise:>12.3e}{ratio:>8.3f}   stream, {kernels}{failed}", not problems


class KernelsSeen(TorchDispatchMode):
    """Names of the fused attention kernels that ran, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if "attention" in name and func.namespace == "aten":
            kind = next((short for part, short in KERNELS.items() if part in name), name)
            self.names.add(kind + (" backward" if name.endswith("backward") else ""))
        return func(*args, **(kwargs or {}))


KERNELS = {"cudnn": "cudnn", "flash_attention_for_cpu": "cpu flash", "flash": "flash"}


def wrong_paths(model: Qwen3ForCausalLM) -> list[str]:
    """Layers that did not stream."""
    return [
        f"{layer.name} {layer.path}: {layer.reason}" for layer in streambp.describe(model).layers if layer.path != "streams"
    ]


def wrong_kernels(attention: str, spans: str, seen: set[str], device: str) -> list[str]:
    """A kernel that was asked for must have run forward and backward; no fused one where products were asked for.

    Windows and packed rows are FlashAttention's work, and small blocks may be, with cuDNN as well.
    """
    if attention == "math":
        return [f"{', '.join(sorted(seen))} ran instead of products"] if seen else []
    if device == "cpu":
        wanted = "cpu flash"
    else:
        wanted = "flash" if spans in ("packed", "window") else attention
    return [f"{kernel} did not run" for kernel in (wanted, f"{wanted} backward") if kernel not in seen]


def backends(device: str) -> tuple[str, ...]:
    """cuDNN needs Hopper or later."""
    if device == "cpu":
        return ("auto", "math")
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    return ("cudnn", "flash", "math") if hopper else ("flash", "math")


def small_model(spans: str, length: int, device: str, width: int) -> tuple[Qwen3ForCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=width // 128, num_key_value_heads=width // 256, head_dim=128, attn_implementation="sdpa",
        use_sliding_window=spans == "window", sliding_window=length // 5, max_window_layers=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device).train()
    ids = torch.randint(0, 1024, (2, length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if spans == "packed":
        position_ids = torch.cat([torch.arange(length // 3), torch.arange(7), torch.arange(length - length // 3 - 7)])
        batch["position_ids"] = position_ids.expand(2, -1).clone()
    if "padded" in spans:
        kept = torch.ones_like(ids)
        pads = slice(0, length // 5) if spans == "left-padded" else slice(length - length // 5, length)
        kept[0, pads] = 0
        batch["attention_mask"], batch["labels"][kept == 0] = kept, -100
    return model, {name: value.to(device) for name, value in batch.items()}


def time_row(length: int, args: argparse.Namespace) -> Result:
    ours, problems = time_and_peak(length, args, True)
    stock, _ = time_and_peak(length, args, False)
    failed = f"   FAILED: {'; '.join(problems)}" if problems else ""
    return f"{length:<8} streambp {ours:>22}  checkpointing {stock:>22}   forward + backward{failed}", not problems


def time_and_peak(length: int, args: argparse.Namespace, streamed: bool) -> tuple[str, list[str]]:
    """Seconds and peak GiB of the third forward and backward, or that memory ran out; and what did not run as it should."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    if args.tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(
        **sizes, vocab_size=128 if args.tiny else 151936, head_dim=128, num_hidden_layers=2, attn_implementation="sdpa",
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device(args.device):
        model = Qwen3ForCausalLM(copy.deepcopy(config)).to(torch.bfloat16).train()
        ids = torch.randint(0, config.vocab_size, (1, length))
    if streamed:
        streambp.patch(model, streambp.StreamConfig(saves=("attn_out",)))
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    seen = KernelsSeen()
    try:
        figures = measure(model, ids, args.device, seen)
        fused = "cpu flash" if args.device == "cpu" else backends(args.device)[0]
        return figures, (wrong_paths(model) + wrong_kernels(fused, "plain", seen.names, args.device)) if streamed else []
    except torch.OutOfMemoryError:
        return "out of memory", []
    finally:
        del model
        if args.device == "cuda":
            torch.cuda.empty_cache()


def measure(model: Qwen3ForCausalLM, ids: torch.Tensor, device: str, seen: KernelsSeen) -> str:
    """Kernels are watched in the second step: the first tries layers, the third is timed."""
    on_gpu = device == "cuda"
    for number in range(3):
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with seen if number == 1 else contextlib.nullcontext():
            model(ids, labels=ids, use_cache=False).loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpu else ""
    return f"{seconds:.3f} s {peak}"


if __name__ == "__main__":
    sys.exit(main())
