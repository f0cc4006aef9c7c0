"""What publishes the package and receives its users: workflows, forms, containers, and the
package's page.

The archives themselves: test_distribution.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from scripts.check_commands import check, commands
from tests.hangs import HANG
from tests.packaging.release import RELATIVE, problems

yaml = pytest.importorskip("yaml", reason="PyYAML, of transformers, is not installed")

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
ACTIONS_ALONE = ("codeql", "scorecard")  # workflows that run no command of the repository
HOME = "https://example.org/owner/name"
PINNED_ACTION = re.compile(
    r"[\w-]+/[\w-]+(?:/[\w-]+)?@[0-9a-f]{40}"
)  # a tag can be moved to other code
FILE = re.compile(r"(?<![\w./-])(?:tests|scripts|examples|\.ci|streambp)/[\w./]+")


def read(path):
    return yaml.safe_load(path.read_text("utf-8"))


def steps(path):
    return [
        (name, job, step)
        for name, job in read(path)["jobs"].items()
        for step in job.get("steps", [])
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists(path):
    """Files, modules and commands of its steps are there; actions have versions; jobs may do no
    more than they need."""
    workflow, ran = read(path), 0
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(workflow["jobs"])
        assert (ROOT / job.get("uses", ".")).exists()
    for name, _, step in steps(path):
        assert ("run" in step) != ("uses" in step), (name, step)
        if "uses" in step:
            assert PINNED_ACTION.fullmatch(step["uses"]), step
            continue
        ran += 1
        text = re.sub(r"\$\{\{.*?\}\}", "VALUE", step["run"])
        assert [file for file in FILE.findall(text) if not (ROOT / file).exists()] == [], step
        block = f"```bash\n{text}\n```"
        wrong = [
            (command.text, message)
            for command in commands(path.name, block)
            if (message := check(command)[1])
        ]
        assert wrong == []
    assert ran or path.stem in ACTIONS_ALONE


def test_pins_say_their_version_and_one_action_has_one_pin():
    """Dependabot renews the hash and the version behind it."""
    pins = {}
    for path in WORKFLOWS:
        for line in re.findall(r"uses: ([^.\s].*)$", path.read_text("utf-8"), re.MULTILINE):
            action, pin, version = re.fullmatch(r"(\S+)@(\w+) # (v[\d.]+)", line).groups()
            action = "/".join(action.split("/")[:2])  # the repository, whose folders share a pin
            pins.setdefault(action, set()).add((pin, version))
    assert pins
    assert all(len(pins_of_action) == 1 for pins_of_action in pins.values()), pins


@pytest.mark.parametrize("action", ["actions/checkout@v4", "pypa/publish@release/v1", "a/b@main"])
def test_a_tag_is_no_pin(action):
    assert not PINNED_ACTION.fullmatch(action)


def test_archives_are_attested_with_their_bill_of_materials():
    job = read(GITHUB / "workflows" / "release.yml")["jobs"]["attest"]
    assert job["permissions"] == {"id-token": "write", "attestations": "write"}
    attested = {}
    for step in job["steps"]:
        action = step.get("uses", "").partition("@")[0]
        if action.startswith("actions/attest"):
            attested[action] = step["with"]
    assert set(attested) == {"actions/attest-build-provenance", "actions/attest-sbom"}
    assert {inputs["subject-path"] for inputs in attested.values()} == {"dist/*"}
    assert any("sbom.json" in step.get("run", "") for step in job["steps"])


def test_a_missing_script_is_found():
    assert check(next(commands("", "```bash\npython tests/packaging/nothing.py dist\n```")))[1]
    assert FILE.findall("bash .ci/nothing && python tests/none.py") == [
        ".ci/nothing",
        "tests/none.py",
    ]


def test_what_is_published_was_installed_on_three_systems():
    jobs = read(GITHUB / "workflows" / "release.yml")["jobs"]
    matrix = jobs["installed"]["strategy"]["matrix"]
    assert {system.split("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert matrix["archive"] == ["whl", "tar.gz"]
    assert (jobs["installed"]["needs"], jobs["publish"]["needs"]) == (
        "build",
        ["installed", "newest"],
    )
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    ran = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert "python -m twine check --strict dist/*" in ran
    newest = read(GITHUB / "workflows" / "newest.yml")
    assert {"schedule", "workflow_call"} <= set(newest[True])  # YAML 1.1 reads "on" as true
    assert jobs["newest"]["uses"] == "./.github/workflows/newest.yml"
    assert "bash scripts/newest_releases.sh" in [
        step.get("run") for step in newest["jobs"]["newest"]["steps"]
    ]


def test_forms_and_files_of_the_project():
    for form in ("bug", "feature"):
        fields = read(GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml")
        assert {"name", "description", "body"} <= set(fields)
        assert all(field["attributes"]["label"] for field in fields["body"])
    assert {
        update["package-ecosystem"] for update in read(GITHUB / "dependabot.yml")["updates"]
    } >= {
        "github-actions",
        "pip",
    }
    citation = read(ROOT / "CITATION.cff")
    version = re.search(
        r'__version__ = "(.+)"', (ROOT / "streambp" / "__init__.py").read_text("utf-8")
    )[1]
    assert (citation["version"], citation["license"]) == (version, "Apache-2.0")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "PULL_REQUEST_TEMPLATE.md"):
        assert (GITHUB / name).stat().st_size > 200


def test_containers_copy_what_exists():
    text = (ROOT / "Dockerfile").read_text("utf-8")
    copied = [
        word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()
    ]
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "streambp"} == set(copied)
    assert all((ROOT / path).exists() for path in copied)
    allowed = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert {f"!{path}" for path in copied} <= set(allowed)
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", text, re.MULTILINE)
    assert [name for _, name in stages] == ["base", "development", "streambp"]
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    folder = ROOT / ".devcontainer"
    assert (folder / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (
        container["build"]["target"] in dict(stages).values()
        or container["build"]["target"] == "development"
    )
    assert container["postCreateCommand"] == "bash .ci/setup"


SHOW_PAGE = "import sys, json; sys.argv = ['setup.py', '--quiet']; import setuptools\n" \
            "setuptools.setup = lambda **kwargs: print(json.dumps(kwargs, default=str))\n" \
            "names = {'__file__': 'setup.py', '__name__': '__main__'}\n" \
            "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), names)"  # fmt: skip


def built_page(folder, **environment):
    """What setup.py gives the package's page, of a copy of the files that it reads."""
    (folder / "streambp").mkdir()
    for file in ("setup.py", "README.md", "streambp/__init__.py"):
        shutil.copy(ROOT / file, folder / file)
    result = subprocess.run(
        [sys.executable, "-c", SHOW_PAGE], cwd=folder, capture_output=True, text=True, check=False, timeout=HANG,
        env={"PATH": "/nowhere", **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_links_of_the_packages_page_are_absolute(tmp_path):
    built = built_page(
        tmp_path, GITHUB_SERVER_URL="https://example.org", GITHUB_REPOSITORY="owner/name"
    )
    page, readme = built["long_description"], (ROOT / "README.md").read_text("utf-8")
    assert RELATIVE.findall(page) == []
    paths = re.findall(rf"\]\({HOME}/(?:blob|raw)/v[\d.]+/([^)#]*)", page)
    assert len(paths) == len(re.findall(r"\]\((?!\w+:|#)", readme)) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert built["project_urls"]["Homepage"] == HOME
    assert {"Documentation", "Issues", "Changelog", "Source", "Paper"} <= set(built["project_urls"])
    pages = [url.partition("/blob/HEAD/")[2] for url in built["project_urls"].values()]
    assert [page for page in pages if not (ROOT / page).exists()] == []


def test_without_an_address_the_page_is_the_readme(tmp_path):
    built = built_page(tmp_path)
    assert built["long_description"] == (ROOT / "README.md").read_text("utf-8")
    assert set(built["project_urls"]) == {"Paper"}


def test_a_source_archive_keeps_its_address(tmp_path):
    """A wheel that is built from one, on another machine, has the same links."""
    (tmp_path / "PKG-INFO").write_text(
        f"Name: streambp\nProject-URL: Homepage, other\nProject-URL: Source, {HOME}\n\ntext"
    )
    built = built_page(tmp_path)
    assert built["project_urls"]["Source"] == HOME
    assert RELATIVE.findall(built["long_description"]) == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize(
    "origin", [f"{HOME}.git", "git@example.org:owner/name.git", "ssh://git@example.org/owner/name"]
)
def test_a_clone_has_the_address_of_its_origin(origin, tmp_path):
    git = shutil.which("git")
    subprocess.run([git, "init", "--quiet", tmp_path], check=True)
    subprocess.run([git, "-C", tmp_path, "remote", "add", "origin", origin], check=True)
    assert built_page(tmp_path, PATH=str(Path(git).parent))["project_urls"]["Source"] == HOME


def archive(folder, version, page, urls):
    message = Message()
    message["Metadata-Version"], message["Name"], message["Version"] = "2.4", "streambp-hf", version
    for name in urls:
        message["Project-URL"] = f"{name}, {HOME}"
    message.set_payload(page)
    with zipfile.ZipFile(folder / f"streambp_hf-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"streambp_hf-{version}.dist-info/METADATA", message.as_string())

    (folder / "PKG-INFO").write_text(message.as_string())
    with tarfile.open(folder / f"streambp_hf-{version}.tar.gz", "w:gz") as tar:
        tar.add(folder / "PKG-INFO", f"streambp_hf-{version}/PKG-INFO")
    (folder / "PKG-INFO").unlink()


URLS = ("Homepage", "Documentation", "Issues", "Changelog", "Source")


@pytest.mark.parametrize(
    ("page", "urls", "tag", "count"),
    [
        (f"[a]({HOME}) [b](#c)", URLS, "v1.2.3", 0),
        (f"[a]({HOME})", URLS, None, 0),
        (f"[a]({HOME})", URLS, "v1.2.4", 2),
        ("[a](docs/a.md) ![b](c.png)", URLS, "v1.2.3", 4),
        ("a", URLS[1:], "v1.2.3", 2),
    ],
)
def test_what_cannot_be_published_is_told(page, urls, tag, count, tmp_path):
    archive(tmp_path, "1.2.3", page, urls)
    assert len(problems(tmp_path, tag)) == count


def test_archives_that_are_not_there_are_told(tmp_path):
    (message,) = problems(tmp_path, None)
    assert "one .whl and one .tar.gz" in message
