"""The commands, files and names that README.md and docs/ show. Covers: scripts/check_commands.py,
docs/reference/api.md.

covers: __init__.py, cli/runs.py
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re

import pytest

import streambp
from scripts.check_commands import PAGES, ROOT, check, commands, missing_files
from tests.conftest import SHARES_PREFIXES


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse_and_files_exist(page):
    text = (ROOT / page).read_text("utf-8")
    messages = {
        command.text: problem for command in commands(page, text) if (problem := check(command)[1])
    }
    assert not messages
    assert not missing_files(page, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```bash\nstreambp verify PATH --no-such-flag\n```", "No such option: --no-such-flag"),
        ("`streambp launch --chunks 8192 -- trl sft --lr 1`", "No such option: --chunks"),
        (
            "```bash\nbash .ci/setup && .venv/bin/python examples/none.py\n```",
            "examples/none.py does not exist",
        ),
        (
            "`pytest -s -m full tests/test_oracle.py -k no_such_test`",
            "no test there is named no_such_test",
        ),
        ("`python -m paper_repro.predicted --no-such-flag`", "has no flag --no-such-flag"),
        ("`python -m pytest tests/none`", "tests/none does not exist"),
    ],
)
def test_a_wrong_command_is_found(text, problem):
    problems = [
        message for command in commands("README.md", text) if (message := check(command)[1])
    ]
    assert len(problems) == 1
    assert problem in problems[0]


def test_a_file_that_is_gone_is_found():
    assert missing_files(
        "README.md", "`layer/function.py`, `examples/{sft,none}.py`, `tests/gpu/*.py`"
    ) == ["examples/{sft,none}.py"]


def blocks(language):
    """Of every page: (page, text)."""
    texts = [(page, (ROOT / page).read_text("utf-8")) for page in PAGES]
    fence = re.compile(rf"```{language}(?: title=.*?)?\n(.*?)```", re.DOTALL)
    return [(page, block) for page, text in texts for block in fence.findall(text)]


def test_python_blocks_compile_and_import_names_that_exist():
    imported = 0
    for page, block in blocks("python"):
        for node in ast.walk(ast.parse(block, page)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streambp"):
                module = importlib.import_module(node.module)
                names = {*dir(module), *getattr(module, "__all__", ())}
                for alias in node.names:
                    imported += 1
                    exists = alias.name in names or importlib.util.find_spec(
                        f"{node.module}.{alias.name}"
                    )
                    assert exists, f"{page}: {node.module}.{alias.name}"
    assert imported >= 5


def test_json_blocks_are_sections_that_streambp_takes():
    configs = [json.loads(block) for _, block in blocks("json")]
    sections = [config["streambp"] for config in configs if "streambp" in config]
    assert sections
    for section in sections:
        streambp.StreamConfig(**section)


def first_lines():
    return "\n".join((ROOT / "README.md").read_text("utf-8").splitlines()[:40])


def test_the_readmes_first_lines_lead_to_a_patched_model(capsys):
    """By themselves: the program needs nothing that it does not make."""
    (program,) = re.findall(r"```python\n(.*?)```", first_lines(), re.DOTALL)
    names: dict = {}
    exec(program, names)
    output = capsys.readouterr().out
    assert "in 4 chunks of 128, streamed" in output
    assert "streams: 2 x Qwen3DecoderLayer" in output
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def test_the_readme_is_short_and_has_the_two_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 120
    assert "\nbash .ci/setup && .venv/bin/python examples/long_context_sft.py\n" in text
    assert "\nbash .ci/setup && .venv/bin/python -m pytest -n 2\n" in text
    assert ".venv/bin/python -m pytest -n 2\n" in (ROOT / ".ci" / "run").read_text("utf-8")


@pytest.mark.parametrize(
    "module", ["streambp", "streambp.head", "streambp.losses", "streambp.integrations.trl"]
)
def test_the_api_page_has_every_public_name(module):
    page = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    functions = [name for name in importlib.import_module(module).__all__ if not name.isupper()]
    assert functions
    for name in functions:
        is_documented = name == "StreamBPError" or re.search(
            rf"^::: streambp\.[\w.]*\.?{name}$", page, re.MULTILINE
        )
        assert is_documented, f"docs/reference/api.md lacks {module}.{name}"


def test_every_page_is_in_the_sites_menu():
    menu = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert all(
        f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in menu
        for page in ROOT.glob("docs/**/*.md")
    )


@pytest.mark.skipif(SHARES_PREFIXES, reason="STREAMBP_TEST_ROWS changes a default")
def test_the_readmes_settings_are_the_defaults():
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| `([^`]*)` \|", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
        )
    )
    assert rows
    config = streambp.StreamConfig()
    assert {name: repr(getattr(config, name)).replace("'", '"') for name in rows} == rows
