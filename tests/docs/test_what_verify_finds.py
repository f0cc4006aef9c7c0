"""Each program of "What verify finds in others" prints what stands under it.

covers: verify/compare.py, verify/comparison.py
"""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch
import transformers

from tests.docs.pages import ROOT, blocks
from tests.tiers import thinned

PAGE = "docs/explanation/what-verify-finds.md"
PROGRAMS = [block for block in blocks(PAGE) if block.language == "python"]
VERSIONS = ("2.13.", "5.23.")  # of the output on the page
NUMBER = re.compile(r"\d\.\d+(?:e[+-]\d+)?")
FACTOR = 2.0  # rounding has another order on other processors
RUNS = thinned(range(len(PROGRAMS)), lambda number: number == 0)


def printed(block, folder, monkeypatch):
    """The last lines of a program's output, as many as the page shows."""
    monkeypatch.chdir(folder)
    out = io.StringIO()
    with torch.random.fork_rng(devices=()), contextlib.redirect_stdout(out):
        exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
    lines = out.getvalue().splitlines()
    return lines[-len(block.expected_output.splitlines()) :]


def check(page_lines, printed_lines):
    """Words are equal, and numbers up to rounding."""
    assert [NUMBER.sub("_", line) for line in printed_lines] == [
        NUMBER.sub("_", line) for line in page_lines
    ]
    for expected, line in zip(page_lines, printed_lines, strict=True):
        for want, have in zip(NUMBER.findall(expected), NUMBER.findall(line), strict=True):
            assert float(want) / FACTOR <= float(have) <= float(want) * FACTOR


@pytest.mark.parametrize("number", RUNS)
def test_programs_print_what_the_page_shows(number, tmp_path, monkeypatch):
    block = PROGRAMS[number]
    if "trl" in block.text or "deepspeed" in block.text:
        pytest.importorskip("deepspeed", reason="DeepSpeed is installed on Linux alone")
    lines = printed(block, tmp_path, monkeypatch)
    for line in lines:
        if line.startswith("streambp"):
            assert re.match("streambp:? exact", line)
    if torch.__version__.startswith(VERSIONS[0]) and transformers.__version__.startswith(
        VERSIONS[1]
    ):
        check(block.expected_output.splitlines(), lines)


def test_every_program_shows_its_output_and_every_report_its_thread():
    assert len(PROGRAMS) == 7
    assert all(block.expected_output for block in PROGRAMS)
    text = (ROOT / PAGE).read_text("utf-8")
    threads = re.findall(
        r"^\| \[[^\]]+\]\(https://github\.com/\S+/(?:pull|issues)/\d+\)", text, re.M
    )
    assert len(threads) == len(PROGRAMS)


@pytest.mark.parametrize(
    "wrong", ["reentrant: exact, error 3.2e-01", "reentrant: NOT EXACT, error 3.2e-02"]
)
def test_another_output_is_found(wrong):
    page_lines = PROGRAMS[0].expected_output.splitlines()
    with pytest.raises(AssertionError):
        check(page_lines, [*page_lines[:-1], wrong])
