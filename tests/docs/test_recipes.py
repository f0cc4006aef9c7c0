"""The recipes of the users' pages: rows that are as long as the program says, and the settings that
the plan on the same page prints.

covers: planner/launch_commands.py
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest

from tests.docs.pages import USERS, Block, blocks, commands, unfolded

SHORT_CHATS = "trl-lib/Capybara"
LONG = 10_000  # tokens of a row that no chat of the data set reaches
PLANNED = re.compile(r"(?:[\d,]+ tokens|For completions of [\d,]+ tokens): (streambp\..*)$")
# the programs under the plans of a page, in order
PROGRAMS = {
    "docs/how-to/70b-24gb.md": ("big.py",),
    "docs/how-to/fsdp2.md": ("fsdp2.py",),
    "docs/how-to/full-80gb.md": ("full.py",),
    "docs/how-to/grpo.md": ("grpo.py",),
    "docs/how-to/qlora-24gb.md": ("qlora.py",),
    "docs/how-to/zero3.md": ("zero3.json",),
}
# recipes that show no plan: their programs have settings of their own, or the defaults
WITHOUT_SHOWN_PLAN = {
    "docs/how-to/dpo.md",
    "docs/how-to/million-tokens.md",
}


def unpacked_programs(page_blocks: list[Block]) -> list[str]:
    """Return the programs and commands that ask for long rows and would get single chats."""
    matches = []
    for block in page_blocks:
        if SHORT_CHATS not in block.text:
            continue
        if block.language == "python" and not packs(block.text):
            matches.append(str(block))
        if block.language == "bash":
            matches += [
                command
                for command in commands(block)
                if SHORT_CHATS in command
                and not ("--packing" in command and "--max_length" in command)
            ]
    return matches


def packs(program: str) -> bool:
    """True if each call with long rows in a program packs them."""
    for node in ast.walk(ast.parse(program)):
        if not isinstance(node, ast.Call):
            continue
        constants = {
            keyword.arg: keyword.value.value
            for keyword in node.keywords
            if isinstance(keyword.value, ast.Constant)
        }
        if constants.get("max_length", 0) >= LONG and constants.get("packing") is not True:
            return False
    return True


@pytest.mark.parametrize("page", USERS)
def test_long_rows_of_chats_are_packed(page):
    assert unpacked_programs(blocks(page)) == []


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", f'A(max_length=65536)\nload_dataset("{SHORT_CHATS}")'),
        ("python", f'A(max_length=65536, packing=False)\nload_dataset("{SHORT_CHATS}")'),
        ("bash", f"trl sft --dataset_name {SHORT_CHATS} --max_length 65536"),
        ("bash", f"trl sft --dataset_name {SHORT_CHATS} --packing"),
    ],
)
def test_a_program_with_short_rows_is_found(language, text):
    assert len(unpacked_programs([Block("page.md", 1, language, "", text)])) == 1


def planned(block: Block) -> dict[str, Any] | None:
    """Return the settings in the plan that a page shows; None if it shows none."""
    for line in unfolded(block.expected_output):
        if match := PLANNED.match(line):
            return settings_of(ast.parse(match[1]))
    return None


def settings_of(tree: ast.AST) -> dict[str, Any]:
    """Return the fields of a `StreamConfig(...)`, or those that a trainer's arguments give it."""
    matches: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        start = "" if name == "StreamConfig" else "stream_"
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg.startswith(start):
                matches[keyword.arg.removeprefix(start)] = ast.literal_eval(keyword.value)
    return plain(matches)


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as a dict that compares: a list as a tuple, a chunk size as text."""
    return {
        name: tuple(value)
        if isinstance(value, list)
        else str(value)
        if name == "chunk_size"
        else value
        for name, value in settings.items()
    }


def program_settings(block: Block) -> dict[str, Any]:
    """Return the settings of a page's program, or of its DeepSpeed file."""
    if block.language == "json":
        return plain(json.loads(block.text).get("streambp", {}))
    return settings_of(ast.parse(block.text))


def pairs(page_blocks: list[Block]) -> list[tuple[Block, Block]]:
    """Return each plan whose settings are shown, with the program or DeepSpeed file under it."""
    matches = []
    for number, block in enumerate(page_blocks):
        if block.language == "bash" and planned(block) is not None:
            programs = [
                block
                for block in page_blocks[number + 1 :]
                if block.title and (block.language == "python" or '"streambp"' in block.text)
            ]
            matches.append((block, programs[0]))
    return matches


@pytest.mark.parametrize("page", PROGRAMS)
def test_a_program_has_the_settings_that_its_plan_prints(page):
    """`test_blocks.py` compares what the page shows with a new count of the plan."""
    matches = pairs(blocks(page))
    assert [program.title for _, program in matches] == list(PROGRAMS[page])
    for plan, program in matches:
        assert program_settings(program) == planned(plan), program


def test_each_page_with_a_plan_is_compared():
    pages = {
        page
        for page in USERS
        if page.startswith("docs/how-to")
        and any(
            command.startswith(("streambp plan Qwen", "streambp plan meta"))
            for block in blocks(page)
            if block.language == "bash"
            for command in commands(block)
        )
    }
    assert pages == set(PROGRAMS) | WITHOUT_SHOWN_PLAN
    assert not any(pairs(blocks(page)) for page in WITHOUT_SHOWN_PLAN)


@pytest.mark.parametrize(
    "wrong",
    [
        'A(stream_chunk_size="8192", stream_offload="cpu")',
        'A(stream_chunk_size="4096", stream_saves=["attn_out", "kv"], stream_offload="cpu")',
        'A(stream_chunk_size="8192", stream_saves=["attn_out"], stream_offload="cpu")',
        'A(stream_chunk_size="8192", stream_saves=["attn_out", "kv"])',
    ],
)
def test_another_setting_is_found(wrong):
    ((plan, program),) = pairs(blocks("docs/how-to/qlora-24gb.md"))
    right = planned(plan)
    assert right == program_settings(program)
    assert settings_of(ast.parse(wrong)) != right
