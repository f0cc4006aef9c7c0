"""Import optional libraries, and compare the versions of libraries with the newest releases that
the tests ran with. If a library is missing, the error names the extra that installs the library."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from streambp.errors import ConflictingDistributionError, MissingLibraryError

# pip's name for this project, and the name of another project that installs a package `streambp`.
DISTRIBUTION = "streambp-hf"
OTHER_DISTRIBUTION = "streambp"
# streambp's extra for each library, by import name; programs that install streambp have no extra.
EXTRAS = {
    "trl": "trl",
    "deepspeed": "deepspeed",
    "peft": "peft",
    "accelerate": "accelerate",
    "liger_kernel": "liger",
}
PROGRAM_DISTRIBUTIONS = {"axolotl": "axolotl", "swift": "ms-swift", "verl": "verl"}
NEWEST_TESTED_RELEASES = {
    "torch": (2, 15),
    "transformers": (5, 24),
    "trl": (1, 16),
}  # newest tested releases


@contextlib.contextmanager
def require_library(library: str) -> Iterator[None]:
    """Context manager around the import of an optional library. If `library` (its import name) is
    not installed, the error's message has a remedy. If the library is newer than the tested
    releases, warn.

    Raises:
        MissingLibraryError: the library is not installed; the message has the command that installs
            it.
        ConflictingDistributionError: another distribution has written files into the folder of
            streambp, the package of this project.
    """
    refuse_other_distribution()
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        if library in EXTRAS:
            requirement = f"'{DISTRIBUTION}[{EXTRAS[library]}]'"
        else:
            requirement = PROGRAM_DISTRIBUTIONS[library]
        raise MissingLibraryError(
            f"{library} is not installed. Install it: pip install {requirement}."
        ) from error
    warn_of_untested(library)


def warn_of_untested(*libraries: str) -> None:
    """Warn if an installed library is newer than the newest release in `NEWEST_TESTED_RELEASES`,
    with which this project was tested.

    Args:
        libraries: import names of the libraries.
    """
    for library in libraries:
        newest = NEWEST_TESTED_RELEASES.get(library)
        if newest is None:
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(library)
            matched = re.match(r"(\d+)\.(\d+)", version)
            if matched is not None and (int(matched[1]), int(matched[2])) > newest:
                newest_text = ".".join(map(str, newest))
                warnings.warn(
                    f"{library} {version} is newer than {newest_text}, the newest that streambp "
                    f"was tested with. Check your model with `streambp verify`, or install "
                    f"{library} {newest_text}.",
                    stacklevel=3,
                )


def refuse_other_distribution() -> None:
    """Raise ConflictingDistributionError if another distribution has installed files into the
    folder of this package, streambp.

    pip lets two distributions install into the same folder. Files that both contain are replaced by
    those of the distribution installed last, so the package becomes a mixture.

    Raises:
        ConflictingDistributionError: another distribution has installed `streambp/__init__.py`.
    """
    init = Path(__file__).resolve().with_name("__init__.py")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        other_distribution = importlib.metadata.distribution(OTHER_DISTRIBUTION)
        # A clone's .egg-info lists the same files, and has no record of an installation.
        if other_distribution.read_text("RECORD") is None:
            return
        for file in other_distribution.files or ():
            if (
                file.name == init.name
                and Path(str(other_distribution.locate_file(file))).resolve() == init
            ):
                raise ConflictingDistributionError(
                    f"{init.parent} has files of two distributions: {DISTRIBUTION}, and "
                    f"{OTHER_DISTRIBUTION} {other_distribution.version}, which is another project. "
                    f"Uninstall both and install this one again: pip uninstall -y "
                    f"{OTHER_DISTRIBUTION} {DISTRIBUTION} && pip install {DISTRIBUTION}"
                )
