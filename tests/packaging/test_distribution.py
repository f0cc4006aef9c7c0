"""The wheel and the source archive: that they are whole, what they say of themselves, and that the
wheel alone runs.

covers: __init__.py, cli/runs.py
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.hangs import HANG
from tests.packaging.release import problems

setuptools = pytest.importorskip(
    "setuptools", minversion="77", reason="setuptools 77 reads this pyproject.toml"
)

ROOT = Path(__file__).parents[2]
TREES = (
    ".ci",
    ".devcontainer",
    ".github",
    ".vale",
    "docs",
    "examples",
    "paper_repro",
    "scripts",
    "streambp",
    "tests",
)
FILES = (
    ".dockerignore", ".pre-commit-config.yaml", ".vale.ini", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md",
    "Dockerfile", "LICENSE", "MANIFEST.in", "README.md", "mkdocs.yml", "pyproject.toml", "setup.py",
)  # fmt: skip
IGNORED_FILES = shutil.ignore_patterns("__pycache__", "*.pyc")
BUILD = (
    "import sys; from setuptools import build_meta as b; to = sys.argv.pop(); b.build_wheel(to); "
    "b.build_sdist(to)"
)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A wheel and a source archive of a copy of the project, and the copy."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    for tree in TREES:
        shutil.copytree(ROOT / tree, source / tree, ignore=IGNORED_FILES)
    for file in FILES:
        shutil.copy(ROOT / file, source / file)
    environment = {
        **os.environ,
        "GITHUB_SERVER_URL": "https://example.org",
        "GITHUB_REPOSITORY": "owner/name",
    }
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=source,
        env=environment,
        check=True,
        capture_output=True,
        timeout=HANG,
    )
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive, source


def files_of(source, *trees):
    return {
        p.relative_to(source).as_posix()
        for tree in trees
        for p in (source / tree).rglob("*")
        if p.is_file()
    }


def test_the_wheel_has_every_file_of_the_package_and_no_other(archives):
    wheel, _, source = archives
    assert wheel.name == "streambp_hf-0.1.0-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if not name.startswith("streambp_hf-0.1.0.dist-info/")}
    assert inside == {*files_of(source, "streambp"), "streambp/losses/objectives.py"}
    assert {"streambp/py.typed", "streambp/planner/web/page.html"} < inside
    assert "streambp_hf-0.1.0.dist-info/licenses/LICENSE" in names


def test_the_source_archive_has_the_project(archives):
    _, archive, source = archives
    with tarfile.open(archive) as tar:
        names = {name.removeprefix("streambp_hf-0.1.0/") for name in tar.getnames()}
    assert files_of(source, *TREES) | set(FILES) <= names


def metadata(wheel):
    return HeaderParser().parsestr(
        zipfile.ZipFile(wheel).read("streambp_hf-0.1.0.dist-info/METADATA").decode()
    )


def test_what_the_package_says_of_itself(archives):
    fields = metadata(archives[0])
    assert (fields["Name"], fields["License-Expression"], fields["Requires-Python"]) == (
        "streambp-hf",
        "Apache-2.0",
        ">=3.10",
    )
    assert fields["Description-Content-Type"] == "text/markdown"
    assert problems(archives[0].parent, None) == []  # links of the page, and the project's pages
    assert fields.get_payload().startswith(
        (ROOT / "README.md").read_text("utf-8").partition("](")[0]
    )
    assert "long context" in fields["Keywords"]
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.10"} < set(
        fields.get_all("Classifier")
    )
    # beside an expression: refused
    assert not any(line.startswith("License ::") for line in fields.get_all("Classifier"))
    assert all(re.fullmatch(r"[\w ]+, https://\S+", line) for line in fields.get_all("Project-URL"))


def test_requirements(archives):
    """Only torch and transformers without extras; every extra whole, and what is installed here in
    its range."""
    fields = metadata(archives[0])
    requirements = [Requirement(line) for line in fields.get_all("Requires-Dist")]
    assert {r.name for r in requirements if not (r.marker and "extra" in str(r.marker))} == {
        "torch",
        "transformers",
    }
    assert set(fields.get_all("Provides-Extra")) == {
        "trl", "deepspeed", "peft", "accelerate", "liger", "all", "examples", "test", "docs",
    }  # fmt: skip
    by_extra = {e: {r.name for r in requirements if "extra" in str(r.marker) and r.marker.evaluate({"extra": e})}
                for e in fields.get_all("Provides-Extra")}  # fmt: skip
    assert [by_extra[name] for name in ("trl", "deepspeed", "peft")] == [
        {"trl"},
        {"deepspeed"},
        {"peft"},
    ]
    for name in ("torch", "transformers"):
        version = __import__(name).__version__
        assert next(r for r in requirements if r.name == name).specifier.contains(
            Version(version), prereleases=True
        )


@pytest.mark.full
def test_the_wheel_alone_runs(archives, tmp_path):
    """Elsewhere, without the project beside it: its command, and the planner's page, which needs
    the package's data.

    Libraries that streambp can do without are not imported with it.
    """
    with zipfile.ZipFile(archives[0]) as wheel:
        wheel.extractall(tmp_path)
        entry = wheel.read("streambp_hf-0.1.0.dist-info/entry_points.txt").decode()
    assert "streambp = streambp.cli:main" in entry
    assert "[axolotl.plugins]\nstreambp = streambp.integrations.axolotl:StreamPlugin" in entry
    program = (
        "import streambp, streambp.planner.page as page, sys; print(streambp.__file__)\n"
        "import streambp.integrations.trl; assert not {'trl', 'peft', 'deepspeed', 'liger_kernel'} & set(sys.modules)\n"
        "assert '</html>' in page.part('page.html')\n"
        "from streambp.losses import grpo_loss; assert grpo_loss.__module__ == "
        "'streambp.losses.objectives'\nfrom streambp.cli import main; main(['--help'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path, timeout=HANG,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith(str(tmp_path))
    assert "Usage: streambp" in result.stdout


def check_commands(first_day, page):
    """Each command of a page is whole, and first_day.py knows what it prints."""
    lines = []
    for language, _, text in first_day.FENCE.findall(page.partition(first_day.LAST_HEADING)[0]):
        if language == "bash":
            lines += first_day.commands_of(text)
    assert len(lines) > len(first_day.EXPECTED_OUTPUTS) - 2
    for line in lines:
        assert shlex.split(line)
        assert line.startswith(("pip install", *first_day.EXPECTED_OUTPUTS)), line


def test_the_first_day_knows_the_pages_commands(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the program sets variables
    first_day = importlib.import_module("tests.packaging.first_day")
    page = (ROOT / "README.md").read_text("utf-8")
    assert "\\\n" in page
    check_commands(first_day, page)
    monkeypatch.setattr(first_day, "commands_of", str.splitlines)
    with pytest.raises(ValueError, match="No escaped character"):
        check_commands(first_day, page)


@pytest.mark.full
@pytest.mark.parametrize("index", [0, 1, 2], ids=["wheel", "source", "clone"])
def test_a_first_day(index, archives, tmp_path):
    """Installed away from the sources; the libraries are this environment's. README.md down to an
    adapter."""
    pytest.importorskip("peft", reason="peft is not installed")
    archive = archives[index]
    venv = tmp_path / "clean"
    command = [
        sys.executable,
        ROOT / "tests" / "packaging" / "install.py",
        archive,
        venv,
        "--system-site-packages",
        "--no-deps",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
        timeout=HANG,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "the first day went well" in result.stdout


def test_the_workflow_runs_both_ends_of_what_the_package_supports():
    """And every other version that it names is one of them."""
    yaml = pytest.importorskip("yaml", reason="PyYAML, of transformers, is not installed")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8"))["jobs"]
    versions = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8"))
    matrix = jobs["tests"]["strategy"]["matrix"]
    assert matrix["python"] == [versions[0], versions[-1]] == ["3.10", "3.13"]
    assert {system.split("-")[0] for system in matrix["os"]} == {"ubuntu", "macos"}
    steps = [step for job in jobs.values() for step in job["steps"]]
    workflow_versions = {
        str(step["with"]["python-version"])
        for step in steps
        if "python-version" in step.get("with", {})
    }
    assert workflow_versions - {"${{ matrix.python }}"} <= set(versions)
    assert sum("bash .ci/setup" in step.get("run", "") for step in steps) == 5
    older = jobs["older"]["strategy"]["matrix"]["include"]
    dependencies = (ROOT / "pyproject.toml").read_text("utf-8")
    assert (
        older[0]["transformers"] == re.search(r'"transformers>=([\d.]+)"', dependencies)[1] + ".0"
    )
    assert older[1]["torch"] == re.search(r'"torch>=([\d.]+)"', dependencies)[1]
    installed = '"transformers==${{ matrix.transformers }}" "torch==${{ matrix.torch }}.*"'
    assert any(installed in step.get("run", "") for step in jobs["older"]["steps"])


def test_hooks_run_what_the_set_up_installs():
    yaml = pytest.importorskip("yaml", reason="PyYAML, of transformers, is not installed")
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repo["repo"] == "local"
    tools = {hook["entry"].split()[0] for hook in repo["hooks"]}
    assert tools == {".venv/bin/ruff", ".venv/bin/mypy"}
    assert all(hook["language"] == "system" for hook in repo["hooks"])


def other_wheel(folder):
    """A wheel of the other project: a distribution `streambp` with a package `streambp`."""
    path = folder / "streambp-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("streambp/__init__.py", "class StreamSFTTrainer: ...\n")
        wheel.writestr("streambp/of_theirs.py", "")
        metadata_text = "Metadata-Version: 2.1\nName: streambp\nVersion: 1.0\n"
        wheel.writestr("streambp-1.0.dist-info/METADATA", metadata_text)
        wheel.writestr("streambp-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("streambp-1.0.dist-info/RECORD", "")
    return path


# What meets the other project's files: the import, or, where its __init__.py has replaced ours, the
# modules that it does not have.
CONFLICTING_DISTRIBUTIONS = {
    "ours last": "import streambp",
    "theirs last": "from streambp.integrations.trl import StreamSFTTrainer",
    "theirs last, command": "from streambp.cli import main; import sys; sys.exit(main(['env']))",
    "ours alone": "import streambp; print(streambp.patch.__name__)",
    "theirs taken off, ours put on again": "import streambp; print(streambp.patch.__name__)",
}


@pytest.mark.parametrize("order", CONFLICTING_DISTRIBUTIONS)
def test_the_other_project_of_this_name_is_refused(order, archives, tmp_path):
    """Both install a package `streambp`, into one folder."""
    environment = tmp_path / "made"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    # A clone in PYTHONPATH would be taken for the distribution to uninstall.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def pip(*words):
        command = [sys.executable, "-m", "pip", "--python", python, *words]
        subprocess.run(command, check=True, capture_output=True, timeout=HANG, env=clean)

    ours = ("install", "--no-index", "--no-deps", archives[0])
    theirs = ("install", "--no-index", "--no-deps", other_wheel(tmp_path))
    if order == "ours alone":
        pip(*ours)
    elif order == "ours last":
        pip(*theirs)
        pip(*ours)
    else:
        pip(*ours)
        pip(*theirs)
    if order.startswith("theirs taken off"):
        pip("uninstall", "-y", "streambp", "streambp-hf")
        pip(*ours)
    # Libraries are those of this environment, behind what was installed.
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    libraries = f"import sys; sys.path.extend({installed!r})"
    result = subprocess.run(
        [python, "-c", f"{libraries}; {CONFLICTING_DISTRIBUTIONS[order]}"],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=HANG,
        env=clean,
    )  # fmt: skip
    if order in ("ours alone", "theirs taken off, ours put on again"):
        assert (result.returncode, result.stdout) == (0, "patch\n"), result.stderr[-2000:]
    else:
        assert result.returncode != 0
        assert "has files of two distributions: streambp-hf, and streambp 1.0" in result.stderr
        assert "pip uninstall -y streambp streambp-hf" in result.stderr
