"""The benchmark page, its picture and README's table say what the committed rows say.

Tests scripts/benchmarks.py.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from scripts import benchmarks

SVG = "{http://www.w3.org/2000/svg}"


def test_page_and_picture_are_current():
    assert benchmarks.PAGE.read_text("utf-8") == benchmarks.page()
    assert benchmarks.PICTURE.read_text("utf-8") == benchmarks.picture()


def test_another_row_makes_them_stale(monkeypatch):
    real = benchmarks.rows

    def new_rows(path):
        rows = real(path)
        for row in rows:
            if row.get("tokens") == "65536" and "seconds" in row:
                row["peak_gib"] = "1.0"
        return rows

    monkeypatch.setattr(benchmarks, "rows", new_rows)
    with pytest.raises(AssertionError):
        test_page_and_picture_are_current()
    monkeypatch.setattr("sys.argv", ["benchmarks", "--check"])
    assert benchmarks.main() == 1


def test_what_was_not_measured_is_named():
    text = benchmarks.page()
    for trained, shape, tokens in benchmarks.SETUPS:
        (line,) = re.findall(rf"^\| {trained} \| {shape} \| {tokens:,} \| .*$", text, re.MULTILINE)
        for method, cell in zip(benchmarks.METHODS.values(), line.split(" | ")[3:], strict=True):
            row = benchmarks.measured().get((trained, shape, tokens, method))
            assert (benchmarks.MISSING_TEXT in cell) == (row is None)


def test_nothing_is_cut_off_and_there_is_a_legend():
    picture = ElementTree.fromstring(benchmarks.picture())
    width, height = map(float, picture.get("viewBox").split()[2:])
    texts = []
    for element in picture.iter():
        right = float(element.get("x", 0)) + float(element.get("width", 0))
        if element.tag == f"{SVG}text":
            texts.append(element.text)
            right += 7.5 * len(element.text)  # pixels of a letter
        if element.tag in (f"{SVG}text", f"{SVG}rect"):
            assert right <= width, element.text
            assert float(element.get("y")) <= height
    assert {"streambp", "other methods"} <= set(texts)


def test_readme_has_these_figures():
    readme = (benchmarks.ROOT / "README.md").read_text("utf-8")
    (first,) = re.findall(r"^\| longest sequence, all parameters .*$", readme, re.MULTILINE)
    longest = benchmarks.longest()
    assert f"{longest['streambp, offload']:,} tokens" in first
    assert f"{longest['checkpointing, chunked head']:,} with" in first
    figures = benchmarks.measured()
    for tokens, method in (
        (65536, benchmarks.LEAN_METHOD),
        (65536, benchmarks.DEVICE_METHOD),
        (16384, benchmarks.DEVICE_METHOD),
    ):
        ours = figures["full", "Qwen3-8B", tokens, method]
        trl = figures["full", "Qwen3-8B", tokens, benchmarks.TRL_METHOD]
        cells = f"{ours.gib:.1f} GiB, {ours.seconds:.2f} s | TRL: {trl.gib:.1f} GiB, {trl.seconds:.2f} s"
        assert cells in readme
