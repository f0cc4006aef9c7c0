"""Parse command lines: convert option values, and report each error in one line.

typer is installed with transformers, whose command line uses typer. The library below typer depends
on its version. The error classes are therefore found as bases of `typer.BadParameter`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.main import get_command

from streambp.errors import ConfigError
from streambp.fields import parse_bytes, parse_tokens, short_repr

UsageError, ClickException = typer.BadParameter.__mro__[1:3]
MAX_NUMBER_DIGITS = 18  # of a whole number


def amount_parser(
    parse_number: Callable[[str, Any], int], longest: bool = False
) -> Callable[[Any], Any]:
    """Return a function that converts the text of a command-line value, such as 64k or 80GiB, to a
    number.

    Args:
        parse_number: function of (field name, text) that returns the number, or raises ConfigError.
            The field name is for the error's message; this function passes "".
        longest: True if the text "max" is accepted too, and returned as text.
    """

    def parse(text: Any) -> Any:
        if longest and text == "max":
            return text
        try:
            return parse_number("", text)
        except ConfigError as error:
            or_max = '; or "max"' if longest else ""
            raise typer.BadParameter(str(error).rstrip(".") + or_max) from None

    return parse


tokens = functools.partial(amount_parser, parse_tokens)
size = amount_parser(parse_bytes)


def number_parser(
    low: int, high: float | None = None, integers_only: bool = True
) -> Callable[[Any], Any]:
    """Return a function that converts the text of a command-line value to a number, and raises
    `typer.BadParameter` if the number is out of range.

    Args:
        low: smallest value.
        high: largest value; None: no limit.
        integers_only: True: allow integers only. False: allow any finite number, and return a
            float.
    """
    expected = f"a {'whole ' if integers_only else ''}number from {low}" + (
        "" if high is None else f" to {high:g}"
    )

    def parse(text: Any) -> Any:
        value: float = math.nan
        if not integers_only or re.fullmatch(rf"-?[0-9]{{1,{MAX_NUMBER_DIGITS}}}", str(text)):
            with contextlib.suppress(ValueError):
                value = int(text) if integers_only else float(text)
        if not low <= value <= (math.inf if high is None else high) or math.isinf(value):
            raise typer.BadParameter(f"is {short_repr(text)}; it must be {expected}")
        return value

    return parse


def choice_option(*names: Any, aliases: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return keyword arguments for typer's `Option`, for an option whose value must be one of
    `names`. The parsed value is the member of `names`, of any type, whose text was given.

    Args:
        names: the allowed values.
        aliases: other texts for members of `names`; None: there are none.
    """

    def parse(text: Any) -> Any:
        member = str(text)
        if aliases is not None:
            member = aliases.get(member, member)
        for name in names:
            if member == str(name):
                return name
        raise typer.BadParameter(
            f"is {short_repr(text)}; it must be one of {', '.join(map(str, names))}"
        )

    return {
        "parser": parse,
        "metavar": "|".join(map(str, names)),
        "autocompletion": lambda: list(map(str, names)),
    }


def hide_flag_types(command: Any) -> None:
    """Leave the type of flags out of the help pages of a command and of its subcommands. A flag
    takes no value, but a type in the help page would ask for a value.

    Args:
        command: typer's command, which is changed.
    """
    get_parameters = command.get_params

    def get_params(context: Any) -> list[Any]:
        """Return the command's parameters, with an empty placeholder for the value of each flag."""
        parameters: list[Any] = get_parameters(context)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters

    command.get_params = get_params  # get_params also adds the flag --help
    for subcommand in getattr(command, "commands", {}).values():
        hide_flag_types(subcommand)


def parse_command_line(app: typer.Typer, words: Sequence[str], program: str) -> Any:
    """Parse a command line, run its command, and return the result of the command's function.

    If the line asks for help or for the version, print the answer and return the exit code instead.

    Args:
        app: the typer application, which has the commands.
        words: the words of the line after the program's name.
        program: the program's name.

    Raises:
        ConfigError: the line is wrong. The error's text begins with the command.
    """
    command = get_command(app)
    hide_flag_types(command)
    try:
        return command.main(args=list(words), prog_name=program, standalone_mode=False)
    except typer.Abort:  # typer replaces KeyboardInterrupt by Abort
        raise KeyboardInterrupt from None
    except ClickException as error:  # type: ignore[misc]  # it is looked up
        context = getattr(error, "ctx", None)
        path = program if context is None else context.command_path
        parameter: Any = getattr(error, "param", None)
        if isinstance(error, typer.BadParameter) and parameter is not None and error.message:
            option = next(
                (name for name in parameter.opts if name.startswith("--")),
                parameter.metavar or parameter.name,
            )
            message = f"{option} {error.message.strip().rstrip('.')}."
        else:
            message = str(error.format_message()).strip().rstrip(".")  # type: ignore[attr-defined]
            message += "" if message.endswith("?") else "."
        raise ConfigError(" ".join(f"{path}: {message} See {path} --help.".split())) from None
