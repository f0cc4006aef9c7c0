"""Show on a terminal what takes long in a first step.

A first step counts its memory, tries each layer and pins host memory. This takes seconds to
minutes, in which the program prints nothing. A line that is erased afterwards says what is being
done. Programs whose standard error is a file or a pipe, and ranks other than 0, show nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from torch import distributed

ERASE = "\r\033[K"  # erases the terminal's current line


@contextlib.contextmanager
def progress_line(doing: str) -> Iterator[None]:
    """Context manager that shows a line of text on the terminal during a long operation, and erases
    the line at the end.

    Nothing is shown without a terminal, or on a rank other than 0. A failed write is ignored.

    Args:
        doing: text on what the program is doing, without the package's name.
    """
    shows = False
    with contextlib.suppress(Exception):  # standard error may be None, closed or replaced
        shows = sys.stderr.isatty() and _is_first_rank()
    if shows:
        # The cursor returns to the line's start, so that a warning covers the line.
        _write(f"{ERASE}streambp: {doing}\r")
    try:
        yield
    finally:
        if shows:
            _write(ERASE)


def _write(text: str) -> None:
    """Write to standard error at once."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def _is_first_rank() -> bool:
    """True if this process is rank 0, or the only process."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
