"""The users' pages: their length, their words, and that what they take from the code is what the code says now.

covers: config.py, cli/app.py, errors.py
"""

from __future__ import annotations

import re

import pytest

from scripts import reference
from tests.conftest import SHARING
from tests.docs.pages import ROOT, USERS, prose

LONGEST, ALL = 1500, 9000  # words of a page in Start and How-to; of all users' pages
NOT_WRITTEN = ("docs/reference/families.md",)  # a table that tests fill
# Patterns of prose that a reader has to decode, with the cure.
WORST = {
    r"^What (?!does|is|do|are|has|can|needs)\w+": "begin with the noun, not with What",
    r"\bthe same of\b": "name it",
    r"\bas unpatched\b": "say 'runs unpatched' or 'as the unpatched model does'",
    r"\bto spare\b": "say free memory",
    r"\bwhat binds\b": "say what runs out first",
    r"\bcomes by what\b": "name the cause",
    r"\bRows that begin alike\b": "say shared prefixes",
    r"\bthat of (?:those|what)\b": "name it",
    r"\bsuch (?:ones|are)\b": "name them",
    r"\bfew hundred tokens\b": "say under 500 tokens",
}
TERMS = (
    "chunk", "streamed layer", "whole layer", "unpatched run", "baseline memory", "free memory", "saved tensors",
    "recompute", "host memory", "packed document", "packed row", "lazy logits",
)  # fmt: skip


def words(page):
    return len(re.findall(r"[A-Za-z][\w'-]*", prose((ROOT / page).read_text("utf-8"))))


def test_pages_are_short():
    counted = {page: words(page) for page in USERS if page not in NOT_WRITTEN}
    print(f"\n{sum(counted.values())} words; the longest: {sorted(counted.items(), key=lambda item: -item[1])[:3]}")
    assert sum(counted.values()) <= ALL
    assert not {page: n for page, n in counted.items() if page.startswith(("docs/start", "docs/how-to")) and n > LONGEST}


@pytest.mark.skipif(SHARING, reason="STREAMBP_TEST_ROWS changes a default")
@pytest.mark.parametrize("page", [path for path in reference.pages() if reference.PLACE.search(path.read_text("utf-8"))],
                         ids=lambda path: path.stem)  # fmt: skip
def test_pages_say_what_the_code_says(page):
    text = page.read_text("utf-8")
    assert reference.filled(text) == text, "run `python scripts/reference.py`"


def test_a_page_that_is_old_is_found():
    assert reference.filled("All <!-- from code: families -->7<!-- end --> stream.") != "All 7 stream."
    assert reference.families() in reference.filled("<!-- from code: families --><!-- end -->")
    assert int(reference.families()) > 100


def test_no_fact_of_the_code_is_typed_by_hand():
    """The rule of chunk sizes, and the number of families."""
    marked = re.compile(r"<!-- from code: .*?<!-- end -->", re.DOTALL)
    for page in (*USERS, "docs/explanation/saves.md", "docs/explanation/planner.md"):
        text = marked.sub("", (ROOT / page).read_text("utf-8"))
        assert not re.search(r"\d+ (?:model )?families stream", text), page
        assert not re.search(r"eighth of the sequence|8,192, 4,096, 2,048", text), page


@pytest.mark.parametrize("page", USERS)
def test_prose_says_who_does_what(page):
    text = prose((ROOT / page).read_text("utf-8"))
    found = [(line.strip(), cure) for pattern, cure in WORST.items() for line in text.splitlines()
             if re.search(pattern, line.strip("-* "), re.IGNORECASE if pattern[0] != "^" else 0)]  # fmt: skip
    assert not found


def test_the_worst_patterns_find_what_they_are_for():
    for wrong in ("What it costs: nothing", "the same of the loss", "it runs as unpatched", "memory to spare"):
        assert any(re.search(pattern, wrong, re.IGNORECASE) for pattern in WORST), wrong


def test_the_glossary_has_twelve_terms():
    rows = re.findall(r"^\| \*\*([\w ]+)\*\*", (ROOT / "docs/reference/glossary.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(TERMS)
