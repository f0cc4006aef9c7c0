""".ci/setup on machines of other kinds, whose Pythons, pips and indexes are stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hangs import HANG

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the stand-ins are POSIX scripts")

ROOT = Path(__file__).parents[2]
CPU, ANY = "torch==2.13.0+cpu", "torch>=2.11,<2.16"
TOOLS = ("bash", "env", "dirname", "grep")


class Machine:
    """A folder with .ci/setup, and a PATH that has these interpreters and next to nothing else."""

    def __init__(self, folder):
        self.root, self.bin, self.log = folder / "a project", folder / "bin", folder / "log"
        self.settings = {
            "index": "cpu",
            "venv": "works",
            "bin": "bin",
            "ensurepip": False,
            "log": str(self.log),
        }
        self.environment = {}
        (self.root / ".ci").mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "setup", self.root / ".ci")
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.command("uname", "echo Linux")

    def command(self, name, text):
        path = self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def python(self, name, version="3.11.7", first_lines=""):
        stand_in = Path(__file__).with_name("stand_in.py")
        self.command(
            name, f'{first_lines}\nexec "{sys.executable}" -S "{stand_in}" "$0" {version} "$@"'
        )

    def set_up(self):
        """Exit code, output, and what pip was asked to install."""
        self.log.write_text("")
        result = subprocess.run(
            ["bash", self.root / ".ci" / "setup"], capture_output=True, text=True, check=False, timeout=HANG,
            env={"PATH": str(self.bin), "MACHINE": json.dumps(self.settings), **self.environment},
        )  # fmt: skip
        return (
            result.returncode,
            result.stdout,
            result.stderr,
            [row[-1] for row in self.commands() if "install" in row],
        )

    def commands(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def interpreter(self):
        """The interpreter that the venv was made with; None if it was not made."""
        return next((row[0] for row in self.commands() if "venv" in row), None)


@pytest.fixture
def machine(tmp_path):
    machine_of_test = Machine(tmp_path)
    machine_of_test.python("python3")
    return machine_of_test


EXTRAS = ".[test,examples]"


def test_the_cpu_build_is_taken_where_there_is_one(machine):
    code, output, errors, installed = machine.set_up()
    assert (code, output, errors) == (0, "ready\n", "")
    assert installed == [CPU, EXTRAS]


@pytest.mark.parametrize(
    ("system", "costs"), [("Linux", True), ("Darwin", False), ("MINGW64_NT-10.0-26100", False)]
)
def test_plain_torch_where_there_is_none_and_what_it_costs(system, costs, machine):
    machine.settings["index"] = "plain"
    machine.command("uname", f"echo {system}")
    code, output, errors, installed = machine.set_up()
    assert (code, errors) == (0, "")
    assert installed == [CPU, ANY, EXTRAS]
    assert "pip finds no torch==2.13.0+cpu here" in output
    assert ("several GB" in output) == costs


def test_another_failure_of_pip_is_shown(machine):
    machine.settings["index"] = "broken"
    code, _, errors, installed = machine.set_up()
    assert code == 0
    assert "the connection was reset" in errors
    assert installed == [CPU, ANY, EXTRAS]


@pytest.mark.parametrize(
    ("nvidia_smi", "expected"),
    [
        ("echo 'GPU 0: NVIDIA H200'", [ANY, EXTRAS]),
        ("echo 'No devices were found'; exit 6", [CPU, EXTRAS]),
    ],
)
def test_a_gpu_is_one_that_answers(nvidia_smi, expected, machine):
    machine.command("nvidia-smi", nvidia_smi)
    code, _, errors, installed = machine.set_up()
    assert code == 0
    assert installed == expected
    assert ("this torch cannot use it" in errors) == (expected == [ANY, EXTRAS])


@pytest.mark.parametrize(
    ("pythons", "expected"),
    [
        ({"python3": "3.9.18", "python3.13": "3.13.0"}, "python3.13"),
        # a shim without a version
        ({"python3.11": None, "python3.10": "3.10.13", "python3": "3.14.0"}, "python3.10"),
        ({"python": "3.12.1", "python3": None}, "python"),
        ({"python3": "3.12.1", "python3.11": "3.11.7"}, "python3.11"),
    ],
)
def test_the_interpreter_is_one_in_range(pythons, expected, machine):
    for name, version in pythons.items():
        machine.python(name, version or "3.11.7", "" if version else "exit 127")
    assert machine.set_up()[0] == 0
    assert machine.interpreter() == expected


def test_windows_launcher_and_folder(machine):
    machine.settings["bin"] = "Scripts"
    machine.command("python3", "exit 49")  # the shop's
    machine.command(
        "py", f'[ "$1" = -3.12 ] || exit 103; shift; exec "{machine.bin}/there/python.exe" "$@"'
    )
    machine.python("there/python.exe", "3.12.1")
    code, output, _, installed = machine.set_up()
    assert (code, output, installed) == (0, "ready\n", [CPU, EXTRAS])
    assert machine.interpreter() == "python.exe"


@pytest.mark.parametrize("version", ["3.9.18", "3.14.0"])
def test_no_interpreter_in_range(version, machine):
    machine.python("python3", version)
    code, _, errors, installed = machine.set_up()
    assert (code, installed) == (1, [])
    assert "PYTHON=/path/to/python3.11" in errors


def test_a_named_interpreter_comes_first(machine):
    machine.python("mine with spaces", "3.13.0")
    machine.environment["PYTHON"] = str(machine.bin / "mine with spaces")
    assert machine.set_up()[0] == 0
    assert machine.interpreter() == "mine with spaces"
    shutil.rmtree(machine.root / ".venv")
    machine.environment["PYTHON"] = "python2"
    code, _, errors, _ = machine.set_up()
    assert code == 1
    assert "PYTHON=python2 does not name a Python from 3.10 to 3.13" in errors


def test_a_second_run_keeps_what_is_there(machine):
    machine.set_up()
    code, _, _, installed = machine.set_up()
    assert (code, installed, machine.interpreter()) == (0, [EXTRAS], None)


def test_a_venv_without_pip_is_given_one(machine):
    machine.settings |= {"venv": "without pip", "ensurepip": True}
    code, _, _, installed = machine.set_up()
    assert (code, installed) == (0, [CPU, EXTRAS])
    (machine.root / ".venv" / "bin" / "pip").unlink()
    code, _, _, installed = machine.set_up()
    assert (code, installed, machine.interpreter()) == (0, [EXTRAS], None)


def test_a_venv_that_does_not_work_is_made_anew(machine):
    machine.set_up()
    (machine.root / ".venv" / "bin" / "pip").unlink()
    code, output, _, installed = machine.set_up()
    assert (code, installed) == (0, [CPU, EXTRAS])
    assert machine.interpreter() == "python3"
    assert "making it anew" in output


def test_a_python_that_makes_no_venv_says_what_is_missing(machine):
    machine.settings["venv"] = "fails"
    code, _, errors, installed = machine.set_up()
    assert (code, installed) == (1, [])
    assert "python3-venv" in errors


def test_the_versions_are_the_packages():
    """.ci/setup names its own range, since nothing is installed yet that could tell it."""
    script, package = (ROOT / ".ci" / "setup").read_text(), (ROOT / "pyproject.toml").read_text()
    assert f"'{ANY}'" in script
    assert f'"{ANY}"' in package
    assert "://" not in script
