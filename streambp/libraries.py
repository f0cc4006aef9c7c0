"""Other libraries: the extra that installs each, and the newest release that the tests ran with."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import warnings
from collections.abc import Iterator

from streambp.errors import MissingLibraryError

# streambp's extra for each library, by import name; programs that install streambp have no extra.
EXTRAS = {
    "trl": "trl",
    "deepspeed": "deepspeed",
    "peft": "peft",
    "accelerate": "accelerate",
    "liger_kernel": "liger",
}
PROGRAMS = {"axolotl": "axolotl", "swift": "ms-swift", "verl": "verl"}
TESTED = {"torch": (2, 14), "transformers": (5, 24), "trl": (1, 16)}  # newest tested releases


@contextlib.contextmanager
def required(library: str) -> Iterator[None]:
    """Context manager for the import of an optional library.

    Raises:
        MissingLibraryError: the library is not installed; the message has the command that installs
            it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        if library in EXTRAS:
            what = f"'streambp[{EXTRAS[library]}]'"
        else:
            what = PROGRAMS[library]
        raise MissingLibraryError(
            f"{library} is not installed. Install it: pip install {what}."
        ) from error
    warn_of_untested(library)


def warn_of_untested(*libraries: str) -> None:
    """Warn of libraries that are newer than the newest tested release."""
    for library in libraries:
        newest = TESTED.get(library)
        if newest is None:
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(library)
            found = re.match(r"(\d+)\.(\d+)", version)
            if found is not None and (int(found[1]), int(found[2])) > newest:
                shown = ".".join(map(str, newest))
                warnings.warn(
                    f"{library} {version} is newer than {shown}, the newest that streambp was "
                    f"tested with. Check your model with `streambp verify`, or install {library} "
                    f"{shown}.",
                    stacklevel=3,
                )
