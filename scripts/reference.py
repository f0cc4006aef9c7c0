"""Writes what the pages take from the code: `python scripts/reference.py`. `--check` only says
which pages differ.

A page marks such a place with `<!-- from code: NAME -->` and `<!-- end -->`. NAME is a key of
`FACTS`. So a fact (the rule of chunk sizes, the number of families, a table of settings) stands
once, in the code, and pages show it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
CODE_PLACE = re.compile(r"(<!-- from code: ([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)
FAMILIES = ROOT / "docs" / "reference" / "families.md"
TRAINERS = ("SFT", "DPO", "GRPO", "PPO")
LAUNCH_FLAGS = (
    "Settings"  # the panel of flags that are `StreamConfig`'s fields: the page of settings has them
)


def pages() -> list[Path]:
    """Those that may have such places."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def cell(text: str) -> str:
    """Text as a table's cell: no bars, no reference to a note in the sources."""
    return re.sub(r"\s*\[Note: [^\]]*\]", "", text).replace("|", "\\|").strip()


def code(names: str) -> str:
    """Names with commas between them."""
    return ", ".join(f"`{name}`" for name in names.split(", "))


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if text[:1].islower() else text


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def settings() -> str:
    from streambp.config import StreamConfig
    from streambp.launch.settings import argument_texts

    descriptions = argument_texts(StreamConfig.__doc__ or "")
    rows = [
        (
            f"`{field.name}`",
            f"`{value_text(field.default)}`",
            cell(sentence(descriptions[field.name])),
        )
        for field in dataclasses.fields(StreamConfig)
    ]
    return table(("field", "default", "meaning"), rows)


def value_text(value: Any) -> str:
    return repr(value).replace("'", '"')


def trainer_fields() -> str:
    """`Stream*Config`'s own fields, read as text: TRL need not be installed."""
    from streambp.launch.settings import argument_texts

    folder = ROOT / "streambp" / "integrations" / "trl"
    rows = []
    for module, name in [
        ("settings", "StreamArguments"),
        *((kind.lower(), f"Stream{kind}Config") for kind in TRAINERS),
    ]:
        tree = ast.parse((folder / f"{module}.py").read_text("utf-8"))
        class_node = next(
            node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
        )
        descriptions = (
            argument_texts(ast.get_docstring(class_node) or "")
            if "Args:" in (ast.get_docstring(class_node) or "")
            else {}
        )
        of = "all" if name == "StreamArguments" else f"`{name}`"
        rows += [(code(fields), of, cell(sentence(text))) for fields, text in descriptions.items()]
    return table(("field", "of", "meaning"), rows)


def command_line() -> str:
    """Every command with its options, as the parser has them."""
    import typer

    from streambp.cli.app import app

    parts = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        help_text = re.sub(r"\s+", " ", command.help or "").strip()
        parts.append(f"\n## streambp {name}\n\n{help_text}\n")
        (callback,) = (
            command_info.callback
            for command_info in app.registered_commands
            if command_info.callback.__name__ == name
        )  # type: ignore[union-attr]
        files = {
            field
            for field, hint in typing.get_type_hints(callback).items()
            if Path in (hint, *typing.get_args(hint))
        }
        rows = [row for parameter in command.params if (row := option(parameter, files))]
        parts.append(table(("option", "value", "meaning"), rows))
    return "".join(parts)


def option(parameter: Any, files: set[str]) -> tuple[str, str, str] | None:
    if parameter.name in ("help", "install_completion", "show_completion"):
        return None
    if getattr(parameter, "rich_help_panel", None) == LAUNCH_FLAGS:
        return None
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
    flag = bool(getattr(parameter, "is_flag", False))
    value = (
        ""
        if flag or not is_option
        else parameter.metavar or ("FILE" if parameter.name in files else "TEXT")
    )
    default = parameter.default
    has_plain_default = (
        not flag
        and isinstance(default, str | int | float)
        and not isinstance(default, bool)
        and default != ""
    )
    help_text = cell(getattr(parameter, "help", "") or "")
    help_text += (
        f" (default: {default})" if has_plain_default and "default" not in help_text else ""
    )
    return (
        ", ".join(f"`{name}`" for name in names),
        f"`{cell(value)}`" if value else "",
        sentence(help_text),
    )


def errors() -> str:
    module = importlib.import_module("streambp.errors")
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    rows = []
    # Built on first access, so it may be among the names already.
    for name in dict.fromkeys([*names, "DeviceMemoryError"]):
        error_class = getattr(module, name)
        bases = ", ".join(f"`{base.__name__}`" for base in error_class.__bases__)
        rows.append((f"`{name}`", bases, cell(" ".join((error_class.__doc__ or "").split()))))
    return table(("error", "is a", "meaning"), rows)


def chunk_rule() -> str:
    from streambp import chunks
    from streambp.offload.policy import CHUNK_TOKENS

    sizes = [f"{size:,}" for size in CHUNK_TOKENS]
    return (
        f"On a GPU streambp takes the fastest of {', '.join(sizes[:-1])} and {sizes[-1]} tokens "
        "over all rows of the batch that fits into the free memory. Elsewhere a chunk is "
        f"1/{chunks.AUTO_CHUNKS} of the sequence, between {chunks.AUTO_MIN_TOKENS:,} and "
        f"{chunks.AUTO_MAX_TOKENS:,} tokens."
    )


def families() -> str:
    """How many families have no layer that runs whole, by the page that the tests fill."""
    rows = re.findall(
        r"^\| [\w-]+ \| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \|",
        FAMILIES.read_text("utf-8"),
        re.MULTILINE,
    )
    return str(sum("streams" in layers and "checkpoints" not in layers for layers in rows))


def versions() -> str:
    """The supported range of Python, torch and transformers."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)", text)
    from streambp.libraries import NEWEST_TESTED_RELEASES

    lowest = {
        name: re.search(rf'"{name}>=([\d.]+)"', text)[1] for name in ("torch", "transformers")
    }  # type: ignore[index]
    ranges = [
        f"{name} {lowest[name]} to {'.'.join(map(str, NEWEST_TESTED_RELEASES[name]))}"
        for name in lowest
    ]
    return f"Python {pythons[0]} to {pythons[-1]}, {', '.join(ranges)}"


FACTS: MappingProxyType[str, Callable[[], str]] = MappingProxyType(
    {
        "settings": settings,
        "trainer-fields": trainer_fields,
        "command-line": command_line,
        "errors": errors,
        "chunk-rule": chunk_rule,
        "families": families,
        "versions": versions,
    }
)


def filled(text: str) -> str:
    """A page with what the code says now."""
    return CODE_PLACE.sub(lambda match: match[1] + FACTS[match[2]]() + match[4], text)


def main() -> int:
    """1 if a page differs under `--check`."""
    differ = []
    for page in pages():
        text = page.read_text("utf-8")
        if (new := filled(text)) != text:
            differ.append(page.relative_to(ROOT))
            if "--check" not in sys.argv:
                page.write_text(new, "utf-8")
    print(*differ or ["all pages agree with the code"], sep="\n")
    return int(bool(differ) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
