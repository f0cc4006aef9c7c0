"""The pages of README.md and docs/, their blocks of code, and the commands in them."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
# a user's; docs/explanation and docs/ itself are for who wants to know more
FOLDERS = ("start", "how-to", "reference")
USER_PAGES = [page for folder in FOLDERS for page in sorted(ROOT.glob(f"docs/{folder}/*.md"))]
USERS = ("README.md", *(page.relative_to(ROOT).as_posix() for page in USER_PAGES))
ALL_PAGES = tuple(
    page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))
)
FENCE = re.compile(r'^```(\w+)?(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
OUTPUT = "text"  # blocks that show what a program prints


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block: `title` is the file that it is, if it is one; `expected_output` is
    the output right behind it."""

    page: str
    line: int
    language: str
    title: str
    text: str
    expected_output: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """Of a page, in order, without those that are output."""
    text = (ROOT / page).read_text("utf-8")
    found_blocks: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        if match[1] == OUTPUT and found_blocks and not text[end : match.start()].strip():
            found_blocks[-1] = dataclasses.replace(found_blocks[-1], expected_output=match[3])
        line, end = text.count("\n", 0, match.start()) + 1, match.end()
        found_blocks.append(Block(page, line, match[1] or "", match[2] or "", match[3]))
    return [block for block in found_blocks if block.language != OUTPUT]


def commands(block: Block) -> list[str]:
    """The lines of a bash block, joined where they go on, without comments."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


def words(command: str) -> tuple[dict[str, str], list[str]]:
    """A command's environment and its words."""
    arguments = shlex.split(command)
    environment = {}
    while arguments and re.match(r"[A-Z_]+=", arguments[0]):
        name, _, value = arguments.pop(0).partition("=")
        environment[name] = value
    return environment, arguments


def unfolded(output: str) -> list[str]:
    """The lines of an output that a page shows. A page folds a long line behind "(" or ", "."""
    joined = re.sub(r"\(\n +", "(", output)
    return re.sub(r",\n +", ", ", joined).splitlines()


def prose(text: str) -> str:
    """A page's text without code, comments, addresses and generated places."""
    text = re.sub(r"<!-- (?:from code|table): .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|<!--.*?-->", "", text, flags=re.DOTALL)
