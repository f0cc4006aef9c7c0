"""What the package is made of, by folder: lines, functions, classes, protocols, named notes, tiny
functions, comments.

    python scripts/house.py                    # the tree as it stands
    python scripts/house.py --commit v0.2.0    # a commit
    python scripts/house.py --commit v0.2.0 --and-now   # both, as "before -> after"
    python scripts/house.py --used-once layer           # the functions of a folder that one place of the package uses

code: lines that are neither blank nor comment nor docstring. tiny: functions whose body, without
its docstring, has at most three lines. notes: each `[Note: name]` with its text behind it, which
other places cite. comments: lines that are, or end in, a comment, for 1,000 lines of code. longest:
lines of the longest function. Only Python is counted.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import io
import re
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "streambp"
MAX_TINY_LINES = 3
# a citation ends its sentence
NOTE = re.compile(r"^\s*(?:#\s*|\"\"\")?\[Note: [^\]]+\] [A-Z`]", re.MULTILINE)
COLUMNS = (
    "lines",
    "code",
    "functions",
    "tiny",
    "classes",
    "protocols",
    "notes",
    "comments",
    "longest",
)


@dataclasses.dataclass
class Counts:
    """Of one file, or of the files of a folder."""

    files: int = 0
    lines: int = 0
    code: int = 0
    functions: int = 0
    tiny: int = 0
    classes: int = 0
    protocols: int = 0
    notes: int = 0
    commented: int = 0
    longest: int = 0

    def __iadd__(self, other: Counts) -> Counts:
        longest = max(self.longest, other.longest)
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.longest = longest
        return self

    @property
    def comments(self) -> int:
        """Lines with a comment for 1,000 lines of code."""
        return round(1000 * self.commented / max(1, self.code))


def counts_of(source: str) -> Counts:
    """Of a file's source."""
    counts = Counts(files=1, lines=source.count("\n"), notes=len(NOTE.findall(source)))
    code, commented, documented = set(), set(), set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            documented |= (
                set(lines_of(node.body[0])) if ast.get_docstring(node) is not None else set()
            )
        if isinstance(node, ast.ClassDef):
            counts.classes += 1
            counts.protocols += "Protocol" in {
                ast.unparse(base).partition("[")[0] for base in node.bases
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            counts.functions += 1
            counts.tiny += body_lines(node) <= MAX_TINY_LINES
            counts.longest = max(counts.longest, len(lines_of(node)))
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            commented.add(token.start[0])
        elif token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    counts.code, counts.commented = len(code - documented), len(commented)
    return counts


def lines_of(node: ast.stmt) -> range:
    """The lines that a statement stands on."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, its docstring left out."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Path in the package and source of each of its files, at a commit or as they stand."""
    if commit is None:
        for path in sorted((ROOT / PACKAGE).rglob("*.py")):
            yield path.relative_to(ROOT / PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        return
    packed = subprocess.run(
        ["git", "archive", commit, PACKAGE], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                yield member.name.removeprefix(PACKAGE + "/"), content.read().decode()


def by_folder(commit: str | None) -> dict[str, Counts]:
    """Of each folder, of the files beside the folders ("."), and of all."""
    folders: dict[str, Counts] = {}
    for path, source in sources(commit):
        counts = counts_of(source)
        for name in (path.partition("/")[0] if "/" in path else ".", "all"):
            folders[name] = folders.get(name, Counts())
            folders[name] += counts
    return folders


def table(old_counts: dict[str, Counts], new_counts: dict[str, Counts] | None) -> str:
    """A Markdown table; with two sets of counts, `before -> after` where they differ."""
    rows = [f"| folder | files | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name in [*sorted({*old_counts, *(new_counts or {})} - {"all"}), "all"]:
        cells = []
        for column in ("files", *COLUMNS):
            old_value = getattr(old_counts.get(name, Counts()), column)
            new_value = getattr((new_counts or old_counts).get(name, Counts()), column)
            cells.append(
                f"{old_value:,}" if old_value == new_value else f"{old_value:,} -> {new_value:,}"
            )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def densities(counts: Counts) -> str:
    """Functions and classes for 1,000 lines of code."""
    rates = (1000 * counts.functions / counts.code, 1000 * counts.classes / counts.code)
    return "{:.0f} functions and {:.1f} classes for 1,000 lines of code".format(*rates)


def used_once(folder: str) -> Iterator[str]:
    """A line for each function of a folder whose name one place of the package reads: `T` where a
    test names it, too."""
    names: collections.Counter[str] = collections.Counter()
    for _, source in sources(None):
        for node in ast.walk(ast.parse(source)):
            names[getattr(node, "id", None) or getattr(node, "attr", None) or ""] += 1
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for path, source in sources(None):
        if (path.partition("/")[0] if "/" in path else ".") != folder:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and names[node.name] == 1:
                tested = "T" if re.search(rf"\b{node.name}\b", tests) else " "
                yield f"{tested} {body_lines(node):>3} lines  {path}:{node.lineno} {node.name}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", help="count this commit instead of the tree")
    parser.add_argument("--and-now", action="store_true", help="compare the commit with the tree")
    parser.add_argument(
        "--used-once",
        metavar="FOLDER",
        help="list its functions that one place of the package uses",
    )
    options = parser.parse_args()
    if options.used_once:
        print("\n".join(used_once(options.used_once)))
        return
    first = by_folder(options.commit)
    second = by_folder(None) if options.commit and options.and_now else None
    print(table(first, second))
    for name, counts in ((options.commit or "the tree", first), ("the tree", second)):
        if counts is not None:
            print(f"\n{name}: {densities(counts['all'])}")


if __name__ == "__main__":
    main()
