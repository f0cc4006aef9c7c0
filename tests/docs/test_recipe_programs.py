"""Each program of README.md, of the users' pages and of examples/ gives the gradients of
the same program without streambp, or a row of docs/explanation/exactness.md names the test that
compares what it does.

covers: integrations/trl/trainer.py, model/patching.py
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from streambp.head.log_probs import HeadGradients
from tests.docs import stand_ins
from tests.docs.pages import ROOT, USERS, Block, blocks
from tests.docs.test_blocks import adapter
from tests.docs.unpatched import EXAMPLE_ARGUMENTS, doubled, executed
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch, seeded

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from tests.integrations.test_trl import FullLogits

PAGE = ROOT / "docs" / "explanation" / "exactness.md"
TABLE = re.compile(r"<!-- table: recipe-programs -->\n(.*?)<!-- end -->", re.DOTALL)
COMPARED = "gradients of each step, weights"
CHUNKED = re.compile(r"in \d+ chunks")


def page_programs() -> dict[str, Block]:
    """Return the programs of the users' pages: files, and blocks that train."""
    programs = {}
    for page in USERS:
        number = 0
        for block in blocks(page):
            if block.language != "python":
                continue
            trains = "streambp.patch(" in block.text and ".backward()" in block.text
            if block.title:
                programs[f"{page}: {block.title}"] = block
            elif trains:
                number += 1
                programs[f"{page}: block {number}"] = block
    return programs


def example_programs() -> dict[str, Path]:
    """Return the examples that are programs."""
    paths = [*ROOT.glob("examples/*.py"), *ROOT.glob("examples/*/train.py")]
    return {
        path.relative_to(ROOT).as_posix(): path
        for path in sorted(paths)
        if '"__main__"' in path.read_text("utf-8") and path.name != "toy.py"
    }


def documented() -> dict[str, str]:
    """Return how each program of the page's table is compared."""
    match = TABLE.search(PAGE.read_text("utf-8"))
    assert match is not None
    rows = [line.strip("| ").split(" | ") for line in match[1].strip().splitlines()[2:]]
    return {program.strip("`"): compared for program, compared in rows}


PAGE_PROGRAMS, EXAMPLE_PROGRAMS, ROWS = page_programs(), example_programs(), documented()
COMPARED_HERE = [program for program, compared in ROWS.items() if compared == COMPARED]
FAST = "docs/how-to/packing-and-padding.md: block 1"


@pytest.fixture(scope="module")
def doubled_folder(tmp_path_factory):
    """Return the folder of the pages' checkpoints, in float64, and data."""
    folder = tmp_path_factory.mktemp("doubled")
    torch.set_default_dtype(torch.float64)
    seed_torch(0)
    try:
        stand_ins.make(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    return folder


@pytest.fixture
def exact(float64_oracle, monkeypatch):
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", FullLogits)


def file_of(program: str, folder: Path, doubled_folder: Path) -> tuple[Path, tuple[str, ...], bool]:
    """Write a program as a file of float64, and return it with its arguments, and whether it reads
    `model` and `input_ids`."""
    if program in EXAMPLE_PROGRAMS:
        path = EXAMPLE_PROGRAMS[program]
        text = doubled(path.read_text("utf-8"))
        arguments = ("--steps", "2", "--chunk-size", "4", "--output", str(folder / "out"))
        (folder / path.name).write_text(text)
        return folder / path.name, (*arguments, *EXAMPLE_ARGUMENTS.get(path.name, ())), False
    block = PAGE_PROGRAMS[program]
    (folder / (block.title or "block.py")).write_text(doubled(block.text, doubled_folder))
    return folder / (block.title or "block.py"), (), not block.title


def runs(program, folder, doubled_folder, monkeypatch, change=None):
    """Return what a program does without streambp, and with it."""
    if program == "docs/how-to/vlm.md: vlm.py":
        monkeypatch.setattr("transformers.AutoProcessor", stand_ins.Processor)
        pytest.importorskip("PIL", reason="Pillow is not installed")
    results = []
    for streamed in (False, True):
        inside = folder / ("with" if streamed else "without")
        inside.mkdir()
        (inside / "train.jsonl").write_text(
            "\n".join(json.dumps({"text": stand_ins.content(i, 30)}) for i in range(8))
        )
        if "continue.py" in program:
            seed_torch(1)
            adapter(inside, doubled_folder)
        path, arguments, reads = file_of(program, inside, doubled_folder)
        names = {}
        if reads:
            names["model"] = AutoModelForCausalLM.from_pretrained(
                doubled_folder / stand_ins.CHECKPOINTS[0]
            ).train()
            names["input_ids"] = torch.randint(5, 990, (2, 96), generator=seeded(5))
        with contextlib.chdir(inside):
            results.append(
                executed(path, streamed, change if streamed else None, arguments, **names)
            )
    return results


def check(program, folder, doubled_folder, monkeypatch, change=None):
    """The gradients that optimizers were given, the weights and the last loss are those of the
    program without streambp, which did not run in one chunk."""
    expected, ours = runs(program, folder, doubled_folder, monkeypatch, change)
    assert any(CHUNKED.search(line) for line in ours.lines), ours.lines
    assert not expected.lines
    assert any(gradient.any() for gradient in expected.gradients.values())
    assert ours.gradients.keys() == expected.gradients.keys()
    assert worst_error(ours.gradients, expected.gradients) <= MAX_FLOAT64_ERROR
    assert ours.weights.keys() == expected.weights.keys()
    # AdamW divides by the size of each gradient, the smallest among them
    assert worst_error(ours.weights, expected.weights) <= 1e-8
    if expected.loss is not None:
        assert torch.allclose(ours.loss, expected.loss, rtol=1e-9, atol=0.0)


@pytest.mark.fast(FAST)
@pytest.mark.parametrize("program", COMPARED_HERE)
def test_gradients_are_those_without_streambp(
    program, tmp_path, doubled_folder, exact, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(program, tmp_path, doubled_folder, monkeypatch)


def test_each_program_has_a_row():
    assert ROWS.keys() == {*PAGE_PROGRAMS, *EXAMPLE_PROGRAMS}
    assert len(COMPARED_HERE) >= len(ROWS) / 2
    for compared in ROWS.values():
        files = re.findall(r"`(tests/[\w/]+\.py)`", compared)
        assert compared == COMPARED or files
        assert all((ROOT / file).exists() for file in files), compared


def a_thousandth_more(monkeypatch):
    """Give gradients of the head that are too large by a thousandth."""

    def results(self, *arguments, real=HeadGradients.results):
        return tuple(x if x is None else 1.001 * x for x in real(self, *arguments))

    monkeypatch.setattr(HeadGradients, "results", results)


def test_mutant(tmp_path, doubled_folder, exact, monkeypatch):
    with pytest.raises(AssertionError):
        check(FAST, tmp_path, doubled_folder, monkeypatch, a_thousandth_more)
