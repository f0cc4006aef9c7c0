"""Prove that a change rewrites docstrings and comments alone: compare syntax trees without them.

    python scripts/same_code.py --against HEAD~1                  # every Python file of the package
    python scripts/same_code.py --against HEAD~1 streambp/head    # the files below these paths

Every Python file of the working tree is compared with the same file at the commit. Docstrings of
modules, classes and functions are removed from both trees; every other difference counts, and so
does a file that exists on one side only. Comments are no part of a syntax tree, but linters, type
checkers and coverage read some of them (`# noqa`, `# type: ignore`): those must be the same, in the
same order. The exit code is 1 if a file differs.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|ruff:|mypy:|pragma:|isort:).*")


def bare_code(source: str) -> str:
    """Return the dump of a source's syntax tree without docstrings and without line numbers."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree, indent=1)


def directives(source: str) -> list[str]:
    """Return the comments that tools read, in order, each from its keyword on."""
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        match = DIRECTIVE.search(token.string) if token.type == tokenize.COMMENT else None
        if match is not None:
            comments.append(match[0])
    return comments


def difference(old_source: str, new_source: str) -> str | None:
    """Return the first difference of two sources beside docstrings and comments; None if there is
    none."""
    trees = (bare_code(old_source).splitlines(), bare_code(new_source).splitlines())
    for old, new in zip(*trees, strict=False):
        if old != new:
            return f"{old.strip()} -> {new.strip()}"
    if len(trees[0]) != len(trees[1]):
        return f"{len(trees[0])} -> {len(trees[1])} nodes"
    if directives(old_source) != directives(new_source):
        return f"{directives(old_source)} -> {directives(new_source)}"
    return None


def sources_at(commit: str, paths: Sequence[str], root: Path = ROOT) -> dict[str, str]:
    """Return the sources of the Python files below `paths` at a commit, by their path in the
    repository."""
    command = ["git", "ls-tree", "-r", "-z", "--name-only", "--full-name", commit, "--", *paths]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    sources = {}
    for name in listed.split("\0"):
        if name.endswith(".py"):
            git_command = ["git", "show", f"{commit}:{name}"]
            blob = subprocess.run(git_command, cwd=root, check=True, capture_output=True).stdout
            sources[name] = blob.decode("utf-8")
    return sources


def sources_now(paths: Sequence[str], root: Path = ROOT) -> dict[str, str]:
    """Return the sources of the Python files below `paths` in the working tree, untracked files
    included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    names = sorted({name for name in listed.split("\0") if name.endswith(".py")})
    return {name: (root / name).read_text("utf-8") for name in names if (root / name).exists()}


def problems(old_sources: dict[str, str], new_sources: dict[str, str]) -> Iterator[str]:
    """Generate a line for each file whose code differs."""
    for name in sorted({*old_sources, *new_sources}):
        if name not in new_sources:
            yield f"{name}: removed"
        elif name not in old_sources:
            yield f"{name}: added"
        else:
            change = difference(old_sources[name], new_sources[name])
            if change is not None:
                yield f"{name}: {change}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print the files whose code differs and return the exit code."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument(
        "--against", metavar="COMMIT", required=True, help="compare with this commit"
    )
    parser.add_argument(
        "paths", nargs="*", default=["streambp"], help="files or folders; default: streambp"
    )
    options = parser.parse_args(arguments)
    old_sources = sources_at(options.against, options.paths, root)
    new_sources = sources_now(options.paths, root)
    if not old_sources and not new_sources:
        parser.error(f"no Python file below {' '.join(options.paths)}")
    messages = list(problems(old_sources, new_sources))
    for problem in messages:
        print(problem)
    print(f"{len(old_sources)} files at {options.against}, {len(messages)} with other code.")
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
