"""No folder of the package gets harder to read: scripts/prose.py counts, tests/prose_limits.json
limits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.prose import (
    LIMITS,
    begins_with_verb,
    broken,
    counts_of,
    exceeded,
    lower,
    main,
    sentences,
    with_total,
)

PACKAGE = Path(__file__).parents[2] / "streambp"


def test_no_folder_is_harder_to_read_than_its_limits():
    rows, _ = counts_of(PACKAGE)
    assert exceeded(with_total(rows), json.loads(LIMITS.read_text())) == []


RULE_BREAKS = {
    "Whether a layer streams is decided here.": ["clause"],
    "Of the last chunk, in bytes.": ["fragment"],
    "Return the value that is read by what the layer has that streams.": ["stacked"],
    "Return them if others have such, and it else.": ["vague"],
    "Hands over what it is told, and lets go.": ["private"],
    "Return a; return b; return c.": ["list"],
    "chunk: a piece of the sequence, and more of it.": ["inline"],
    "Return the gradients of all parameters of the layer.": [],
}


@pytest.mark.parametrize("sentence", RULE_BREAKS)
def test_a_rule_finds_its_sentence(sentence):
    assert set(RULE_BREAKS[sentence]) <= set(broken(sentence, in_section=False))
    assert RULE_BREAKS[sentence] or broken(sentence, in_section=False) == []


def test_long_sentences_are_counted_by_words():
    assert broken("Return " + "words " * 29 + "here.", in_section=False) == ["long"]
    assert broken("Return " + "words " * 28 + "here.", in_section=False) == []


def test_sections_and_tables_are_no_running_text():
    text = "Return the sum.\n\nArgs:\n    values: the terms of the sum.\n\na   b\n"
    assert sentences(text, True) == [("Return the sum.", False), ("the terms of the sum.", True)]


@pytest.mark.parametrize(
    ("docstring", "verb"),
    [
        ("Return the sum.", True),
        ("Computes the sum.", True),
        ("True if a layer streams.", True),
        ("Context manager that swaps slots.", True),
        ("The sum.", False),
        ("Of the layer.", False),
    ],
)
def test_verbs(docstring, verb):
    assert begins_with_verb(docstring) == verb


def write(folder, text):
    (folder / "part").mkdir(exist_ok=True)
    (folder / "part" / "code.py").write_text(text)
    return with_total(counts_of(folder)[0])


CLEAR_SOURCE = '''"""Compute sums of values."""


def total(values):
    """Return the sum of all values."""
    return sum(values)
'''
WORSE_SOURCES = {
    "prose": CLEAR_SOURCE.replace("Return the sum of all values", "Whether the sum is there"),
    "no verb": CLEAR_SOURCE.replace("Return the sum of all values", "The sum of all values"),
    "packed": CLEAR_SOURCE.replace("return sum(values)", "return sum(values) if values else 0"),
    "tuples": CLEAR_SOURCE.replace("    return sum(values)", "    a, b = 1, 2\n    return a + b"),
    "wide": CLEAR_SOURCE.replace("sum(values)", "sum(values)" + " + 0" * 30),
}


@pytest.mark.parametrize("change", WORSE_SOURCES)
def test_a_folder_that_gets_worse_exceeds_its_limits(change, tmp_path):
    limits = lower({}, write(tmp_path, CLEAR_SOURCE))
    assert exceeded(write(tmp_path, CLEAR_SOURCE), limits) == []
    assert exceeded(write(tmp_path, WORSE_SOURCES[change]), limits)


def test_limits_are_lowered_and_never_raised(tmp_path):
    packed = lower({}, write(tmp_path, WORSE_SOURCES["packed"]))
    clear = lower(packed, write(tmp_path, CLEAR_SOURCE))
    assert clear["part"]["ifexp"] == 0.0 < packed["part"]["ifexp"]
    assert lower(clear, write(tmp_path, WORSE_SOURCES["packed"])) == clear


def test_a_new_folder_has_the_limits_of_all(tmp_path):
    limits = {"all": lower({}, write(tmp_path, CLEAR_SOURCE))["all"]}
    assert exceeded({"new": Counter(lines=10, ifexp=5)}, limits) == ["new: ifexp 500.0, limit 0.0"]


def test_the_table_is_printed(monkeypatch, capsys, tmp_path):
    write(tmp_path, CLEAR_SOURCE)
    monkeypatch.setattr("sys.argv", ["prose.py", str(tmp_path)])
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["part", "2"]
