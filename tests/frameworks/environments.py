"""Environments of their own for frameworks, whose requirements no environment could hold
together."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.frameworks.programs import Framework

ROOT = Path(__file__).parents[2]
READY_MARK = "streambp-test-ready"


def make(framework: Framework, folder: Path, python: str) -> Path:
    """The bin folder of the framework's environment in `folder`; one that is complete is used
    again, with streambp anew."""
    binaries = folder / "bin"
    if not (folder / READY_MARK).exists():
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        pip(binaries, *cpu_builds(framework.packages, binaries))
        pip(binaries, "--no-deps", "--ignore-requires-python", framework.framework)
        place_stand_ins(framework, binaries)
        (folder / READY_MARK).touch()
    install_streambp(binaries)
    return binaries


def pip(binaries: Path, *requirements: str) -> None:
    subprocess.run(
        [str(binaries / "python"), "-m", "pip", "install", "--quiet", *requirements], check=True
    )


def cpu_builds(packages: tuple[str, ...], binaries: Path) -> list[str]:
    """With the CPU build of torch where pip finds one, which saves gigabytes."""
    torch = next(name for name in packages if name.startswith("torch=="))
    process = subprocess.run(
        [str(binaries / "python"), "-m", "pip", "install", "--quiet", f"{torch}+cpu"],
        check=False,
        stderr=subprocess.DEVNULL,
    )
    return [
        f"{torch}+cpu" if name == torch and process.returncode == 0 else name for name in packages
    ]


def install_streambp(binaries: Path) -> None:
    """As its users get it: no editable install, of which frameworks would not see the entry points'
    metadata change."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        shutil.copytree(
            ROOT / "streambp", source / "streambp", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
            shutil.copy(ROOT / name, source)
        pip(binaries, "--no-deps", "--force-reinstall", str(source))


def place_stand_ins(framework: Framework, binaries: Path) -> None:
    """Empty modules under the names of what a framework imports without using it in these runs."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = subprocess.run(
        [str(binaries / "python"), "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()
    for name, text in framework.stand_ins.items():
        file = Path(site_packages, *name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def versions(binaries: Path, *names: str) -> dict[str, str]:
    """Installed versions, and Python's."""
    code = (
        "import importlib.metadata as m, sys; print(sys.version.split()[0], *map(m.version, "
        "sys.argv[1:]))"
    )
    command = [str(binaries / "python"), "-c", code, *names]
    output_lines = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=tempfile.gettempdir()
    ).stdout.split()
    return dict(zip(("python", *names), output_lines, strict=True))


def name_of(requirement: str) -> str:
    return re.split(r"[=<>\[]", requirement)[0]


def default_python() -> str:
    return sys.executable
