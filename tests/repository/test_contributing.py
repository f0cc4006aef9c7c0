"""The tasks that CONTRIBUTING.md describes name the files that change: those that know a save or a
kernel by its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.repository.test_imports import FOLDERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "streambp"
# strings by which the code of a task is found
TASKS = {
    "a new kind of save": ("attn_out", "kv"),
    "a new attention kernel": ("cudnn",),
    "a new kind of attention mask": (),
    "a family that fails its trial": (),
}
# files that are found by no string
EXTRA_FOLDERS = {
    "a new kind of save": {"layer/products.py"},
    # they know kernels by what they take
    "a new attention kernel": {"attention/rules.py", "planner/work.py"},
}


def row_of(task, text):
    """The row of the table, by the start of its first cell."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {task}")]
    return row.split("|")[1:-1]


def files_in(cell):
    return set(re.findall(r"`([\w/]+\.py)`", cell))


def knows(source, name):
    """Whether code has the name as a string, or as the first part of one; prose does not count."""
    tree = ast.parse(source)
    bodies = [
        node.body
        for node in ast.walk(tree)
        if hasattr(node, "body") and isinstance(node.body, list) and node.body
    ]
    prose = {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    strings = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return any(node.value.partition(".")[0] == name for node in strings if id(node) not in prose)


def files_that_know(name, package):
    return {
        p.relative_to(package).as_posix()
        for p in package.rglob("*.py")
        if knows(p.read_text("utf-8"), name)
    }


@pytest.mark.parametrize("task", TASKS)
def test_a_task_names_the_files_that_change(task):
    _, files, tests = row_of(task, (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    names = files_in(files)
    assert names
    assert [name for name in names if not (PACKAGE / name).exists()] == []
    assert [name for name in files_in(tests) if not (ROOT / name).exists()] == []
    if TASKS[task]:
        files_with_names = set().union(*(files_that_know(name, PACKAGE) for name in TASKS[task]))
        assert names == files_with_names | EXTRA_FOLDERS.get(task, set())


def files_that_ask_for(kind, package):
    """Files with `isinstance(..., kind)`."""
    return {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(rf"isinstance\([^()]+, {kind}\)", path.read_text("utf-8"))
    }


def test_the_task_of_a_mask_names_the_files_that_tell_masks_apart():
    _, files, _ = row_of(
        "a new kind of attention mask", (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    )
    asking = files_that_ask_for("DenseMask", PACKAGE)
    assert len(asking) > 2
    assert asking <= files_in(files)


def test_the_places_of_a_family_are_there():
    """Of the table by symptom; a file goes by its name alone where that is enough."""
    text = (ROOT / "docs" / "adding-a-family.md").read_text("utf-8")
    names = {name for name in files_in(text) if not name.startswith(("tests/", "scripts/"))}
    assert len(names) > 5
    paths = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert [
        name for name in names if not any(f"/{path}".endswith(f"/{name}") for path in paths)
    ] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('x = "attn_out"', True),
        ('x = f"attn_out.{i}"', True),
        ('def f():\n    """attn_out"""', False),
        ('x = "attn_output"', False),
        ("attn_out = 1", False),
    ],
)
def test_what_counts_as_knowing_a_name(source, expected):
    assert knows(source, "attn_out") == expected


DECISIONS = ROOT / "docs" / "decisions.md"
# Headings of the page as it was before each decision had three parts; links to them stay valid.
FORMER_NAMES = (
    "decisions-and-what-was-measured", "the-package-streambppy-patching-stacks-settings", "attention",
    "layer-admission-fingerprint", "layer-states-of-recurrent-layers", "head", "head-lazy-logits",
    "prefixes-rows-that-share-a-prefix", "offloadweightspy-offloadrangespy-weights-on-the-host",
    "modelstepspy-notes-on-a-step", "offloadpolicypy-saves-that-fit",
    "modelrecordpy-modelstepspy-one-record-of-a-step", "distributed", "planner-seconds", "launch", "integrations",
    "verification-and-tests", "command-line-cli-argumentspy-librariespy",
    "documentation-docs-scriptsreferencepy-scriptssitepy-testsdocs", "how-much-code-there-is-scriptshousepy",
)  # fmt: skip
DECISION_PARTS = ("Context", "Choice", "Consequence")


def decisions(text):
    """Title and body of each decision."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        for decision in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
            title, _, body = decision.partition("\n")
            yield title, re.sub(r"<a id.*", "", body)


def faults_of_a_decision(body):
    """Faults of one decision: its parts, its length, and the files that it names."""
    if tuple(re.findall(r"^\*\*(\w+)\.\*\*", body, re.MULTILINE)) != DECISION_PARTS:
        yield "its parts are not " + ", ".join(DECISION_PARTS)
    if not 60 <= len(body.split()) <= 125:
        yield f"it has {len(body.split())} words"
    for name in files_in(body):
        if not (PACKAGE / name).exists() and not (ROOT / name).exists():
            yield f"{name} is no file"


def test_decisions_have_three_parts_and_name_files_that_exist():
    sections = list(decisions(DECISIONS.read_text("utf-8")))
    assert len(sections) >= 30
    faults = {title: list(faults_of_a_decision(body)) for title, body in sections}
    assert {title: some for title, some in faults.items() if some} == {}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("**Choice.**", "We chose"), "parts"),
        (("word", ""), "words"),
        (("layer/call.py", "layer/gone.py"), "no file"),
    ],
)
def test_a_decision_that_breaks_the_form_is_found(change, fault):
    body = (
        "\n\n".join(f"**{part}.** " + "word " * 20 for part in DECISION_PARTS) + " `layer/call.py`"
    )
    assert list(faults_of_a_decision(body)) == []
    assert any(fault in message for message in faults_of_a_decision(body.replace(*change)))


def anchors(text):
    """Anchors of a page on the site: those of its headings, and those that it sets itself."""
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title in titles}
    return slugs | set(re.findall(r'<a id="([\w-]+)">', text))


def test_links_to_former_headings_of_the_decisions_stay_valid():
    assert set(FORMER_NAMES) - anchors(DECISIONS.read_text("utf-8")) == set()


def table_of_folders(text):
    """The rows of DESIGN.md section 7, in their order: folder, and the folders that it imports."""
    _, _, section = text.partition("## 7. Layout and direction")
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    return [(row[0].strip(" `"), tuple(re.findall(r"`(\w+)`", row[2]))) for row in rows]


def test_the_design_has_the_table_of_imports():
    folders = table_of_folders((ROOT / "docs" / "DESIGN.md").read_text("utf-8"))
    assert folders == list(FOLDERS.items())


def test_the_design_names_files_that_exist():
    names = files_in((ROOT / "docs" / "DESIGN.md").read_text("utf-8"))
    assert len(names) > 15
    assert [n for n in names if not (PACKAGE / n).exists() and not (ROOT / n).exists()] == []


def words_of_the_code(text):
    """Rows of the glossary: word, meaning, the field's term."""
    _, _, section = text.partition("### Words of the code")
    section, _, _ = section.partition("\n## ")
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in row) for row in rows[1:]]


def test_the_glossary_has_each_word_once_and_classes_that_exist():
    rows = words_of_the_code((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    words = [word for word, _, _ in rows]
    assert len(words) > 30
    assert words == sorted(set(words))
    assert [row for row in rows if not all(row)] == []
    names = set(re.findall(r"`(\w+)`", " ".join(meaning for _, meaning, _ in rows)))
    source = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    assert [n for n in names if not re.search(rf"^class {n}\b", source, re.MULTILINE)] == []
