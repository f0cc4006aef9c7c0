"""Rows of a table, one after the other: chosen by name, within a time, each printed as it is measured.

A script for a GPU is given minutes on it, and is cut off when they are over. So no row waits for another: a row that fails
is printed with its error and the next one begins, and rows for which no time is left are named, for another call.

[Note: lost devices] After some errors of a kernel (an illegal address, say) a process gets nothing from its GPU any more
but that error. So the rows that follow run in a new process, which takes the place of this one.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

MINUTES = 8.0
FAILED_BEFORE = (
    "STREAMBP_ROWS_FAILED"  # set for a process that takes another's place. [Note: lost devices]
)


class Deadline:
    """When a script has to be done."""

    def __init__(self, minutes: float = MINUTES) -> None:
        self.minutes = minutes
        self._end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds; 0 when it is over."""
        return max(0.0, self._end - time.monotonic())


def add_minutes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help=f"begin no row after that; default {MINUTES:g}",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--row and --minutes, as `each` wants them."""
    parser.add_argument(
        "--row",
        action="append",
        metavar="NAME",
        help="rows of this name alone (* stands for anything)",
    )
    add_minutes(parser)


Result = tuple[str, bool]  # a line of the table, and whether it passed


def each(
    rows: Iterable[tuple[str, Callable[[], Result]]], names: list[str] | None, deadline: Deadline
) -> Iterator[Result]:
    """The rows of these names (None: all), one by one; an error is a row that did not pass. One line names those for which
    no time was left; it does not pass either."""
    skipped_rows = []
    selected_rows = [
        row
        for row in rows
        if names is None or any(fnmatch.fnmatch(row[0], pattern) for pattern in names)
    ]
    for number, (name, measure) in enumerate(selected_rows, 1):
        if not deadline.left:
            skipped_rows.append(name)
            continue
        try:
            yield measure()
        except Exception as error:  # the next row may do
            yield (
                f"{name}: FAILED, {type(error).__name__}{place_of(error)}: {first_line(error)}",
                False,
            )
            if number < len(selected_rows) and device_is_lost():
                yield (
                    "the GPU gives this process nothing but errors; the next rows run in a new one",
                    False,
                )
                start_again([name for name, _ in selected_rows[number:]], deadline)
    if skipped_rows:
        yield (
            f"not run, {deadline.minutes:g} minutes are over: "
            + " ".join(f"--row '{name}'" for name in skipped_rows),
            False,
        )
    if not selected_rows:
        yield f"no row is named {' or '.join(map(repr, names or ['anything']))}", False


def device_is_lost() -> bool:
    """Whether this process has a GPU that it gets nothing from any more. [Note: lost devices]"""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def start_again(names: list[str], deadline: Deadline) -> None:
    """This program anew for these rows, in the time that is left. [Note: lost devices]"""
    sys.stdout.flush()
    words, arguments = [], iter(sys.orig_argv[1:])
    for word in arguments:
        if word in ("--row", "--minutes"):
            next(arguments)
        else:
            words.append(word)
    rows = [word for name in names for word in ("--row", name)]
    os.environ[FAILED_BEFORE] = "1"
    os.execv(sys.executable, [sys.executable, *words, *rows, "--minutes", str(deadline.left / 60)])


def place_of(error: BaseException) -> str:
    """The last line of this repository's code on an error's way; where a device works beside the host, it may be a later
    one than the line at fault."""
    root = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(root)
    ][1:]  # not `each`
    return f" in {os.path.relpath(frames[-1].filename, root)}:{frames[-1].lineno}" if frames else ""


def first_line(error: object) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a child process ended: its exit code, None if it was stopped, and the last line that it wrote to stderr."""

    code: int | None
    last_words: str

    def __str__(self) -> str:
        if self.code is None:
            return "stopped: no time was left"
        return f"failed with exit code {self.code}: {self.last_words}"


class Forked:
    """A child of this process that calls a function; of `subprocess.Popen`, the part that `run_child` needs.

    It has all that this process has imported, which saves a new one's seconds. This process must not have touched a GPU.
    """

    def __init__(self, call: Callable[[], object], errors: IO[str]) -> None:
        sys.stdout.flush()
        read_end, write_end = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.dup2(write_end, 1)
                os.dup2(errors.fileno(), 2)
                sys.stdout, sys.stderr = (
                    os.fdopen(number, "w", closefd=False) for number in (1, 2)
                )
                call()
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(write_end)
        self.stdout = os.fdopen(read_end, errors="replace")

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def run_child(
    command: list[str] | Callable[[], object],
    cwd: Path,
    deadline: Deadline,
    line: Callable[[str], None],
) -> Ended:
    """Run a command, or a function in a `Forked` child, and hand on each line of its output as it comes; when the time is
    over it is killed."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child: Any
        if callable(command):
            child = Forked(command, errors)
        else:
            child = subprocess.Popen(
                command, cwd=cwd, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        over = threading.Event()

        def stop() -> None:
            over.set()
            child.kill()

        timer = threading.Timer(min(deadline.left, threading.TIMEOUT_MAX), stop)
        timer.start()
        try:
            assert child.stdout is not None
            for text in child.stdout:
                line(text.rstrip("\n"))
            code = child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:
                child.kill()
                child.wait()
        errors.seek(0)
        words = [text for text in errors.read().splitlines() if text.strip()]
    return Ended(None if over.is_set() else code, words[-1] if words else "no message")


def print_rows(rows: Iterable[Result]) -> bool:
    """Print each as it comes; whether all passed."""
    passed = FAILED_BEFORE not in os.environ
    for text, good in rows:
        print(text, flush=True)
        passed &= good
    sys.stdout.flush()
    return passed
