"""Names that docstrings explain are names of the code.

A rename that forgets a docstring leaves an argument there that the function does not have.

covers: errors.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("streambp", "tests", "scripts")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CONSTRUCTORS = ("__init__", "__new__")
CLASS_MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)")


def explained_names(docstring, title):
    """The names that a section of a docstring explains, such as "x" and "y" in a line that begins
    with "x, y: ".

    Args:
        docstring: the docstring, without its indentation.
        title: "Args" or "Attributes".
    """
    section = re.search(rf"^{title}:\n((?: +.*\n?|\n)*)", docstring, re.MULTILINE)
    if section is None:
        return []
    lines = [line for line in section[1].splitlines() if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    names = []
    for line, indent in zip(lines, indents, strict=True):
        if indent == min(indents) and ":" in line:
            for name in line.split(":")[0].split(","):
                names.append(name.strip().lstrip("*").split()[0])
    return names


def parameter_names(function):
    """The names of a function's parameters."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters += [p for p in (arguments.vararg, arguments.kwarg) if p is not None]
    return {parameter.arg for parameter in parameters}


def class_members(node):
    """The names of a class's attributes, methods, and parameters of its constructor."""
    members = set(re.findall(r"\b(?:self|cls)\.(\w+)", ast.unparse(node)))
    for child in node.body:
        if isinstance(child, FUNCTIONS):
            members.add(child.name)
            if child.name in CONSTRUCTORS:
                members |= parameter_names(child)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            members.add(child.target.id)
        elif isinstance(child, ast.Assign):
            for target in child.targets:
                members |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    return members


def classes_of(trees):
    """For each class name the names of members and of base classes, over all classes of this
    name."""
    classes = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                members, bases = classes.setdefault(node.name, (set(), set()))
                members |= class_members(node)
                bases |= {re.sub(r"\[.*", "", ast.unparse(base)) for base in node.bases}
    return classes


def inherited_members(name, classes):
    """The members of a class and of its bases; None if a base is not among `classes`."""
    if name in ("object", "NamedTuple", "Protocol", "Generic", "ABC"):
        return set()
    if name not in classes:
        return None
    members, bases = classes[name]
    members = set(members)
    for base in bases - {name}:
        inherited = inherited_members(base, classes)
        if inherited is None:
            return None
        members |= inherited
    return members


def unknown_names(tree, classes):
    """The names that docstrings of a module explain, and that no parameter or attribute has: as
    (line, name)."""
    unknown = []
    for node in ast.walk(tree):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        docstring = ast.get_docstring(node) or ""
        names = explained_names(docstring, "Args")
        if isinstance(node, FUNCTIONS):
            explicable = parameter_names(node)
        else:
            names += explained_names(docstring, "Attributes")
            explicable = inherited_members(node.name, classes)
        if explicable is not None:
            unknown += [(node.lineno, name) for name in names if name not in explicable]
    return unknown


def unknown_members(text, classes):
    """The members of classes that a text names, as `Class.member`, and that do not exist."""
    unknown = []
    for name, member in CLASS_MEMBER.findall(text):
        members = inherited_members(name, classes) if name in classes else None
        if members is not None and member not in members:
            unknown.append(f"{name}.{member}")
    return unknown


@pytest.fixture(scope="module")
def sources():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def trees(sources):
    return {path: ast.parse(text) for path, text in sources.items()}


def test_docstrings_explain_names_that_exist(trees):
    classes = classes_of(trees.values())
    unknown_by_path = {path: unknown_names(tree, classes) for path, tree in trees.items()}
    assert {path: names for path, names in unknown_by_path.items() if names} == {}
    counts = [
        len(explained_names(ast.get_docstring(node) or "", "Args"))
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    ]
    assert sum(counts) > 1000  # the sections were read


def test_members_that_texts_name_exist(sources, trees):
    classes = classes_of(tree for path, tree in trees.items() if path.parts[0] == "streambp")
    texts = {path: text for path, text in sources.items() if path.parts[0] == "streambp"}
    unknown_by_path = {path: unknown_members(text, classes) for path, text in texts.items()}
    assert {path: names for path, names in unknown_by_path.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('def f(x, *rest, y=1, **more):\n    """F.\n\n    Args:\n        x, y: z.\n"""', []),
        ('def f(x):\n    """F.\n\n    Args:\n        x: z.\n        w: it is\n            v: u.\n"""', ["w"]),
        ('class C:\n    a: int\n    """D."""\n', []),
        ('class C:\n    """D.\n\n    Attributes:\n        a: b.\n        c: d.\n    """\n    a: int', ["c"]),
        ('class B:\n    a: int\nclass C(B):\n    """D.\n\n    Args:\n        a: b.\n    """', []),
        ('class C(torch.Thing):\n    """D.\n\n    Args:\n        a: b.\n    """', []),
    ],
    ids=["all are there", "one argument", "no section", "one attribute", "a base's", "another base"],
)  # fmt: skip
def test_what_is_found(source, names):
    tree = ast.parse(source)
    assert [name for _, name in unknown_names(tree, classes_of([tree]))] == names


def test_members_that_are_found():
    classes = classes_of([ast.parse("class Box:\n    a = 1\n    def b(self):\n        self.c = 2")])
    assert unknown_members("`Box.a`, `Box.b`, `Box.c.d`, `Other.x`, `Box.gone`", classes) == [
        "Box.gone"
    ]
