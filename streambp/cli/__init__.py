"""The commands `streambp plan`, `verify`, `profile`, `launch` and `env`.

`main` imports all other modules, so that an interrupt during an import is also reported in one
line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from streambp.errors import StreamBPError
from streambp.libraries import refuse_other_distribution

EXIT_FAILED = 2
EXIT_INTERRUPTED = 130  # shells return this code after Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of `streambp` and return its exit code.

    The code 0 is success: `verify` found exact gradients, or `plan` a step that fits into memory.
    The code 1 means that gradients are not exact, or that no step fits. The code 2 means an error
    without a result, such as a wrong command line. The code 130 is an interrupt (Ctrl-C).
    `streambp launch` returns the exit code of the program that it starts, also if the program was
    interrupted, or 96 if the program succeeded without a patched model.

    Args:
        argv: the words after `streambp`; None: those of this process's command line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        refuse_other_distribution()
        commands = importlib.import_module("streambp.cli.commands")
        arguments = commands.parse(words or ["--help"])
        if isinstance(arguments, int):
            return arguments if words else EXIT_FAILED
        code: int = commands.run(arguments)
        return code
    except StreamBPError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
