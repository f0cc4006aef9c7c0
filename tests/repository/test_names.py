"""scripts/names.py: no name of the package, of its tests or scripts is an adverb or a pronoun."""

from __future__ import annotations

import pytest

from scripts.names import PUBLIC, ROOT, main, riddles

RIDDLES = {
    "a variable": "found = 1",
    "a parameter": "def run(whole): ...",
    "a field": "class Layer:\n    kept: int = 0",
    "an attribute": "def run(self):\n    self.told = 1",
    "a function": "def again(): ...",
    "a loop": "for other in (): ...",
    "a comprehension": "[one.x for one in ()]",
    "a lambda": "f = lambda *given: given",
    "an error": "try: ...\nexcept ValueError as said: ...",
}
NAMES = ["peer = other_layer = 1", "class A:\n    def __eq__(self, other): ...", "x = found"]


def test_every_name_says_what_it_names():
    assert riddles(ROOT, ["streambp", "tests", "scripts"]) == []


@pytest.mark.parametrize("source", RIDDLES.values(), ids=RIDDLES)
def test_a_riddle_is_found(source, tmp_path):
    (tmp_path / "code.py").write_text(source)
    assert len(riddles(tmp_path, ["."])) == 1


@pytest.mark.parametrize("source", NAMES)
def test_names_with_a_noun_are_none(source, tmp_path):
    (tmp_path / "code.py").write_text(source)
    assert riddles(tmp_path, ["."]) == []


def test_public_names_are_those_of_their_files():
    for path, names in PUBLIC.items():
        text = (ROOT / path).read_text()
        assert all(name in text for name in names)


def test_the_exit_code_is_1_if_there_is_one(tmp_path, capsys):
    (tmp_path / "code.py").write_text("kept = 1")
    assert main([str(tmp_path)]) == 1
    assert "code.py:1: kept" in capsys.readouterr().out
