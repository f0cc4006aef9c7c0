"""Processor time of command lines that need no model: help, a version, a wrong argument.

    python scripts/command_time.py

Each line runs in a process of its own, after one that compiled the modules, beside a Python that
does nothing and one that imports typer: their ratio is this machine's speed. Prints the median of
`--runs`. `tests/cli/test_command_line.py` asserts the cause of a short time, that no such line imports
torch or transformers.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

LINES = (
    "--help",
    "--version",
    "plan --help",
    "plan m --gpu-memory 80",
    "verify m --seq-len 5",
    "launch true",
)
PYTHON = {"python -c pass": ("-c", "pass"), "python -c 'import typer'": ("-c", "import typer")}


def spent(words: list[str], environment: dict[str, str]) -> float:
    """Processor seconds of one process and its children."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], env=environment, capture_output=True, check=False)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    commands = {name: list(words) for name, words in PYTHON.items()}
    commands |= {f"streambp {line}": ["-m", "streambp", *line.split()] for line in LINES}
    with tempfile.TemporaryDirectory() as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        empty_time = 0.0
        for name, words in commands.items():
            spent(words, environment)
            time = statistics.median(spent(words, environment) for _ in range(runs))
            empty_time = empty_time or time
            print(f"{time:5.2f} s  {time / empty_time:5.1f} x  {name}", flush=True)


if __name__ == "__main__":
    main()
