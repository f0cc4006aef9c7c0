"""`streambp launch`: run a program with the hook in its processes, and print a report."""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from streambp.errors import ConfigError
from streambp.fields import short_repr
from streambp.launch.hook import SETTINGS_VARIABLE
from streambp.launch.hook_file import install_hook, remove
from streambp.launch.report import (
    FOLDER_VARIABLE,
    collect,
    count_patched_models,
    say,
    table,
    write_record,
)
from streambp.launch.settings import LaunchSettings, settings_from_flags
from streambp.reporting import reason

SITE_FOLDER = Path(__file__).parent / "site"
EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127  # exit codes of shells
EXIT_UNPATCHED = 96
ALLOW_UNPATCHED_OPTION = "--allow-unpatched"
FORWARDED_SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2")
TERMINAL_SIGNALS = ("SIGINT", "SIGQUIT")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of the command line `streambp launch OPTIONS -- PROGRAM ARGUMENTS` at "--".
    Return two lists: "launch" with its options, and the program with its arguments. The second list
    is empty for a command line without "launch" or "--"."""
    if list(argv[:1]) != ["launch"] or "--" not in argv:
        return list(argv), []
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def run(arguments: Any) -> int:
    """Run the command `streambp launch` with parsed arguments, and return the exit code.

    Args:
        arguments: object with the flags as attributes, and the attribute `program`: the command to
            run with its arguments.

    Raises:
        ConfigError: a flag has no valid value for `StreamConfig`, or there is no program to run.
        StreamBPError: the .pth file cannot be written or removed.
    """
    settings = settings_from_flags(arguments)
    program = arguments.program
    if arguments.install or arguments.uninstall:
        if program:
            raise ConfigError(
                "--install and --uninstall run no command; leave out what follows --."
            )
        if arguments.install:
            file = install_hook()
            print(
                f"{file} is placed. Switch it on for a program with "
                f"{SETTINGS_VARIABLE}={shlex.quote(settings.to_json())}"
            )
        else:
            removed = remove()
            print(
                "No file was placed in this environment."
                if removed is None
                else f"{removed} is removed."
            )
        return 0
    if not program:
        raise ConfigError(
            "there is no command to run; put it after --: streambp launch --chunk-size 8k -- trl "
            "sft ..."
        )
    folder = ""
    lost = ""
    try:
        folder = tempfile.mkdtemp(prefix="streambp-launch-")
    except OSError as error:  # without a folder, each process prints its own report
        lost = reason(error)
    try:
        code = call(program, environment(settings, folder))
        if not lost:
            try:
                accounts, untold = collect(Path(folder))
                for account in accounts:
                    write_record(account)  # an outer `streambp launch` reads it
                say(f"end of {shlex.join(program)}")
                say("\n".join([*untold, *([table(accounts)] if accounts or not untold else [])]))
                if untold:
                    return code
                return judge(code, count_patched_models(accounts), arguments.allow_unpatched)
            except Exception as error:  # a report must not end the program
                lost = reason(error)
        say(f"what the program's processes did could not be told ({lost})")
        return code
    except NotStartedError as error:
        return error.code
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def judge(code: int, patched: int, allowed: bool) -> int:
    """Return the exit code of `streambp launch`, after its program has ended. This is the program's
    exit code, or 96 (`EXIT_UNPATCHED`) if the program succeeded although no model was patched.

    Args:
        code: the program's exit code.
        patched: number of patched models.
        allowed: True if a program may succeed without a patched model.
    """
    if patched:
        return code
    if code == 0 and not allowed:
        say(
            "no model was patched, so the program trained as it does without streambp. It may "
            "train in a loop of its own (--at train), in an interpreter that ignores PYTHONPATH "
            "(-I or -E: use streambp launch --install), or a model that cannot be streamed. "
            f"{ALLOW_UNPATCHED_OPTION} makes this no error."
        )
        return EXIT_UNPATCHED
    say("no model was patched")
    return code


def environment(settings: LaunchSettings, folder: str) -> dict[str, str]:
    """Return the environment variables for the program that `streambp launch` starts: a copy of
    this process's, with further variables from which the program's processes read the settings.

    Args:
        settings: the settings.
        folder: folder into which each process writes its record of patched models; "": each process
            prints its own report.
    """
    paths = [str(SITE_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        SETTINGS_VARIABLE: settings.to_json(),
        FOLDER_VARIABLE: folder,
        "PYTHONPATH": os.pathsep.join(paths),
    }


class NotStartedError(Exception):
    """Raised by `call` if it cannot start the program.

    Attributes:
        code: a shell's exit code for this error, 126 or 127.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def call(program: Sequence[str], variables: dict[str, str]) -> int:
    """Run a program to its end, and return its exit code as a shell does: 128 + the signal's number
    after a signal. Signals to this process are forwarded to the program.

    Args:
        program: the command and its arguments.
        variables: the program's environment variables.

    Raises:
        NotStartedError: no process could be started; the reason is printed.
    """
    came: queue.SimpleQueue[int] = queue.SimpleQueue()
    with _signals_to(came.put):
        try:
            child = subprocess.Popen(program, env=variables)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte
            say(
                f"{short_repr(program[0])} cannot be run: "
                f"{getattr(error, 'strerror', None) or error}"
            )
            if isinstance(error, FileNotFoundError):
                raise NotStartedError(EXIT_NOT_FOUND) from error
            raise NotStartedError(EXIT_NOT_EXECUTABLE) from error
        with _signals_to(child.send_signal):
            while not came.empty():
                child.send_signal(came.get())
            code = child.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _signals_to(receive: Callable[[int], None]) -> Iterator[None]:
    """Context manager in which signals to this process, such as SIGTERM, do not end the process.
    Instead, `receive` is called with the number of each signal, to forward the signal to the
    program that `streambp launch` runs.

    Signals from a terminal's keys (Ctrl-C) are ignored, because the terminal sends these to the
    program as well.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        """Call `receive` with the signal's number, unless the terminal has sent the signal to the
        program as well. The arguments are those of Python's signal handlers."""
        if signal.Signals(number).name in TERMINAL_SIGNALS:
            with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no terminal
                if os.tcgetpgrp(sys.__stdin__.fileno()) == os.getpgrp():  # type: ignore[union-attr]
                    # this process group is in the foreground, so the terminal signals the program
                    # too
                    return
        receive(number)

    numbers = []
    for name in FORWARDED_SIGNALS:
        if hasattr(signal, name):
            numbers.append(getattr(signal, name))
    handlers = {
        number: signal.signal(number, handle)
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
