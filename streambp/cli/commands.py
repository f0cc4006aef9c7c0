"""Parse a command line of `streambp`, and run its command."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from streambp.arguments import parse_command_line
from streambp.cli.app import app
from streambp.cli.checks import check
from streambp.errors import StreamBPError
from streambp.launch import command as launcher
from streambp.reporting import reason

# attributes of a namespace that are no options of the same name
NO_OPTIONS = {"command", "words", "program", "out", "extra", "model", "from_file", "from_text"}
QUOTED_TEXT = re.compile(r"((?<!\w)'[^']*'|`[^`]*`)")


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


def name_options(message: str, names: Iterable[str], with_values: bool = False) -> str:
    """Return an error's message with the options of the command line in place of the arguments of
    Python functions: "--chunk-size is '0'" for "chunk_size is '0'". Quoted text, paths, and names
    behind a dot or a bracket do not change.

    Args:
        message: the message, which names arguments of Python functions.
        names: names of the command's arguments, such as "chunk_size". Names without "_", such as
            "device", may be ordinary words of the message. Such a name is replaced only before "is"
            or "names", at the start of the message or behind a colon.
        with_values: True to also replace values: "--offload cpu or auto" for "offload='cpu' or
            'auto'".
    """
    for name in names:
        option = f"--{name.replace('_', '-')}"
        if with_values:
            value = rf"(?<![\w.(,`-]){name}='(\w+)'(?: or '(\w+)')?"
            message = re.sub(value, functools.partial(_option_text, option), message)
        if "_" in name:
            pattern = rf"(?<![\w.(\"'`=/\\-]){name}(?![\w.(=\"'`/\\-]| of )"
        else:
            pattern = rf"(?:\A|(?<=: )){name}(?= (?:is|names) )"
        parts = QUOTED_TEXT.split(message)
        for index in range(0, len(parts), 2):  # every second part is quoted
            parts[index] = re.sub(pattern, option, parts[index])
        message = "".join(parts)
    return re.sub(r"(?<=one of )\[('[^\[\]]*')\]", _unquoted, message)


def _option_text(option: str, match: re.Match[str]) -> str:
    """Return the text "--option value" or "--option value or value", for an error message.
    `name_options` calls this function to replace "name='value'".

    Args:
        option: the option, such as "--offload".
        match: match of the replaced text, with the values as groups; the second may be None.
    """
    if match[2] is None:
        return f"{option} {match[1]}"
    return f"{option} {match[1]} or {match[2]}"


def _unquoted(match: re.Match[str]) -> str:
    """Return the first group of a match with its single quotes removed. `name_options` applies this
    function to the list of allowed values in an error message."""
    return match[1].replace("'", "")


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
        options = vars(arguments).keys() - NO_OPTIONS
        message = name_options(str(error), options, arguments.command == "launch")
        raise StreamBPError(f"{name}: {message}") from error
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
