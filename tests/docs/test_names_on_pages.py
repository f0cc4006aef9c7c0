"""Pages for developers name files of streambp/, and what stands in them: each exists."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "streambp"
PAGES = [
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs/explanation").glob("*.md"),
]
FOLDERS = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir())
FILE = re.compile(rf"`((?:streambp/)?(?:{FOLDERS})/[\w/]+\.py)`")
NAMED = re.compile(
    r"`(?P<file>[\w./]+\.py)` `(?P<name>[\w.]+)`"
    r"|`(?P<name_in>[\w.]+)`,? (?:in|of) `(?P<in_file>[\w./]+\.py)`"
    r"|`(?P<name_before>[\w.]+)` \(`(?P<file_behind>[\w./]+\.py)`\)"
)
WORDS = (tokenize.NAME, tokenize.STRING)  # a string may be a key, such as an operation's name


def named_parts(text: str) -> list[tuple[str, str]]:
    """Return the files of the package that a page names, each with a dotted name in it; "" if the
    page names the file alone."""
    parts = [(match[1].removeprefix("streambp/"), "") for match in FILE.finditer(text)]
    for match in NAMED.finditer(text):
        file = match["file"] or match["in_file"] or match["file_behind"]
        name = match["name"] or match["name_in"] or match["name_before"]
        if file.startswith("streambp/") or not (ROOT / file).exists():
            parts.append((file.removeprefix("streambp/"), name))
    return parts


def absent_parts_of(text: str) -> list[tuple[str, str]]:
    """Return those of a page's files and names that do not exist."""
    absent_parts = []
    for file, name in named_parts(text):
        path = PACKAGE / file
        if not path.exists():
            absent_parts.append((file, name))
            continue
        with tokenize.open(path) as source:
            tokens = tokenize.generate_tokens(source.readline)
            words = {token.string.strip("\"'") for token in tokens if token.type in WORDS}
        if name and not words.issuperset(name.split(".")):
            absent_parts.append((file, name))
    return absent_parts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    assert absent_parts_of(page.read_text()) == []


def test_pages_name_much():
    assert sum(len(named_parts(page.read_text())) for page in PAGES) > 100


@pytest.mark.parametrize(
    "text",
    [
        "`layer/nowhere.py` runs it",
        "`layer/call.py` `LayerCall.nothing`",
        "`Nothing` in `layer/call.py`",
        "`Nothing` (`streambp/layer/call.py`)",
    ],
)
def test_a_missing_part_is_found(text):
    assert absent_parts_of(text)


def test_existing_parts_are_none():
    text = "`layer/call.py` `LayerCall.plan`, `LayerCall` in `layer/call.py`, `patch` (`planner/auto.py`)"
    assert absent_parts_of(text) == []
