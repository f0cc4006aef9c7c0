"""Write docs/llms.txt, an index of the users' pages for programs that read documentation.

python -m scripts.llms            writes docs/llms.txt
python -m scripts.llms --check    exit code 1 if it is not current

The format is that of llmstxt.org: a title, a summary, and links with one sentence each. The
sections are those of the site's navigation, and sentences are the first of each page.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "llms.txt"
SECTIONS = ("Start", "How-to", "Reference", "Explanation")
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!--.*?-->|\*\*|`")


class Navigation(yaml.SafeLoader):
    """Loader that ignores mkdocs' tags for Python names."""


Navigation.add_multi_constructor("", lambda loader, suffix, node: None)


def pages(entry: Any) -> Iterator[tuple[str, str]]:
    """Yield title and file of each page below an entry of the navigation."""
    if isinstance(entry, list):
        for part in entry:
            yield from pages(part)
        return
    for title, inner in entry.items():
        if isinstance(inner, str):
            yield title, inner
        else:
            yield from pages(inner)


def first_sentence(text: str) -> str:
    """Return the first sentence of a page's first paragraph, without marks; "" if it has none."""
    for paragraph in FENCED.sub("", text).split("\n\n"):
        if not paragraph.strip() or paragraph.lstrip().startswith(
            ("#", "```", "|", "!", "<!--", ":::", "-")
        ):
            continue
        plain = " ".join(MARK.sub("", LINK.sub(r"\1", paragraph)).split())
        return re.sub(r":$|, and$", "", re.split(r"(?<=[.:?])\s", plain)[0])
    return ""


def index() -> str:
    """Return the index."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Navigation)
    lines = [
        "# streambp",
        "",
        f"> {first_sentence((ROOT / 'README.md').read_text('utf-8'))}",
        "",
        "The distribution is called `streambp-hf`, the package `streambp`. Do not install the "
        "distribution `streambp`, which is another project. `streambp plan` says what fits, "
        "`streambp verify` whether gradients are exact; wrong settings raise errors that name one "
        "remedy.",
    ]
    for entry in config["nav"]:
        (section, inner), *_ = entry.items()
        if section not in SECTIONS:
            continue
        lines += ["", f"## {section}", ""]
        for title, file in pages(inner):
            sentence = first_sentence((ROOT / "docs" / file).read_text("utf-8"))
            suffix = f": {sentence}" if sentence else ""
            lines.append(f"- [{title}]({file.removesuffix('.md')}/){suffix}")
    return "\n".join([*lines, ""])


def main() -> int:
    """Write or check the index."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    current = INDEX.is_file() and INDEX.read_text("utf-8") == index()
    if parser.parse_args().check:
        return 0 if current else 1
    if not current:
        INDEX.write_text(index(), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
