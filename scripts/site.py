"""A hook of mkdocs (mkdocs.yml): README.md is the site's home, CONTRIBUTING.md and CHANGELOG.md are
pages of it.

They stay where a repository has them, once. Their links, which are relative to the repository's
root, are rewritten.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def move_links(text: str, repository: str | None) -> str:
    """A page of the root as a page of the site: links into docs/, to other such pages, else into
    the repository."""

    def link(match: re.Match[str]) -> str:
        image_mark, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        if target.startswith("docs/"):
            return f"{image_mark}[{label}]({target.removeprefix('docs/')}{anchor})"
        if target in PAGES:
            return f"{image_mark}[{label}]({PAGES[target]}{anchor})"
        return (
            f"[{label}]({repository.rstrip('/')}/blob/main/{target}{anchor})"
            if repository
            else label
        )

    return LINK.sub(link, text)


def on_config(config: Any) -> Any:
    """The repository, for the link in the header and for files that are no pages, where a workflow
    builds the site."""
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and name and not config.repo_url:
        config.repo_url, config.repo_name = f"{server}/{name}", name
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds them."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=move_links(text, config.repo_url)))
    return files
