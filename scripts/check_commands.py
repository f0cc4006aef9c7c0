"""The commands and files that README.md, CONTRIBUTING.md and docs/ name: do they parse, and do they
exist?

    python scripts/check_commands.py

Prints every command with how it was checked, and exits with 1 if one is wrong. Commands are the
lines of ```bash blocks, and code spans that begin with the name of a program. `streambp ...` must
parse with the command line's own parser; a file or module of this project must exist, and the
sources of its folder must name the flags. Other programs are not checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from streambp.cli.commands import parse
from streambp.errors import StreamBPError

ROOT = Path(__file__).parents[1]
# its entries speak of commands that other entries replaced
CHANGELOG = ROOT / "docs" / "changelog-for-developers.md"
DOCS = tuple(
    page.relative_to(ROOT).as_posix()
    for page in sorted(ROOT.glob("docs/**/*.md"))
    if page != CHANGELOG
)
PAGES = ("README.md", "CONTRIBUTING.md", "paper_repro/README.md", *DOCS)
PROGRAMS = r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:streambp (?:verify|plan|profile|launch|env)|python|pytest|bash|mkdocs)\b.+"
OWN_FOLDERS = ("streambp", "paper_repro", "tests", "scripts", "examples", "docs", ".ci")
OPTIONS_WITH_VALUE = ("-k", "-m", "-n")  # of pytest
FILE = re.compile(r"(?:[\w.-]+/)+[\w{},*.-]+\.(?:py|js|md|csv|sh)\b|\.ci/\w+|examples/\w+/")
FOREIGN_FOLDERS = ("open_instruct/",)  # folders of other projects


@dataclasses.dataclass(frozen=True)
class Command:
    """One command as a page has it: `words` without comment and environment."""

    page: str
    text: str
    words: tuple[str, ...]


def commands(page: str, text: str) -> Iterator[Command]:
    """Those of a page's ```bash blocks and code spans."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    spans = [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", outside)]
    for line in [*lines, *(span for span in spans if re.fullmatch(PROGRAMS, span))]:
        words = shlex.split(re.sub(r" > \S+", "", line), comments=True)
        for _, part in itertools.groupby(words, lambda word: word not in ("&&", ";")):
            command_words = list(
                itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), part)
            )
            if command_words and command_words[0] not in ("&&", ";"):
                yield Command(page, line.strip(), tuple(command_words))


def check(command: Command) -> tuple[str, str | None]:
    """How a command was checked, and what is wrong with it, if anything is."""
    program, *program_arguments = (word for word in command.words if word not in ("...", "…"))
    match Path(program).name, program_arguments:
        case "streambp", _:
            return "parsed", _parse(program_arguments)
        case "python", ["-m", "pytest", *arguments]:
            return "files exist", _pytest(arguments)
        case "pytest", arguments:
            return "files exist", _pytest(arguments)
        case "python", ["-m", module, *arguments] if module.split(".")[0] in OWN_FOLDERS:
            path = ROOT / module.replace(".", "/")
            path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            return "module exists", _script(path, arguments)
        case (("python" | "bash"), [path, *arguments]) if path.split("/")[0] in OWN_FOLDERS:
            return "file exists", _script(ROOT / path, arguments)
    return "not checked: another program", None


def _parse(arguments: list[str]) -> str | None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            parse(arguments)
    except StreamBPError as error:
        return str(error)
    return None


def _pytest(arguments: list[str]) -> str | None:
    paths, names, value_of = [], [], ""
    for word in arguments:
        if value_of == "-k":
            names.append(word)
        elif not value_of and not word.startswith("-"):
            paths.append(word)
        value_of = word if not value_of and word in OPTIONS_WITH_VALUE else ""
    missing_path = next((path for path in paths if not (ROOT / path).exists()), None)
    if missing_path is not None:
        return f"{missing_path} does not exist"
    sources = "".join(_sources(ROOT / path) for path in paths)
    unknown = next((name for name in names if not name.isupper() and name not in sources), None)
    return f"no test there is named {unknown}" if unknown else None


def _script(path: Path, arguments: list[str]) -> str | None:
    if not path.is_file():
        return f"{path.relative_to(ROOT)} does not exist"
    flags = [word.split("=")[0] for word in arguments if word.startswith("--")]
    sources = _sources(path.parent)
    unknown = next((flag for flag in flags if f'"{flag}"' not in sources), None)
    return f"{path.relative_to(ROOT)} has no flag {unknown}" if unknown else None


def _sources(path: Path) -> str:
    return "".join(p.read_text("utf-8") for p in (path.rglob("*.py") if path.is_dir() else [path]))


def missing_files(page: str, text: str) -> list[str]:
    """Paths in code spans that are files neither of this project, nor of its package, nor beside
    the page."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    paths = {
        path
        for span in spans
        for path in FILE.findall(span)
        if not path.startswith(FOREIGN_FOLDERS)
    }
    bases = (ROOT, ROOT / "streambp", (ROOT / page).parent)
    return sorted(path for path in paths if not any(_exists(base, path) for base in bases))


def _exists(base: Path, path: str) -> bool:
    """Whether a path is there, with every alternative in braces and some match of a star."""
    alternatives = re.split(r"\{(.*?)\}", path, maxsplit=1)
    if len(alternatives) == 3:
        return all(
            _exists(base, alternatives[0] + name + alternatives[2])
            for name in alternatives[1].split(",")
        )
    return any(base.glob(path)) if "*" in path else (base / path).exists()


def main() -> int:
    """Print the table; 1 if something is wrong."""
    wrong = 0
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        for command in commands(page, text):
            how, problem = check(command)
            wrong += problem is not None
            print(
                f"{page}: {' '.join(command.words)}\n    {'WRONG: ' + problem if problem else how}"
            )
        for path in missing_files(page, text):
            wrong += 1
            print(f"{page}: {path}\n    WRONG: there is no such file")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
