"""Lines, classes and protocols of the code that chooses chunk sizes and saves, now and in another
commit.

    python scripts/choosing_code.py                       # of this tree
    python scripts/choosing_code.py --against edff0b2     # beside a commit of this repository

What moves tensors to the host is counted apart: it is asked by the code that chooses, and changes
for reasons of its own. Lines are those of a file; code is without blank lines, comments and
docstrings.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CHOOSING_FILES = (  # in one commit or another
    "layer/cost.py", "layer/store.py", "layer/oom.py", "offload/auto.py", "offload/fitting.py", "offload/policy.py",
    "offload/costs.py", "offload/free_memory.py", "offload/link.py", "planner/auto.py", "planner/layer_costs.py",
)  # fmt: skip
MOVING_FILES = tuple(
    f"offload/{name}.py"
    for name in ("__init__", "arena", "engines", "manager", "stores", "transfers")
)


class Count(NamedTuple):
    """Of files."""

    lines: int = 0
    code: int = 0
    functions: int = 0
    classes: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()

    def plus(self, other: Count) -> Count:
        """The sum."""
        return Count(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))  # type: ignore[arg-type]


def count(text: str) -> Count:
    """Of one file's text."""
    tree = ast.parse(text)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    protocols = [
        c
        for c in classes
        if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in c.bases)
    ]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    docstring_lines = set[int]()  # lines of docstrings
    for node in (tree, *classes, *functions):
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            docstring_lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = text.splitlines()
    code = [
        line
        for number, line in enumerate(lines, 1)
        if number not in docstring_lines and line.strip() and line.lstrip()[0] != "#"
    ]
    names, of_protocols = (tuple(node.name for node in nodes) for nodes in (classes, protocols))
    return Count(
        len(lines),
        len(code),
        len(functions),
        tuple(n for n in names if n not in of_protocols),
        of_protocols,
    )


def in_tree(file: str) -> str | None:
    """The text of a file of the package; None: there is none."""
    path = ROOT / "streambp" / file
    return path.read_text("utf-8") if path.exists() else None


def in_commit(commit: str) -> Callable[[str], str | None]:
    """As `in_tree`, of a commit."""

    def read(file: str) -> str | None:
        command = ["git", "-C", str(ROOT), "show", f"{commit}:streambp/{file}"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        return process.stdout if process.returncode == 0 else None

    return read


def report(name: str, read: Callable[[str], str | None]) -> None:
    """Print what is counted of one state of the package."""
    print(f"{name:<34} lines   code  functions  classes  protocols")
    for title, files in (("chooses", CHOOSING_FILES), ("moves", MOVING_FILES)):
        total = Count()
        for file in files:
            text = read(file)
            if text is None:
                continue
            file_count = count(text)
            total = total.plus(file_count)
            _row(f"  {file}", file_count)
        _row(title, total)
        if title == "chooses":
            print(
                f"  classes: {', '.join(total.classes)}\n  protocols: "
                f"{', '.join(total.protocols) or 'none'}"
            )


def _row(name: str, file_count: Count) -> None:
    sizes = (
        file_count.lines,
        file_count.code,
        file_count.functions,
        len(file_count.classes),
        len(file_count.protocols),
    )
    print(f"{name:<32} {sizes[0]:7,} {sizes[1]:6,} {sizes[2]:10} {sizes[3]:8} {sizes[4]:10}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", help="a commit of this repository")
    arguments = parser.parse_args()
    if arguments.against:
        report(arguments.against, in_commit(arguments.against))
    report("this tree", in_tree)


if __name__ == "__main__":
    main()
