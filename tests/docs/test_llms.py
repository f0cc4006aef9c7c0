"""docs/llms.txt lists the users' pages as they are.

Tests scripts/llms.py.
"""

from __future__ import annotations

import re

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML, of transformers, is not installed")

from scripts import llms  # noqa: E402
from tests.docs.pages import ROOT, USER_PAGES  # noqa: E402


def test_the_index_is_current():
    assert llms.INDEX.read_text("utf-8") == llms.index()


def test_it_has_every_users_page_with_a_sentence():
    text = llms.index()
    for page in USER_PAGES:
        name = page.relative_to(ROOT / "docs").as_posix().removesuffix(".md")
        assert re.search(rf"^- \[[^\]]+\]\({re.escape(name)}/\)", text, re.MULTILINE), name
    assert text.startswith("# streambp\n\n> streambp trains")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# A\n\n**One** [two](x.md) `three`. Four.", "One two three."),
        ("# A\n\n```bash\nx\n```\n\n| a |\n\nLast one", "Last one"),
        ("# A", ""),
    ],
)
def test_first_sentences(text, sentence):
    assert llms.first_sentence(text) == sentence


def test_a_changed_page_makes_it_stale(monkeypatch):
    monkeypatch.setattr(llms, "first_sentence", lambda text: "Another.")
    monkeypatch.setattr("sys.argv", ["llms", "--check"])
    assert llms.main() == 1
