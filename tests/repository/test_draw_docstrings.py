"""The draw of docstrings for a reader: every documented class and function, the same for a seed."""

from __future__ import annotations

from scripts.draw_docstrings import draw, main

SOURCE = '''"""A module, which is not drawn."""

class Base(Other):
    """Base of all."""

    def method(self, x: int = 1) -> str:
        """Return x as text."""
        def inner():
            """Run inside."""

    def silent(self):
        pass

if True:
    def function(*args):
        """Run."""
'''


def test_each_definition_with_a_docstring_is_drawn_with_its_qualified_signature(tmp_path):
    (tmp_path / "module.py").write_text(SOURCE)
    drawn = {
        definition.signature: definition.docstring
        for definition in draw(tmp_path, seed=1, count=60)
    }
    assert drawn == {
        "class Base(Other)": "Base of all.",
        "def Base.method(self, x: int=1) -> str": "Return x as text.",
        "def Base.method.inner()": "Run inside.",
        "def function(*args)": "Run.",
    }


def test_a_seed_draws_the_same_docstrings_again(tmp_path, capsys):
    (tmp_path / "module.py").write_text(SOURCE)
    outputs = []
    for seed in ("3", "3", "4"):
        assert main(["--seed", seed, "--count", "3", str(tmp_path)]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[0].count("## ") == 3
    main(["--seed", "3", "--count", "1", "--where", str(tmp_path)])
    assert f"{tmp_path.name}/module.py:" in capsys.readouterr().out
