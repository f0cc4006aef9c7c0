"""List variables, parameters, fields and functions whose name is no noun or verb of the field.

    python scripts/names.py                          # the package, tests and scripts
    python scripts/names.py streambp/offload         # the files below these paths

A name on the list `RIDDLES` alone says nothing: "found" is any result, "other" any second thing.
Names that contain such a word beside a noun ("other_layer") are fine. `PUBLIC` lists names that
users or Python read: parameters of public functions, options, protocols. The exit code is 1 if there
is a name that is not public.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINED = (*FUNCTIONS, ast.ClassDef)
RIDDLES = frozenset(
    "found known told kept seen one ones other others given wanted named here there now then before "
    "after own whole left taken took gone back again moved changed written replaced reduced held "
    "holds late lack least most worth upto because missing said shown judged tried acted turned "
    "warm foreign advised derived followed instead apart let_go give_up put this that these those "
    "what whatever which who both each every such same rest only still more less few many much "
    "once always never beside beyond above below near far away alone together thus hence so yes "
    "already yet nothing nobody something anything everything somebody asked chosen done made "
    "picked refused needed used site sites".split()
)
PUBLIC: dict[str, frozenset[str]] = {}


def names_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each binding in a file: functions, parameters, assigned variables,
    fields, and attributes that methods assign."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DEFINED):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ExceptHandler) and node.name is not None:
            yield node.lineno, node.name


def riddles(root: Path, paths: Sequence[str]) -> list[str]:
    """Return file, line and name of each name that says nothing, once a file and name."""
    lines = []
    for file in sorted(file for path in paths for file in (root / path).rglob("*.py")):
        home = file.relative_to(root).as_posix()
        first: dict[str, int] = {}
        for line, name in names_of(file):
            if name in RIDDLES and name not in PUBLIC.get(home, ()):
                first[name] = min(line, first.get(name, line))
        lines += [f"{home}:{line}: {name}" for name, line in first.items()]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", default=["streambp", "tests", "scripts"])
    lines = riddles(ROOT, parser.parse_args(argv).paths)
    print(*lines, sep="\n")
    print(f"{len(lines)} names in files")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
