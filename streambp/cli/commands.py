"""Parse a command line of `streambp`, and run its command."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streambp.arguments import parse_command_line
from streambp.cli.app import app
from streambp.cli.checks import check
from streambp.errors import StreamBPError
from streambp.launch import command as launcher
from streambp.reporting import reason


def parse(words: Sequence[str]) -> Any:
    """Return a command's parsed arguments as a namespace, or an exit code if a help page or the
    version was printed. torch is not imported.

    The namespace also has `words` (for `launch`, those before "--"), `program` (the words behind
    "--"), and `out` (the stream for the command's output).

    Args:
        words: the words after `streambp`.

    Raises:
        ConfigError: the command line is wrong.
    """
    ours, program = launcher.split(words)
    arguments = parse_command_line(app, ours, "streambp")
    if not isinstance(arguments, int):
        arguments.words = ours
        arguments.program = program
        arguments.out = sys.stdout
    return arguments


def run(arguments: Any) -> int:
    """Run a command with the parsed arguments of `parse`, and return its exit code.

    Other libraries may print to stdout. stdout is therefore redirected to stderr, except for
    `arguments.out`, the command's own output.

    Args:
        arguments: the namespace that `parse` returned.

    Raises:
        StreamBPError: the command failed. The message begins with the command's name.
    """
    name = f"streambp {arguments.command}"
    try:
        check(arguments)
        if arguments.command == "launch":
            return launcher.run(arguments)
        with contextlib.redirect_stdout(sys.stderr):
            runs = importlib.import_module("streambp.cli.runs")
            code: int = getattr(runs, f"run_{arguments.command}")(arguments)
        return code
    except StreamBPError as error:
        raise StreamBPError(f"{name}: {error}") from error
    except Exception as error:  # exit code 1 would mean a verdict
        if "torch" in sys.modules and importlib.import_module("streambp.device").is_out_of_memory(
            error
        ):
            advice = "Pass a smaller --seq-len, --dtype bfloat16, or --device cpu."
            raise StreamBPError(f"{name}: {str(error).splitlines()[0]} {advice}") from error
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        message = (
            f"{reason(error)} (in {where}). That is no verdict: check the arguments, or report it "
            "with `streambp env`."
        )
        raise StreamBPError(f"{name}: {message}") from error
