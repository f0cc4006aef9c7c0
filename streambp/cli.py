"""The command line: `streambp verify PATH_OR_ID`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from streambp.errors import StreamBPError
from streambp.verdict import Verification
from streambp.verify import verify

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
EXACT, NOT_EXACT, FAILED = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success (for verify: exact), 1 is not exact, 2 is bad usage or a model that cannot be judged."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except StreamBPError as error:
        print(f"streambp: {arguments.model}: {error}", file=sys.stderr)
        return FAILED
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        print(
            f"streambp: {arguments.model}: {first} Pass a smaller --seq-len, --dtype bfloat16, or --device cpu.",
            file=sys.stderr,
        )
        return FAILED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="streambp", description="Exact training on long sequences.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_verify(commands)
    return parser


def _add_verify(commands: Any) -> None:
    command = commands.add_parser(
        "verify",
        help="is streaming exact on my model?",
        description="Compare streamed gradients with the unpatched model's, parameter by parameter, on random tokens. "
        "Exit code 0: exact; 1: not exact; 2: the model could not be judged.",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command.add_argument("model", metavar="PATH_OR_ID", help="a checkpoint's folder, or its id on the Hub")
    command.add_argument("--seq-len", type=int, default=512, help="tokens (default %(default)s)")
    command.add_argument("--chunk-size", type=int, help="default: at least four chunks, the last one shorter")
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default %(default)s)")
    command.add_argument("--device", choices=("cpu", "cuda"), default=device, help="default here: %(default)s")
    command.add_argument("--saves", default="", help="comma-separated, of attn_out and kv")
    command.add_argument("--seed", type=int, default=0, help="of the random tokens (default %(default)s)")
    command.add_argument("--top", type=int, default=20, help="parameters to list, 0 for all (default %(default)s)")
    command.add_argument("--json", action="store_true", help="print JSON, with every parameter, instead of a table")
    command.set_defaults(run=_run_verify)


def _run_verify(arguments: argparse.Namespace) -> int:
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise StreamBPError("--device cuda was asked for, but torch finds no CUDA device here. Pass --device cpu.")
    model = _load(arguments.model, arguments.dtype).to(arguments.device)
    saves = tuple(name for name in arguments.saves.split(",") if name)
    result = verify(model, arguments.seq_len, arguments.chunk_size, saves, arguments.seed)
    print(_to_json(result) if arguments.json else result.table(max(arguments.top, 0)))
    return EXACT if result.exact else NOT_EXACT


def _load(path_or_id: str, dtype: str) -> PreTrainedModel:
    """The checkpoint with transformers' default attention: sdpa wherever the model has it."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=dtype)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise StreamBPError(
            f"It could not be loaded as a causal language model ({type(error).__name__}: {reason}). Pass the folder that "
            "save_pretrained wrote, or an id on the Hub that this machine can reach."
        ) from error
    return model


def _to_json(result: Verification) -> str:
    """JSON has no NaN or infinity: they become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(dataclasses.asdict(result)), indent=2, allow_nan=False)
