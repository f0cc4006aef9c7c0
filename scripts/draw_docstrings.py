"""Draw docstrings of the package at random, for a reader who sees nothing else of the code.

    python scripts/draw_docstrings.py --seed 20261131             # 60 docstrings, numbered
    python scripts/draw_docstrings.py --seed 20261131 --where     # their files and lines instead

A docstring is printed with the qualified name and the signature of its class or function. Docstrings
of modules are not drawn. The same seed draws the same docstrings from the same tree.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class DocumentedObject(NamedTuple):
    """A class or function with a docstring.

    Attributes:
        where: file and line.
        signature: qualified name, arguments and result, or a class's bases.
        docstring: the docstring without indentation.
    """

    where: str
    signature: str
    docstring: str


def signature_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """Return the first line of a definition, with the qualified name."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {name}({bases})" if bases else f"class {name}"
    result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"def {name}({ast.unparse(node.args)}){result}"


def documented_in(node: ast.AST, file: str, prefix: str = "") -> Iterator[DocumentedObject]:
    """Yield the classes and functions with a docstring inside a node of a syntax tree, in order.

    Args:
        node: the node.
        file: the file's path, for `DocumentedObject.where`.
        prefix: qualified name of the node with a dot; "" for a module.
    """
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(child)
            if docstring:
                signature = signature_of(child, prefix + child.name)
                yield DocumentedObject(f"{file}:{child.lineno}", signature, docstring)
            name = f"{prefix}{child.name}."
        yield from documented_in(child, file, name)


def draw(root: Path, seed: int, count: int) -> list[DocumentedObject]:
    """Return `count` classes and functions of the Python files below `root`, drawn at random."""
    population: list[DocumentedObject] = []
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        population.extend(documented_in(tree, str(path.relative_to(root.parent))))
    return random.Random(seed).sample(population, min(count, len(population)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the drawn docstrings, or where they are."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--where", action="store_true", help="print files and lines alone")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT / "streambp")
    options = parser.parse_args(arguments)
    for number, drawn in enumerate(draw(options.root, options.seed, options.count), 1):
        if options.where:
            print(f"{number} {drawn.where} {drawn.signature.partition('(')[0]}")
        else:
            print(f"## {number}\n{drawn.signature}\n{drawn.docstring}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
