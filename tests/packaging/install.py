"""An archive as its users get it: `python tests/packaging/install.py ARCHIVE FOLDER`, in the
release workflow.

Makes an environment in FOLDER, installs the archive, or a clone's folder, there with the extras of
README.md's first command (TRL has no release for Python 3.10), and runs first_day.py with it, away
from the sources. `--system-site-packages` and `--no-deps` after FOLDER take libraries, and pip,
from the environment that runs this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

EXTRAS = "trl,peft" if sys.version_info >= (3, 11) else "peft"
SYSTEM, NO_DEPS = "--system-site-packages", "--no-deps"


def install(archive: Path, folder: Path, flags: list[str]) -> Path:
    """The environment's Python."""
    shared = [SYSTEM, "--without-pip"] if SYSTEM in flags else []
    subprocess.run([sys.executable, "-m", "venv", *shared, str(folder)], check=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if shared:  # the system's libraries are not those of an environment that runs this
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site_packages = subprocess.run(
            [python, "-c", program], check=True, capture_output=True, text=True
        ).stdout.strip()
        Path(site_packages, "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # the shared libraries may have a streambp, too
    offline = [NO_DEPS, "--no-build-isolation", "--force-reinstall"]
    options = ["--disable-pip-version-check", *(offline if NO_DEPS in flags else [])]
    subprocess.run(
        [python, "-m", "pip", "install", *options, f"{archive.resolve()}[{EXTRAS}]"], check=True
    )
    return python


def main() -> int:
    archive, folder, *flags = sys.argv[1:]
    python = install(Path(archive), Path(folder), flags)
    program = Path(__file__).with_name("first_day.py").resolve()
    return subprocess.run([python, program], check=False, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
