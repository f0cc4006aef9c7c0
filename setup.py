"""What the package is stands in pyproject.toml. Here: its page, whose links lead to where the project is built from, and an
example that it takes along.

README.md has links within the repository, which lead nowhere on another site. The repository's address is GitHub's, if one
of its workflows builds; else that of the source archive; else the clone's `origin`. Without any the links stay as they are.
"""

import os
import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!\w+:|#)([^)\s]+)(\))")  # to a file of the repository


def address() -> str | None:
    """Of the repository, such as https://github.com/OWNER/NAME."""
    if "GITHUB_REPOSITORY" in os.environ:
        return f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    archive = ROOT / "PKG-INFO"
    if archive.exists():
        urls = HeaderParser().parsestr(archive.read_text("utf-8")).get_all("Project-URL", [])
        return next((url.partition(", ")[2] for url in urls if url.startswith("Source, ")), None)
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    try:
        origin = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.fullmatch(r"(?:https://|(?:ssh://)?git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", origin)
    return f"https://{found[1]}/{found[2]}" if found else None


def page(home: str | None) -> str:
    """README.md with links to the files of this version."""
    text = (ROOT / "README.md").read_text("utf-8")
    if home is None:
        return text
    version = re.search(
        r'^__version__ = "(.+)"$',
        (ROOT / "streambp" / "__init__.py").read_text("utf-8"),
        re.MULTILINE,
    )[1]

    def absolute(link: re.Match[str]) -> str:
        return f"{link[1]}{home}/{'raw' if link[1][0] == '!' else 'blob'}/v{version}/{link[2]}{link[3]}"

    return LINK.sub(absolute, text)


def urls(home: str | None) -> dict[str, str]:
    """Of the project, by the names that the package's page shows."""
    paper = {"Paper": "https://arxiv.org/abs/2506.03077"}
    if home is None:
        return paper
    pages = {"Documentation": "docs/start/install.md", "Changelog": "CHANGELOG.md"}
    known = {name: f"{home}/blob/HEAD/{path}" for name, path in pages.items()}
    return {"Homepage": home, "Source": home, **known, "Issues": f"{home}/issues", **paper}


class WithObjectives(build_py):
    """Objectives that `streambp.losses` has for one more release are built into it from their example."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file(
                "examples/objectives.py",
                str(Path(self.build_lib) / "streambp" / "losses" / "objectives.py"),
            )


setup(
    long_description=page(address()),
    long_description_content_type="text/markdown",
    project_urls=urls(address()),
    cmdclass={"build_py": WithObjectives},
)  # the rest is pyproject.toml's
