"""The folders are the architecture: which may import which stands in one table (DESIGN.md section
7)."""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "streambp"
TREES = ("streambp", "paper_repro", "examples", "scripts", "tests")

# What every folder may import: modules at the top that import nothing but each other.
BASE_MODULES = (
    "known_names", "errors", "fields", "reporting", "device", "accumulate", "config", "chunks", "cache", "cache_arguments",
    "source", "instance_forward", "foreign", "libraries", "rates", "arguments", "tensors", "progress", "checkpoints",
)  # fmt: skip
# From the ground up: each folder, and the folders below it that it may import.
FOLDERS = {
    "offload": (),
    "attention": ("offload",),
    "recurrent": (),
    "distributed": (),
    "losses": (),
    "fingerprint": ("distributed",),
    "layer": ("attention", "recurrent", "distributed", "fingerprint", "offload"),
    "admission": ("attention", "recurrent", "distributed", "fingerprint", "layer"),
    "sharded": ("attention", "distributed", "layer", "admission", "offload", "recurrent"),
    "head": ("layer",),
    "lazy": ("head",),
    "prefixes": ("attention", "distributed", "layer", "admission", "head", "lazy"),
    "model": (
        "attention", "recurrent", "distributed", "layer", "admission", "sharded", "head", "lazy", "offload",
        "prefixes",
    ),
    "planner": ("attention", "distributed", "admission", "sharded", "head", "offload", "model"),
    "verify": ("distributed", "layer", "model", "planner"),
    "launch": ("model", "planner"),
    "integrations": ("distributed", "losses", "admission", "head", "model", "planner", "launch"),
}  # fmt: skip
TOP_MODULES = ("", "__main__", "cli")  # import whatever they start


@functools.cache
def names_of_modules():
    return frozenset(name for _, name in module_names())


def module_names():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield path, name.removesuffix("__init__").removesuffix(".")


def by_string(tree):
    """Names of modules that calls of `import_module` import, where they are literal."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or "import_module" not in ast.unparse(node.func):
            continue
        yield from (
            argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)
        )


def imported(path):
    """Modules of this package that a file imports, wherever the statement stands."""
    names = names_of_modules()
    tree = ast.parse(path.read_text())
    for name in by_string(tree):
        if name.split(".")[0] == "streambp":
            yield name.removeprefix("streambp").removeprefix(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "streambp":
            source = node.module.removeprefix("streambp").removeprefix(".")
            members = {f"{source}.{alias.name}".removeprefix(".") for alias in node.names}
            yield from (members & names) or {source}
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "streambp":
                    yield alias.name.removeprefix("streambp").removeprefix(".")


@functools.cache
def edges():
    """Every import of one module of the package by another."""
    return tuple((name, target) for path, name in module_names() for target in imported(path))


def folder_of(name):
    """The folder of a module, or a module at the top by its own name."""
    return name.split(".")[0]


def not_allowed(folders):
    """Imports that the table does not allow."""
    for name, target in edges():
        folder = folder_of(name)
        if folder not in TOP_MODULES and folder_of(target) not in {
            folder,
            *BASE_MODULES,
            *folders.get(folder, ()),
        }:
            yield f"{name} imports {target or 'the package'}"


def test_every_module_has_its_place():
    assert {folder_of(name) for _, name in module_names()} == {
        *BASE_MODULES,
        *FOLDERS,
        *TOP_MODULES,
    }


def test_folders_import_downwards():
    order = list(FOLDERS)
    for folder, lower_folders in FOLDERS.items():
        assert set(lower_folders) <= set(order[: order.index(folder)]), folder
    assert list(not_allowed(FOLDERS)) == []


def test_the_table_is_as_short_as_it_can_be():
    """Every pair in it is needed: without it some import is not allowed."""
    for folder, lower_folders in FOLDERS.items():
        for lower in lower_folders:
            fewer = {**FOLDERS, folder: tuple(name for name in lower_folders if name != lower)}
            assert list(not_allowed(fewer)), (folder, lower)


def modules_under(root):
    """Path of every module of the project's trees, by its dotted name from `root`."""
    paths = [path for tree in TREES for path in (root / tree).rglob("*.py")]
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }


def imports_of(name, path, modules):
    """The modules of the project that one imports, wherever the statement stands. A script's
    neighbours have bare names."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text("utf-8"))
    targets = set(by_string(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            ancestor = (
                ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level])
                if node.level
                else ""
            )
            source = ".".join(part for part in (ancestor, node.module) if part)
            members = {f"{source}.{alias.name}" for alias in node.names}
            targets |= {member for member in members if member in modules} or {source}
    return {f for target in targets for f in (target, f"{package}.{target}") if f in modules} - {
        name
    }


def cycle(root):
    """Modules that import each other, the first one again at the end; [] where there are none."""
    modules = modules_under(root)
    try:
        graphlib.TopologicalSorter(
            {n: imports_of(n, path, modules) for n, path in modules.items()}
        ).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    assert cycle(ROOT) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from paper_repro.b import run", "def late():\n    import paper_repro.a"),
        ("from paper_repro import b", "from paper_repro.a import run"),
        ("from . import b", "from .a import run"),
        ("from b import run", "import a"),  # of scripts
        ("import paper_repro.b", "import importlib\nimportlib.import_module('paper_repro.a')"),
    ],
)
def test_a_circle_of_imports_is_found(first, second, tmp_path):
    (tmp_path / "paper_repro").mkdir()
    for name, text in (
        ("__init__", ""),
        ("a", first),
        ("b", second),
        ("c", "from paper_repro.a import run"),
    ):
        (tmp_path / "paper_repro" / f"{name}.py").write_text(text)
    assert set(cycle(tmp_path)) == {"paper_repro.a", "paper_repro.b"}
    (tmp_path / "paper_repro" / "b.py").write_text("import ast, torch")
    assert cycle(tmp_path) == []


def test_files_and_functions_stay_short():
    long = []
    for path, _ in module_names():
        text = path.read_text()
        if text.count("\n") > 800:
            long.append(path.name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > 80:
                long.append(f"{path.name}:{node.name}")
    assert not long


MAX_ATTRIBUTES = 16
MANY_ATTRIBUTES = {"StreamConfig": 18}  # the user's settings, which are public


def attributes_of(class_node):
    """Return the names that a class declares, or sets on `self`."""
    names = set()
    for node in class_node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    for node in ast.walk(class_node):
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_stored and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return names


def test_no_class_has_too_many_attributes():
    class_names = []
    for path, _ in module_names():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                limit = MANY_ATTRIBUTES.get(node.name, MAX_ATTRIBUTES)
                if len(attributes_of(node)) > limit:
                    class_names.append(f"{path.name}:{node.name}")
    assert not class_names


def test_attributes_of_a_class_are_counted():
    text = "class A:\n    x: int = 0\n    def f(self):\n        self.y = self.z = self.x = 1"
    assert attributes_of(ast.parse(text).body[0]) == {"x", "y", "z"}
