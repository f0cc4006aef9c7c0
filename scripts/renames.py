"""Prove that a change renames identifiers alone: compare syntax trees with names apart.

    python scripts/renames.py --against HEAD~1 streambp tests scripts

Every Python file of the working tree is compared with the same file at the commit; a file that git
sees as moved is compared with its new path. The trees without docstrings must be equal in all but
identifiers. Within a function, or a module, each old name must have one new name and each new name
one old name: a name that replaces two would merge two variables. A nested function's free names
belong to the function that binds them. Attributes, keywords and strings have no scope, so their
renamings are printed, to be read. The exit code is 1 if anything but names differs.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
NAMED_NODES = (ast.ExceptHandler, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IDENTIFIER_FIELDS = ("attr", "name", "arg", "module", "asname", "names", "kwd_attrs", "rest")


def bare_tree(source: str) -> ast.Module:
    """Return a source's syntax tree without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return tree


def bound_names(function: ast.AST) -> set[str]:
    """Return the names that a function binds: its parameters and what its body assigns, without
    names that it declares nonlocal or global."""
    names: set[str] = set()
    outer: set[str] = set()
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.Nonlocal, ast.Global)):
            outer.update(node.names)
        elif isinstance(node, NAMED_NODES) and node.name is not None:
            names.add(node.name)
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
    return names - outer


class Scope:
    """The names of one function or module, in both trees.

    Attributes:
        bound: the names that the scope binds, in the old tree and in the new one.
        parent: the enclosing scope; None for a module.
        new_names: the new name of each old name.
        old_names: the old name of each new name.
    """

    def __init__(self, old: ast.AST, new: ast.AST, parent: Scope | None) -> None:
        self.bound, self.parent = (bound_names(old), bound_names(new)), parent
        self.new_names: dict[str, str] = {}
        self.old_names: dict[str, str] = {}

    def of_name(self, name: str, tree: int) -> Scope:
        """Return the scope that binds a name in the old tree (0) or the new one (1): this scope, an
        enclosing one, or the module's."""
        scope = self
        while name not in scope.bound[tree] and scope.parent is not None:
            scope = scope.parent
        return scope

    def add(self, old: str, new: str) -> bool:
        """Record that an old name is called by a new one. True if both belong to one scope, and no
        other pair disagrees."""
        scope = self.of_name(old, 0)
        if scope is not self.of_name(new, 1):
            return False
        same_new = scope.new_names.setdefault(old, new) == new
        return scope.old_names.setdefault(new, old) == old and same_new


class Comparison:
    """The differences of two trees beside names.

    Attributes:
        differences: a line for each difference, with its position in the new file.
        renamed: how often each old attribute, keyword or module name got each new one.
        strings: the same of string literals.
    """

    def __init__(self) -> None:
        self.differences: list[str] = []
        self.renamed: dict[str, Counter[str]] = defaultdict(Counter)
        self.strings: Counter[tuple[str, str]] = Counter()

    def compare_files(self, path: str, old: str, new: str) -> None:
        """Compare the sources of one file."""
        trees = bare_tree(old), bare_tree(new)
        self._compare(*trees, Scope(*trees, None), path)

    def _compare(self, old: ast.AST, new: ast.AST, scope: Scope, position: str) -> None:
        if hasattr(new, "lineno"):
            position = f"{position.partition(':')[0]}:{new.lineno}"
        if type(old) is not type(new):
            self.differences.append(f"{position}: {type(old).__name__} -> {type(new).__name__}")
            return
        inner = scope
        if isinstance(old, FUNCTIONS):
            inner = Scope(old, new, scope)
        for field in old._fields:
            pair = (getattr(old, field, None), getattr(new, field, None))
            self._compare_field(field, old, pair, inner, position)

    def _compare_field(
        self, field: str, node: ast.AST, pair: tuple[object, object], scope: Scope, position: str
    ) -> None:
        old, new = pair
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for element in zip(old, new, strict=True):
                self._compare_field(field, node, element, scope, position)
        elif isinstance(old, ast.AST) and isinstance(new, ast.AST):
            self._compare(old, new, scope, position)
        elif isinstance(old, str) and isinstance(new, str):
            self._compare_text(field, node, old, new, scope, position)
        elif old != new:
            self.differences.append(f"{position}: {type(node).__name__}.{field} {old!r} -> {new!r}")

    def _compare_text(
        self, field: str, node: ast.AST, old: str, new: str, scope: Scope, position: str
    ) -> None:
        if isinstance(node, (ast.Name, ast.arg, ast.Nonlocal, ast.Global)):
            if not scope.add(old, new):
                self.differences.append(f"{position}: {old} -> {new} merges or splits a name")
        elif isinstance(node, ast.Constant):
            if old != new:
                self.strings[old, new] += 1
        elif field in IDENTIFIER_FIELDS:
            self.renamed[old][new] += 1
        elif old != new:
            self.differences.append(f"{position}: {type(node).__name__}.{field} {old!r} -> {new!r}")


def git(*arguments: str) -> str:
    """Return what git prints."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def file_pairs(commit: str, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the old and new path of each Python file that differs from the commit. An added or
    removed file has an empty path on the other side."""
    git("add", "--intent-to-add", *paths)
    for line in git("diff", "--name-status", "-M30", commit, "--", *paths).splitlines():
        status, *files = line.split("\t")
        if not files[-1].endswith(".py"):
            continue
        if status == "A":
            yield "", files[0]
        elif status == "D":
            yield files[0], ""
        else:
            yield files[0], files[-1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", default="HEAD", metavar="COMMIT")
    parser.add_argument("paths", nargs="*", default=["streambp", "tests", "scripts"])
    options = parser.parse_args(argv)
    comparison = Comparison()
    compared = 0
    for old, new in file_pairs(options.against, options.paths):
        if not (old and new):
            comparison.differences.append(f"{old or new}: on one side only")
            continue
        compared += 1
        source = git("show", f"{options.against}:{old}")
        comparison.compare_files(new, source, (ROOT / new).read_text())
    for old, names in sorted(comparison.renamed.items()):
        if set(names) != {old}:
            print(f"{old} -> " + ", ".join(f"{name} ({n})" for name, n in names.most_common()))
    for (old_text, new_text), number in comparison.strings.most_common():
        print(f"string {old_text!r} -> {new_text!r} ({number})")
    print(*comparison.differences, sep="\n")
    print(f"{compared} files with other names, {len(comparison.differences)} other differences")
    return bool(comparison.differences)


if __name__ == "__main__":
    sys.exit(main())
