"""List variables, parameters, fields and functions whose name is no noun or verb of the field.

    python scripts/names.py                          # the package, tests and scripts
    python scripts/names.py streambp/offload         # the files below these paths

A name on the list `RIDDLES` alone says nothing: "found" is any result, "other" any second thing.
Names that contain such a word beside a noun ("other_layer") are fine. `PUBLIC` lists names that
users read. The exit code is 1 if there are others.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
RIDDLES = frozenset(
    [
        "above",
        "acted",
        "advised",
        "after",
        "again",
        "alone",
        "already",
        "always",
        "anything",
        "apart",
        "asked",
        "away",
        "back",
        "because",
        "before",
        "below",
        "beside",
        "beyond",
        "both",
        "changed",
        "derived",
        "done",
        "each",
        "every",
        "everything",
        "far",
        "few",
        "followed",
        "foreign",
        "found",
        "give_up",
        "given",
        "gone",
        "held",
        "hence",
        "here",
        "holds",
        "instead",
        "judged",
        "kept",
        "known",
        "lack",
        "late",
        "least",
        "less",
        "let_go",
        "made",
        "many",
        "missing",
        "more",
        "most",
        "moved",
        "much",
        "named",
        "near",
        "needed",
        "never",
        "nobody",
        "nothing",
        "now",
        "once",
        "one",
        "ones",
        "only",
        "other",
        "others",
        "own",
        "picked",
        "put",
        "reduced",
        "refused",
        "replaced",
        "rest",
        "said",
        "same",
        "seen",
        "shown",
        "site",
        "sites",
        "so",
        "somebody",
        "something",
        "still",
        "such",
        "taken",
        "that",
        "then",
        "there",
        "these",
        "this",
        "those",
        "thus",
        "together",
        "told",
        "took",
        "tried",
        "turned",
        "upto",
        "used",
        "wanted",
        "warm",
        "what",
        "whatever",
        "which",
        "who",
        "whole",
        "worth",
        "written",
        "yes",
        "yet",
    ]
)
PUBLIC = {
    "streambp/head/log_probs.py": {"each"},
    "streambp/model/record.py": {"back", "let_go", "needed", "whole"},
    "streambp/planner/plan.py": {"said"},
    "streambp/planner/profile.py": {"moved"},  # the page of a profile reads it by name
    "streambp/verify/compare.py": {"said"},
}
OPERAND = "other"  # a parameter of methods that Python or torch names


def names_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each binding in a file: functions, parameters, assigned variables,
    fields, and attributes that methods assign."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DEFINITIONS):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg) and node.arg != OPERAND:
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
        home = os.path.relpath(file, root)
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
