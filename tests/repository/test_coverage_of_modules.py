"""Every module has a test file, beside those that need a GPU, whose docstring names it after the
word covers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "streambp"
COVERS = re.compile(r"^covers:(.*?)(?:\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)


def modules(package):
    """Paths in the package of all modules; of __init__.py those that hold more than a docstring."""
    for path in package.rglob("*.py"):
        body = ast.parse(path.read_text("utf-8")).body
        documented = (
            bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        )
        if path.name != "__init__.py" or len(body) > documented:
            yield path.relative_to(package).as_posix()


def covered(file):
    """The modules that a test file's docstring says it covers."""
    docstring = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    match = COVERS.search(docstring)
    return {name.strip() for name in match[1].split(",")} if match else set()


def problems(package, files):
    """Modules that no file names, and names of modules that are not there."""
    existing_modules, covered_modules = (
        set(modules(package)),
        {file: covered(file) for file in files},
    )
    yield from (
        f"no test file covers {name}"
        for name in sorted(existing_modules - set().union(*covered_modules.values()))
    )
    yield from (
        f"{file.name} covers {name}, which is not there"
        for file in covered_modules
        for name in sorted(covered_modules[file] - existing_modules)
    )


@pytest.mark.full
def test_every_module_is_covered_by_a_test_file():
    files = [
        file for file in sorted((ROOT / "tests").rglob("test_*.py")) if file.parent.name != "gpu"
    ]
    assert list(problems(PACKAGE, files)) == []


@pytest.mark.parametrize(
    ("covers", "expected"),
    [
        ("covers: a.py,\n  b/c.py, b/__init__.py", []),
        (
            "covers: a.py\n\nb/c.py, b/__init__.py are named by prose alone",
            ["b/__init__.py", "b/c.py"],
        ),
        ("covers: a.py, b/c.py, b/__init__.py, b/d.py", ["b/d.py"]),
    ],
)
def test_what_is_missing_is_named(covers, expected, tmp_path):
    (tmp_path / "package" / "b").mkdir(parents=True)
    for name, text in {
        "a": "",
        "__init__": '"""Nothing."""',
        "b/__init__": "import ast",
        "b/c": "x = 1",
    }.items():
        (tmp_path / "package" / f"{name}.py").write_text(text)
    (tmp_path / "test_x.py").write_text(f'"""What it is about.\n\n{covers}\n"""\n')
    messages = list(problems(tmp_path / "package", [tmp_path / "test_x.py"]))
    assert len(messages) == len(expected)
    assert all(name in problem for name, problem in zip(expected, messages, strict=True))
