"""Whether archives can be published: `python tests/packaging/release.py FOLDER`, in the release
workflow.

One wheel and one source archive, of one version, which is the tag's if a tag is built; and no link
of the package's page that leads nowhere outside of the repository. Exits with 1 and says what is
wrong.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

RELATIVE = re.compile(r"\]\((?!https://|#)([^)]*)\)")


def metadata(archive: Path) -> Message:
    """Of a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return HeaderParser().parsestr(wheel.read(name).decode())
    with tarfile.open(archive) as tar:
        member = next(
            member
            for member in tar
            if member.name.count("/") == 1 and member.name.endswith("/PKG-INFO")
        )
        file = tar.extractfile(member)
        assert file is not None
        return HeaderParser().parsestr(file.read().decode())


def problems(folder: Path, tag: str | None) -> list[str]:
    """What is wrong with the archives in a folder."""
    archives = sorted(folder.iterdir())
    kinds = ["".join(Path(archive.name.partition("-")[2]).suffixes[-1:]) for archive in archives]
    if sorted(kinds) != [".gz", ".whl"]:
        return [
            f"{folder} has {[archive.name for archive in archives]}; it must have one .whl and one "
            ".tar.gz"
        ]
    messages = []
    for archive in archives:
        fields = metadata(archive)
        if tag is not None and tag != f"v{fields['Version']}":
            messages.append(
                f"{archive.name} is of version {fields['Version']}, and the tag is {tag}"
            )
        messages += [
            f"{archive.name}: its page has the link {link}"
            for link in RELATIVE.findall(str(fields.get_payload()))
        ]
        urls = {line.partition(",")[0] for line in fields.get_all("Project-URL", [])}
        lacking = {"Homepage", "Documentation", "Issues", "Changelog", "Source"} - urls
        messages += [f"{archive.name} names no {name} page" for name in sorted(lacking)]
    return messages


def main() -> int:
    tag = os.environ.get("GITHUB_REF_NAME") if os.environ.get("GITHUB_REF_TYPE") == "tag" else None
    messages = problems(Path(sys.argv[1]), tag)
    print("\n".join(messages) or "the archives can be published")
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
