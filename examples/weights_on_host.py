"""Train adapters on a model whose weights do not fit the GPU: they live in host memory, and come two layers at a time.

    python examples/weights_on_host.py
        A small Llama from scratch under a memory limit of half its weights. On a machine without a GPU the limit is that
        of the emulated device of the tests (it is built once, in half a minute).

    python examples/weights_on_host.py --model meta-llama/Llama-3.1-70B --gpu-memory 24GiB --seq-len 65536
        A checkpoint on a GPU; without --gpu-memory the limit is what the card has.

The model is loaded to the CPU and patched with `weights="cpu"`; then `model.to(device)` moves everything but the layers'
frozen weights.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import streambp
from streambp.fields import parse_bytes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.emulated import backend

MIB = 2**20


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    device = find_device()
    model = build_model(args)
    weights = sum(p.nbytes for p in model.parameters())
    limit = (
        parse_bytes("gpu_memory", args.gpu_memory)
        if args.gpu_memory
        else None
        if args.model
        else weights // 2
    )
    if limit is not None:
        limit_memory(device, limit)
    allowed = "all it has" if limit is None else f"{limit / MIB:,.0f} MiB"
    print(f"weights: {weights / MIB:,.0f} MiB; {device} may use {allowed}")
    if args.weights == "device" or not args.model:
        print(f'weights="device": {try_to_move(args, device)}')
    if args.weights == "device":
        return

    model = streambp.patch(
        model, streambp.StreamConfig(args.chunk_size, offload="cpu", weights=args.weights)
    )
    model.to(device)
    ids = torch.randint(0, model.config.vocab_size, (1, args.seq_len), device=device)  # [B, T]
    train(model, ids, args.steps, device)
    print(streambp.describe(model))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train adapters on a model whose weights do not fit the GPU."
    )
    parser.add_argument("--model", help="model id or folder; default: a small Llama from scratch")
    parser.add_argument(
        "--gpu-memory",
        metavar="BYTES",
        help='such as "24GiB"; default: half of the small model\'s weights',
    )
    parser.add_argument(
        "--weights", choices=("device", "cpu", "auto"), default="cpu", help="default: %(default)s"
    )
    parser.add_argument("--seq-len", type=int, default=256, help="tokens, T (default: %(default)s)")
    parser.add_argument("--chunk-size", type=int, default=64, help="tokens (default: %(default)s)")
    parser.add_argument(
        "--rank", type=int, default=8, help="of the adapters (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=6, help="default: %(default)s")
    return parser.parse_args()


def find_device() -> torch.device:
    """A GPU, or the emulated one of the tests."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if backend.why_not() is not None:
        raise SystemExit(f"There is no GPU, and {backend.why_not()}.")
    backend.register()
    return torch.device(backend.NAME, 0)


def limit_memory(device: torch.device, size: int) -> None:
    """Let this process have so many bytes of the device."""
    if device.type == backend.NAME:
        backend.extension().set_limit(0, size)
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), device)


def build_model(args: argparse.Namespace) -> peft.PeftModel:
    """On the CPU, frozen, with adapters on all Linears of its layers."""
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    else:
        config = LlamaConfig(
            hidden_size=256, intermediate_size=1024, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
            vocab_size=512, tie_word_embeddings=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    return peft.get_peft_model(model, peft.LoraConfig(r=args.rank, target_modules="all-linear"))


def try_to_move(args: argparse.Namespace, device: torch.device) -> str:
    """What becomes of the same model with its weights on the device."""
    model = build_model(args)
    with contextlib.suppress(torch.OutOfMemoryError):
        model.to(device)
        return "fits"
    return "out of memory"


def train(model: peft.PeftModel, ids: Tensor, steps: int, device: torch.device) -> None:
    """On one batch ids [B, T]."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        torch.accelerator.reset_peak_memory_stats(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = torch.accelerator.max_memory_allocated(device)
        print(
            f"step {step}: loss {loss.item():.3f}, peak {peak / MIB:,.0f} MiB, {time.perf_counter() - start:.1f} s"
        )


if __name__ == "__main__":
    main()
