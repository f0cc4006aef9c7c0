"""The command line: `streambp verify PATH_OR_ID`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from streambp.errors import StreamBPError
from streambp.verify import verify

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success (for verify: exact), 1 is not exact, 2 is bad usage or a model that cannot stream."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except (StreamBPError, OSError, ValueError) as error:
        print(f"streambp: {arguments.model}: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="streambp", description="Exact training on long sequences.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "verify",
        help="is streaming exact on my model?",
        description="Compare streamed gradients with the unpatched model's, parameter by parameter, on random tokens.",
    )
    check.add_argument("model", metavar="PATH_OR_ID", help="a checkpoint's folder, or its id on the hub")
    check.add_argument("--seq-len", type=int, default=512, help="tokens (default %(default)s)")
    check.add_argument("--chunk-size", type=int, help="default: at least four chunks, the last one shorter")
    check.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default %(default)s)")
    check.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    check.add_argument("--saves", default="", help="comma-separated, of attn_out and kv")
    check.add_argument("--top", type=int, default=20, help="parameters to list, worst first (default %(default)s)")
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    check.set_defaults(run=_verify)
    return parser


def _verify(arguments: argparse.Namespace) -> int:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype, attn_implementation="sdpa")
    saves = tuple(name for name in arguments.saves.split(",") if name)
    result = verify(model.to(arguments.device), arguments.seq_len, arguments.chunk_size, saves)
    print(json.dumps(dataclasses.asdict(result), indent=2) if arguments.json else result.table(arguments.top))
    return 0 if result.exact else 1
