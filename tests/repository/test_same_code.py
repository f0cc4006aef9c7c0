"""scripts/same_code.py: a change of words alone passes, and every change of code is found."""

from __future__ import annotations

import subprocess

import pytest

from scripts.same_code import difference, main

SOURCE_BEFORE = '''"""A module."""

# Why it is here.
LIMIT = 3  # noqa: E501


class Layer:
    """A layer."""

    name = "layer"

    def run(self, x: int = 1) -> str:
        """Run."""
        return f"{x}"  # words
'''
TEXT_CHANGES = {
    '"""A module."""': '"""Another module.\n\nWith two paragraphs.\n"""',
    '    """A layer."""\n': '    """A layer.\n\n    Attributes:\n        name: how it is called.\n    """\n',
    '        """Run."""\n': "",
    "  # words": "  # other words",
    "# Why it is here.\n": "",
}
CODE = {
    "LIMIT = 3": "LIMIT = 4",
    '"layer"\n': '"other"\n',
    "x: int = 1": "x: int = 2",
    "-> str": "-> object",
    "{x}": "{x} ",
    "return f": "yield f",
    "class Layer:": "class Layer(dict):",
    "  # noqa: E501": "",
    "  # words": "  # type: ignore[misc]",
    '        """Run."""\n': '        """Run."""\n        """Run."""\n',
}


@pytest.mark.parametrize("old", TEXT_CHANGES)
def test_words_alone_are_no_difference(old):
    new_source = SOURCE_BEFORE.replace(old, TEXT_CHANGES[old])
    assert new_source != SOURCE_BEFORE
    assert difference(SOURCE_BEFORE, new_source) is None


@pytest.mark.parametrize("old", CODE)
def test_code_is_a_difference(old):
    new_source = SOURCE_BEFORE.replace(old, CODE[old])
    assert new_source != SOURCE_BEFORE
    assert difference(SOURCE_BEFORE, new_source) is not None


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "part").mkdir()
    for name in ("part/a.py", "part/b.py", "c.py"):
        (tmp_path / name).write_text(SOURCE_BEFORE)
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "first")):
        subprocess.run(("git", *command), cwd=tmp_path, check=True)
    return tmp_path


def run(repository, capsys, *paths):
    """Return the exit code and the printed lines for these paths."""
    code = main(["--against", "HEAD", *paths], repository)
    return code, capsys.readouterr().out.splitlines()


def test_a_tree_whose_words_changed_passes(repository, capsys):
    (repository / "part" / "a.py").write_text(SOURCE_BEFORE.replace("Run.", "Return x as text."))
    assert run(repository, capsys, "part") == (0, ["2 files at HEAD, 0 with other code."])


def test_changed_added_and_removed_files_are_named(repository, capsys):
    (repository / "part" / "a.py").write_text(SOURCE_BEFORE.replace("LIMIT = 3", "LIMIT = 4"))
    (repository / "part" / "b.py").unlink()
    (repository / "part" / "new.py").write_text(SOURCE_BEFORE)
    (repository / "c.py").write_text("")  # outside of the paths
    code, lines = run(repository, capsys, "part")
    assert code == 1
    assert [line.partition(":")[0] for line in lines[:-1]] == [
        "part/a.py",
        "part/b.py",
        "part/new.py",
    ]
    assert "value=3" in lines[0]


def test_a_path_without_python_files_is_an_error(repository):
    with pytest.raises(SystemExit):
        main(["--against", "HEAD", "nowhere"], repository)
