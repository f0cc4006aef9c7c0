"""A Python in place of a real one, for tests of .ci/setup: `python -S stand_in.py PATH VERSION
ARGUMENT...`.

It notes what it is asked for and answers as the machine described by the JSON text in $MACHINE
would: "index": what pip finds, "cpu", "plain" or "broken"; "venv": "works", "fails" or "without
pip"; "bin": the folder of a venv's commands; "ensurepip": whether there is one; "log": the file of
notes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path


def run_code(code, path, version):
    """In this interpreter, as if it were the one at `path`."""
    if "import sys, streambp" in code:
        sys.exit(print("ready"))
    if "cuda" in code:
        sys.exit(1)
    base = path.parent / "base"
    sys.version_info, sys.executable = tuple(map(int, version.split("."))), str(path)
    sys._base_executable = base.read_text() if base.exists() else str(path)
    sys.path.insert(0, str(path.parent / "site"))
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})


def make_venv(folder, path, machine):
    if machine["venv"] == "fails":
        sys.exit("ensurepip is not available")
    shutil.rmtree(folder, ignore_errors=True)
    commands = folder / machine["bin"]
    commands.mkdir(parents=True)
    shutil.copy(path, commands / ("python.exe" if machine["bin"] == "Scripts" else "python"))
    (commands / "base").write_text(str(path))
    if machine["venv"] == "works":
        (commands / "pip").touch()


def install(requirement, path, machine):
    if requirement.startswith("torch"):
        if machine["index"] == "broken" and "+cpu" in requirement:
            sys.exit("ERROR: the connection was reset")
        if machine["index"] == "plain" and "+cpu" in requirement:
            sys.exit(f"ERROR: No matching distribution found for {requirement}")
        info = path.parent / "site" / "torch-2.13.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")


def main():
    path, version, *arguments = Path(sys.argv[1]), *sys.argv[2:]
    machine = json.loads(os.environ["MACHINE"])
    with open(machine["log"], "a") as log:
        print(json.dumps([path.name, *arguments]), file=log)
    match arguments:
        case ["-c", code]:
            run_code(code, path, version)
        case ["-m", "venv", "--clear", folder]:
            make_venv(Path(folder), path, machine)
        case ["-m", "pip", "--version"]:
            sys.exit(not (path.parent / "pip").exists())
        case ["-m", "ensurepip"] if machine["ensurepip"]:
            (path.parent / "pip").touch()
        case ["-m", "pip", "install", *_, what]:
            install(what, path, machine)
        case _:
            sys.exit(f"{path} was not expected to be asked for {arguments}")


if __name__ == "__main__":
    main()
