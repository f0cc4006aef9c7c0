"""The words of pages, help and messages: the rules of `.vale`, which Vale reads as well, applied
here.

covers: cli/app.py, errors.py, model/describe.py, planner/report.py
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT, USERS, prose

yaml = pytest.importorskip("yaml", reason="PyYAML, of transformers, is not installed")
STYLE = ROOT / ".vale" / "streambp"
TERMS = (
    "chunk", "streamed layer", "whole layer", "unpatched run", "baseline memory", "free memory", "saved tensors",
    "recompute", "host memory", "packed document", "packed row", "lazy logits",
)  # fmt: skip
GLOSSARY = "docs/reference/glossary.md"  # says what a term stands for, in other words
COMMANDS = "streambp/cli/app.py"  # whose docstrings are help


def rules():
    """Patterns, each with its cure."""
    messages = {}
    for file in sorted(STYLE.glob("*.yml")):
        rule = yaml.safe_load(file.read_text("utf-8"))
        flags = re.IGNORECASE if rule.get("ignorecase") else 0
        if rule["extends"] == "substitution":
            messages |= {
                re.compile(pattern, flags): f"write {cure}"
                for pattern, cure in rule["swap"].items()
            }
        else:
            assert rule["extends"] == "existence", file
            messages |= {re.compile(pattern, flags): rule["message"] for pattern in rule["tokens"]}
    return messages


def wrong(text):
    """(sentence or line, cure) for each that a rule is against."""
    lines = [line.strip("-*|> ") for line in text.splitlines()]
    sentences = [sentence for line in lines for sentence in re.split(r"(?<=[.:;|]) +", line)]
    return [
        (sentence, cure)
        for pattern, cure in rules().items()
        for sentence in sentences
        if pattern.search(sentence)
    ]


def user_texts(path):
    """Texts of a module that a user may read: strings with a space, docstrings only where they are
    help."""
    tree = ast.parse(path.read_text("utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    hidden = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    hidden = set() if path == ROOT / COMMANDS else hidden
    nodes = (
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in hidden
    )
    return [node.value for node in nodes if isinstance(node.value, str) and " " in node.value]


@pytest.mark.parametrize("page", [page for page in USERS if page != GLOSSARY])
def test_a_page_uses_the_words(page):
    assert wrong(prose((ROOT / page).read_text("utf-8"))) == []


def test_help_and_messages_use_the_words():
    messages_of_text, texts = {}, 0
    for path in ROOT.glob("streambp/**/*.py"):
        for text in user_texts(path):
            texts += 1
            if messages := wrong(text):
                messages_of_text[path.name, text] = messages
    for path in ROOT.glob("streambp/planner/web/*.*"):
        if messages := wrong(path.read_text("utf-8")):
            messages_of_text[path.name, ""] = messages
    print(f"\n{texts} texts of the package")
    assert messages_of_text == {}
    assert texts > 1000


@pytest.mark.parametrize(
    "text",
    [
        "What it costs: nothing", "the same of the loss", "It ran as unpatched.", "much memory to spare",
        "They need less VRAM.", "Short rows. What binds them is memory.", "it waits in CPU memory",
    ],
)  # fmt: skip
def test_a_rule_finds_what_it_is_for(text):
    assert wrong(text)


@pytest.mark.parametrize(
    "text", ["What is a chunk?", "host memory", "It runs unpatched.", "a packed row"]
)
def test_a_rule_leaves_the_right_words(text):
    assert not wrong(text)


def test_the_glossary_has_twelve_terms():
    rows = re.findall(r"^\| \*\*([\w ]+)\*\*", (ROOT / GLOSSARY).read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(TERMS)


def test_vale_reads_these_rules():
    settings = (ROOT / ".vale.ini").read_text("utf-8")
    assert f"StylesPath = {STYLE.parent.name}\n" in settings
    assert f"BasedOnStyles = {STYLE.name}\n" in settings
