"""What the hook costs each Python process that starts, in modules; the time is printed.

covers: launch/command.py, launch/hook.py, launch/hook_file.py, launch/settings.py
"""

from __future__ import annotations

import os
import subprocess
import venv

import pytest

from streambp.launch.command import environment
from streambp.launch.hook import SETTINGS_VARIABLE
from streambp.launch.hook_file import install_hook
from streambp.launch.settings import LaunchSettings

LOADER_MODULES = {"sitecustomize", "__future__", "importlib", "importlib.machinery"}
IMPORTLIB_MODULES = {
    "importlib._bootstrap",
    "importlib._bootstrap_external",
    "_imp",
    "_warnings",
    "warnings",
}


def started(python, variables):
    """Microseconds that each module took a Python that does nothing: its own, and with what it
    imports."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("STREAMBP", "PYTHON"))
    }
    command = [python, "-X", "importtime", "-c", ""]
    listing = subprocess.run(
        command, env={**plain, **variables}, capture_output=True, text=True, check=True
    ).stderr
    rows = [
        line.removeprefix("import time:").split("|") for line in listing.splitlines() if "|" in line
    ]
    return {
        name.strip(): (int(self_time), int(total_time))
        for self_time, total_time, name in rows
        if self_time.strip().isdigit()
    }


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Of an environment without packages, whose start imports as little as can be."""
    folder = tmp_path_factory.mktemp("start") / "v"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    # From 3.13 on the first such file of an environment imports its encoding.
    (next(folder.rglob("site-packages")) / "other.pth").write_text("\n")
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


@pytest.mark.parametrize("way", ["launch", "placed file"])
def test_a_process_imports_next_to_nothing(way, python, tmp_path, capsys):
    """Neither torch nor streambp, and of the standard library only what loads the hook."""
    times_without = started(python, {})
    variables = environment(LaunchSettings(), str(tmp_path))
    if way == "launch":
        variables = {name: variables[name] for name in ("PYTHONPATH", SETTINGS_VARIABLE)}
    else:
        install_hook(next(python.parents[1].rglob("site-packages")))
        variables = {SETTINGS_VARIABLE: "{}"}
    times_with_launch = started(python, variables)
    new = set(times_with_launch) - set(times_without)
    with capsys.disabled():
        cost = sum(
            times_with_launch[name][0]
            for name in new | {"sitecustomize"}
            if name in times_with_launch
        )
        print(
            f" [{way}: {cost} us in {', '.join(sorted(new)) or 'no new module'}; a start imports "
            f"{len(times_with_launch)}]",
            end="",
        )
    assert "os" in times_without
    assert "importlib.machinery" in new  # the hook was loaded
    assert new <= LOADER_MODULES | IMPORTLIB_MODULES
