"""Every public class, function and method says what it does; the shape of its tensors, and which
errors of ours it raises.

Read from the sources, without importing them. A shape is one in brackets, or "any shape", or
"scalar". Autograd Functions that are private, and functions inside of functions, may stay without.

covers: errors.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "streambp"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
INNER_DEFINITIONS = (*FUNCTIONS, ast.ClassDef, ast.Lambda)
SHAPE = re.compile(r"(?<![\w)\]])\[(?!Note: )[^\[\]]+\]|\bany shape\b|\bscalars?\b", re.IGNORECASE)


def public(body):
    """Classes and functions without an underscore, methods of such classes among them, wherever an
    if or try puts them."""
    for node in body:
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            if node.name.startswith("_"):
                continue
            yield node
        if not isinstance(node, FUNCTIONS):
            yield from public(
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
            )


def assigned(body):
    """Functions whose docstring is that of another: `patch.__doc__ = other.__doc__`."""
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return {t.value.id for t in targets if isinstance(t, ast.Attribute) and t.attr == "__doc__"}


def has_tensors(function):
    """Whether the annotation of a parameter or of the result names Tensor."""
    arguments = function.args
    parameters = [
        *arguments.posonlyargs,
        *arguments.args,
        arguments.vararg,
        *arguments.kwonlyargs,
        arguments.kwarg,
    ]
    annotations = [parameter.annotation for parameter in parameters if parameter is not None] + [
        function.returns
    ]
    return any(
        re.search(r"\bTensor\b", ast.unparse(annotation))
        for annotation in annotations
        if annotation is not None
    )


def last(name):
    """The last part of a name with dots."""
    return ast.unparse(name).rpartition(".")[2]


def raised(node):
    """The names of the classes that a function's own code raises."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, INNER_DEFINITIONS):
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            thrown = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            yield last(thrown)
        yield from raised(child)


def families(trees):
    """Of each class in the package that descends from StreamBPError: its name and those of its
    ancestors, up to that."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    ancestors, previous = {"StreamBPError": {"StreamBPError"}}, None
    while ancestors != previous:
        previous = dict(ancestors)
        for node in classes:
            ancestors_of_bases = [
                previous[name] for name in map(last, node.bases) if name in previous
            ]
            if ancestors_of_bases:
                ancestors[node.name] = {node.name}.union(*ancestors_of_bases)
    return ancestors


def problems(package):
    """What public docstrings leave out."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(package.rglob("*.py"))}
    errors = families(trees.values())
    for path, tree in trees.items():
        copied = assigned(tree.body)
        for node in public(tree.body):
            where = f"{path.relative_to(package).as_posix()}:{node.lineno} {node.name}"
            docstring = ast.get_docstring(node)
            if not docstring:
                if node.name not in copied:
                    yield f"{where} has no docstring"
            elif isinstance(node, FUNCTIONS):
                if has_tensors(node) and not SHAPE.search(docstring):
                    yield f"{where} gives no shape"
                for name in sorted(set(raised(node)) & errors.keys()):
                    if not any(
                        re.search(rf"\b{error_name}\b", docstring) for error_name in errors[name]
                    ):
                        yield f"{where} does not say that it raises {name}"


def test_public_docstrings():
    assert list(problems(PACKAGE)) == []


HEADER = (
    "class StreamBPError(RuntimeError):\n    '''Ours.'''\n\nclass MaskError(StreamBPError):\n    "
    "'''Of masks.'''\n\n"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x):\n    '''Nothing.'''", None),
        ("def f(x):\n    return x", "f has no docstring"),
        ("def f(x):\n    return x\n\nf.__doc__ = str.__doc__", None),
        ("def _f(x: Tensor):\n    return x", None),
        ("if True:\n    def f(x):\n        return x", "f has no docstring"),
        ("class A:\n    def f(self):\n        return 1", "A has no docstring"),
        ("class A:\n    '''A.'''\n    def f(self):\n        return 1", "f has no docstring"),
        ("class _A:\n    def f(self, x: Tensor):\n        return 1", None),
        ("def f(x: Tensor):\n    '''Of x [B, T].'''", None),
        ("def f(x: Tensor):\n    '''Of x, of any shape.'''", None),
        ("def f(x: Tensor):\n    '''A scalar.'''", None),
        ("def f(x: Tensor):\n    '''Of x. [Note: shapes]'''", "f gives no shape"),
        ("def f(x: Tensor):\n    '''Of x[0].'''", "f gives no shape"),
        ("def f(*x: Tensor):\n    '''Of x.'''", "f gives no shape"),
        ("def f() -> list[torch.Tensor | None]:\n    '''Of x.'''", "f gives no shape"),
        ("def f(x: DTensor):\n    '''Of x.'''", None),
        (
            "def f():\n    '''Fails.'''\n    if 1:\n        raise MaskError('no')",
            "f does not say that it raises MaskError",
        ),
        (
            "def f():\n    '''Fails.\n\n    Raises:\n        MaskError: always.\n    '''\n    "
            "raise errors.MaskError",
            None,
        ),
        ("def f():\n    '''Raises StreamBPError.'''\n    raise MaskError('no')", None),
        (
            "def f():\n    '''Raises MaskError.'''\n    raise StreamBPError",
            "f does not say that it raises StreamBPError",
        ),
        ("def f():\n    '''Fails.'''\n    raise ValueError", None),
        (
            "def f():\n    '''Makes one.'''\n    def g():\n        raise MaskError\n    return g",
            None,
        ),
    ],
)
def test_what_is_missing_is_named(source, expected, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "errors.py").write_text(HEADER)
    (tmp_path / "part" / "module.py").write_text(source)
    messages = [problem.partition(" ")[2] for problem in problems(tmp_path)]
    assert messages[:1] == ([] if expected is None else [expected])
