"""The recipes of the users' pages: rows are as long as the program says."""

from __future__ import annotations

import ast

import pytest

from tests.docs.pages import USERS, Block, blocks, commands

SHORT_CHATS = "trl-lib/Capybara"
LONG = 10_000  # tokens of a row that no chat of the data set reaches


def unpacked_programs(page_blocks: list[Block]) -> list[str]:
    """Return the programs and commands that ask for long rows and would get single chats."""
    found = []
    for block in page_blocks:
        if SHORT_CHATS not in block.text:
            continue
        if block.language == "python" and not packs(block.text):
            found.append(str(block))
        if block.language == "bash":
            found += [
                command
                for command in commands(block)
                if SHORT_CHATS in command
                and not ("--packing" in command and "--max_length" in command)
            ]
    return found


def packs(program: str) -> bool:
    """True if each call with long rows in a program packs them."""
    for node in ast.walk(ast.parse(program)):
        if not isinstance(node, ast.Call):
            continue
        given = {
            keyword.arg: keyword.value.value
            for keyword in node.keywords
            if isinstance(keyword.value, ast.Constant)
        }
        if given.get("max_length", 0) >= LONG and given.get("packing") is not True:
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
