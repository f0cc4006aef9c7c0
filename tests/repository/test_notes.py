"""A note, `[Note: name]`, is an invariant that several places rely on: its text stands once, and
these places cite it."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("streambp", "tests", "docs", "examples")
SUFFIXES = (".py", ".md", ".cpp", ".sh")
FILES_WITH_EXAMPLES = ("test_house.py", "test_docstrings.py", "test_notes.py")  # examples of notes
PAGE = "docs/explanation/how-it-works.md"
MAX_NOTES = 27  # of the package; a note that two places cite is a comment at each of them
MIN_CITATIONS = 3
NOTE = re.compile(r"\[Note:\s+([^\]\\.]+)\]")
# a note's text begins a paragraph of a docstring or a comment
TEXT = re.compile(r"(?:\A|\n\s*\n)\s*(?:#\s*)?\[Note:\s+([^\]\\.]+)\](?: |\n[ ]*)[\w`]")


def note_names(pattern, source):
    """Names of the notes that a pattern finds in a source, without its line breaks."""
    return [re.sub(r"\s*#?\s+", " ", name) for name in pattern.findall(source)]


def problems(sources):
    """What is wrong with the notes in sources, by path. Only the package's notes are counted."""
    texts = collections.defaultdict(list)
    mentions = collections.Counter()
    ours = set()
    for path, source in sources.items():
        mentions.update(note_names(NOTE, source))
        for name in note_names(TEXT, source):
            texts[name].append(path)
            if path.startswith("streambp/"):
                ours.add(name)
    for name in sorted(mentions):
        if len(texts[name]) != 1:
            yield f"the text of [Note: {name}] stands {len(texts[name])} times: {texts[name]}"
    for name in sorted(ours):
        cited = mentions[name] - len(texts[name])
        if cited < MIN_CITATIONS:
            yield f"[Note: {name}] is cited {cited} times: make it a comment there"
    if len(ours) > MAX_NOTES:
        yield f"{len(ours)} notes"


def sources_of(root):
    """The text of all files that may cite a note, by path."""
    texts = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.name not in FILES_WITH_EXAMPLES:
                texts[path.relative_to(root).as_posix()] = path.read_text("utf-8")
    return texts


def test_each_note_has_one_text_and_is_read_from_several_places():
    assert list(problems(sources_of(ROOT))) == []


def listed(page):
    """(name, file) of the notes that the page's table lists."""
    table = page.partition("## Notes in the code")[2].partition("\n## ")[0]
    for names, file in re.findall(r"([a-z, -]+) \(`([\w/]+\.py)`\)", table):
        yield from ((name.strip(), f"streambp/{file}") for name in names.split(","))


def test_the_page_lists_all_notes():
    sources = sources_of(ROOT)
    package = {path: text for path, text in sources.items() if path.startswith("streambp/")}
    texts = [(name, path) for path, text in package.items() for name in note_names(TEXT, text)]
    assert sorted(listed(sources[PAGE])) == sorted(texts)


CITED_SOURCE = "x = 1  # [Note: a rule]\n" * MIN_CITATIONS


@pytest.mark.parametrize(
    ("text", "citing", "expected"),
    [
        ('"""A.\n\n[Note: a rule] It holds."""', CITED_SOURCE, []),
        ("# [Note: a rule] It holds.", CITED_SOURCE, []),
        ("", CITED_SOURCE, ["the text of [Note: a rule] stands 0 times: []"]),
        (
            "\n\n[Note: a rule] It holds.\n\n[Note: a rule] It holds.",
            CITED_SOURCE,
            ["the text of [Note: a rule] stands 2 times: ['streambp/text.py', 'streambp/text.py']"],
        ),
        (
            "\n\n[Note: a rule] It holds.",
            "x = 1  # [Note: a\n# rule]",
            ["[Note: a rule] is cited 1 times: make it a comment there"],
        ),
    ],
)
def test_wrong_notes_are_found(text, citing, expected):
    sources = {"streambp/text.py": text, "streambp/citing.py": citing}
    assert list(problems(sources)) == expected


def test_too_many_notes_are_found():
    notes = [f"\n\n[Note: rule {n}] It holds.\n\n" for n in range(MAX_NOTES + 1)]
    citations = [f"see [Note: rule {n}]\n" * MIN_CITATIONS for n in range(MAX_NOTES + 1)]
    sources = {"streambp/text.py": "".join(notes), "streambp/citing.py": "".join(citations)}
    assert list(problems(sources)) == [f"{MAX_NOTES + 1} notes"]
