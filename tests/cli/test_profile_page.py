"""`streambp profile --html`: the picture has each phase's bytes, and nothing is cut off.

covers: cli/profile_page.py, cli/runs.py, cli/checks.py
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch

from streambp import cli
from streambp.cli import profile_page as module
from streambp.cli.profile_page import HEIGHT, LINES, MIB, WIDTH, profile_page
from streambp.planner.measure import Compared
from tests.families import build
from tests.planner.browser import BROWSER, DRIVER, opened
from tests.seeds import seeded

LAYERS = 36


def rows(layers=LAYERS):
    names = ["embedding", *(f"forward {n}" for n in range(layers)), "head", "head backward"]
    names += [*(f"backward {n}" for n in reversed(range(layers))), "embedding backward"]
    values = torch.rand(2, len(names), generator=seeded(), dtype=torch.float64) * 2**34
    return [Compared(name, *values[:, n].tolist()) for n, name in enumerate(names)]


def picture(text):
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL)[0])


def heights(path):
    return [float(y) for y in re.findall(r" (\S+) H", path.get("d"))]


def check(text, given):
    """The lines have the bytes of each phase, in order and to scale."""
    paths = {path.get("class"): path for path in picture(text).iter("path")}
    top = max(max(row.predicted, row.measured) for row in given) * 1.05
    for kind in ("measured", "predicted"):
        expected = [HEIGHT * (1 - getattr(row, kind) / top) for row in given]
        assert heights(paths[kind]) == pytest.approx(expected, abs=0.01)
        ends = [float(x) for x in re.findall(r"H(\S+)", paths[kind].get("d"))]
        assert ends == sorted(ends)
        assert ends[-1] == pytest.approx(WIDTH, abs=0.01)


def test_lines_are_the_phases_bytes():
    given = rows()
    check(profile_page(given, "a model", 4096, 512), given)


def test_a_swapped_pair_is_found():
    given = rows()
    swapped = [Compared(row.phase, row.measured, row.predicted) for row in given]
    with pytest.raises(AssertionError):
        check(profile_page(swapped, "a model", 4096, 512), given)


def test_scale_legend_and_table():
    given = rows()
    text = profile_page(given, "a <model>", 4096, 512)
    assert "a &lt;model&gt;" in text
    assert "<model>" not in text
    top = max(max(row.predicted, row.measured) for row in given) * 1.05
    scale = re.findall(r"<div>([\d,.]+) MiB</div>", text)
    assert len(scale) == LINES + 1
    assert scale[0] == f"{top / MIB:,.1f}"
    legend = re.search(r'<p class="legend">.*?</p>', text)[0]
    assert "measured" in legend
    assert "predicted" in legend
    assert text.count("<tr>") == len(given) + 1
    assert not re.search(r"https?://|<script", text)


def test_the_command_writes_the_page(tmp_path, capsys):
    build("llama", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "step.html"
    given = ["profile", str(tmp_path), "--seq-len", "64", "--chunk-size", "16", "--json"]
    capsys.readouterr()
    assert cli.main([*given, "--html", str(file)]) == 0
    assert f"Memory of a step: {tmp_path.name}" in file.read_text("utf-8")


def test_a_file_that_cannot_be_written_is_named_first(tmp_path, capsys):
    build("llama").save_pretrained(tmp_path)
    capsys.readouterr()
    assert cli.main(["profile", str(tmp_path), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(not (BROWSER and DRIVER), reason="no Chromium with chromedriver was found")
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(width, tmp_path):
    file = tmp_path / "step.html"
    file.write_text(module.profile_page(rows(), "n" * 90, 131072, 4096), "utf-8")
    with opened(file.as_uri(), width) as window:
        assert window.run("return document.documentElement.scrollWidth") <= width
        assert window.run("return document.querySelector('svg').clientWidth") > width / 2
        assert window.console() == []
