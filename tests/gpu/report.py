"""Proves the CUDA path and prints a table: `python tests/gpu/report.py [--output FILE]`.

1. Gradient error of a small bf16 model against a float32 oracle, for every backend, saves and kind of spans, beside the
   unpatched model's own error; each must be at most 1.05 x that.
2. Seconds and peak memory of forward and backward on two Qwen3-8B-shaped layers with their head, beside transformers'
   gradient checkpointing (second iteration, gradients None at the start).

Exit code 0 if every error passes, 1 if one does not, 2 without a GPU. `--device cpu --tiny` runs the same code on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

import streambp
from tests.oracle import gradients, relative_l2

ROOT = Path(__file__).parents[2]
SAVES = ((), ("attn_out",), ("kv",), ("attn_out", "kv"))
SPANS = ("plain", "left-padded", "right-padded", "packed", "window")
BAR = 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device: nothing was proved. Try the script itself with --device cpu --tiny.", file=sys.stderr)
        return 2
    lines: list[str] = []
    passed = True
    for line, good in itertools.chain(((text, True) for text in environment(args.device)), report(args)):
        print(line, flush=True)
        lines.append(line)
        passed &= good
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    return 0 if passed else 1


def environment(device: str) -> list[str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return [f"{name}, {versions}, commit {commit.stdout.strip() or 'unknown'}", ""]


def report(args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    yield f"{'attention':<10}{'saves':<14}{'spans':<14}{'ours':>10}{'unpatched':>12}{'ratio':>8}", True
    for spans in SPANS:
        yield from errors(spans, args)
    yield "", True
    yield f"{'T':>8}  {'streambp':>22}  {'checkpointing':>22}   forward + backward, seconds and peak GiB", True
    for length in (256, 512) if args.tiny else (8192, 16384, 32768, 65536):
        yield f"{length:>8}  {time_and_peak(length, args, True):>22}  {time_and_peak(length, args, False):>22}", True


def errors(spans: str, args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """One line for each backend and saves."""
    length = 96 if args.tiny else 2048
    model, batch = small_model(spans, length, args.device)
    _, truth = gradients(model, **batch)
    model.to(torch.bfloat16)
    _, stock = gradients(model, **batch)
    noise = relative_l2(stock, truth)
    for attention in backends(args.device, spans):
        for saves in SAVES:
            config = streambp.StreamConfig(chunk_size=length // 8 - 3, saves=saves, attention=attention)
            _, found = gradients(streambp.patch(model, config), **batch)
            streambp.unpatch(model)
            ratio = relative_l2(found, truth) / noise
            mark = "" if ratio <= BAR else "   FAILED"
            row = f"{attention:<10}{'+'.join(saves) or 'none':<14}{spans:<14}"
            yield f"{row}{ratio * noise:>10.3e}{noise:>12.3e}{ratio:>8.3f}{mark}", ratio <= BAR


def backends(device: str, spans: str) -> tuple[str, ...]:
    """cuDNN needs Hopper or later; windows are FlashAttention's work."""
    if device == "cpu":
        return ("auto", "math")
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    return ("cudnn", "flash", "math") if hopper else ("flash", "math")


def small_model(spans: str, length: int, device: str) -> tuple[Qwen3ForCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, attn_implementation="sdpa",
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


def time_and_peak(length: int, args: argparse.Namespace, streamed: bool) -> str:
    """Seconds and peak GiB of the second forward and backward, or that memory ran out."""
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
    try:
        return measure(model, ids, args.device)
    except torch.OutOfMemoryError:
        return "out of memory"
    finally:
        del model
        if args.device == "cuda":
            torch.cuda.empty_cache()


def measure(model: Qwen3ForCausalLM, ids: torch.Tensor, device: str) -> str:
    on_gpu = device == "cuda"
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        model(ids, labels=ids, use_cache=False).loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpu else ""
    return f"{seconds:.3f} s {peak}"


if __name__ == "__main__":
    sys.exit(main())
