"""`streambp profile --html`: the picture has each phase's bytes, and nothing is cut off.

covers: cli/profile_page.py, cli/runs.py, cli/checks.py
"""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest
import torch

from streambp import cli
from streambp.cli import profile_page as module
from streambp.cli.profile_page import (
    GIB,
    MAX_GRID_LINES,
    MIB,
    PICTURE_HEIGHT,
    PICTURE_WIDTH,
    profile_page,
)
from streambp.planner.measure import PhaseComparison
from tests.families import build
from tests.planner.browser import BROWSER, DRIVER, opened
from tests.seeds import seeded

LAYERS = 36


# Of each label: whether its text is within its cell, and whether it is below the cell and hidden.
LABELS = """
return [...document.querySelectorAll(".parts span")].map(span => {
  const text = span.getBoundingClientRect(), cell = span.parentElement.getBoundingClientRect();
  const below = text.top >= cell.bottom - 1;
  return [span.textContent, !below && text.left >= cell.left && text.right <= cell.right, below];
});
"""


def rows(layers=LAYERS):
    names = ["embedding", *(f"forward {n}" for n in range(layers)), "head", "head backward"]
    names += [*(f"backward {n}" for n in reversed(range(layers))), "embedding backward"]
    values = torch.rand(2, len(names), generator=seeded(), dtype=torch.float64) * 2**34
    return [PhaseComparison(name, *values[:, n].tolist()) for n, name in enumerate(names)]


def picture(text):
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL)[0])


def heights(path):
    return [float(y) for y in re.findall(r" (\S+) H", path.get("d"))]


def scale(text):
    """The bytes beside each horizontal line, from the top."""
    sizes = {"GiB": GIB, "MiB": MIB}
    labels = re.findall(r"<div>([\d,.e-]+) (GiB|MiB)</div>", text)
    return [float(number.replace(",", "")) * sizes[unit] for number, unit in labels]


def check(text, compared_rows):
    """The lines have the bytes of each phase, in order and to scale."""
    paths = {path.get("class"): path for path in picture(text).iter("path")}
    top = scale(text)[0]
    for kind in ("measured", "predicted"):
        expected = [PICTURE_HEIGHT * (1 - getattr(row, kind) / top) for row in compared_rows]
        assert heights(paths[kind]) == pytest.approx(expected, abs=0.01)
        ends = [float(x) for x in re.findall(r"H(\S+)", paths[kind].get("d"))]
        assert ends == sorted(ends)
        assert ends[-1] == pytest.approx(PICTURE_WIDTH, abs=0.01)


def test_lines_are_the_phases_bytes():
    compared_rows = rows()
    check(profile_page(compared_rows, "a model", 4096, 512), compared_rows)


def test_a_swapped_pair_is_found():
    compared_rows = rows()
    swapped = [PhaseComparison(row.phase, row.measured, row.predicted) for row in compared_rows]
    with pytest.raises(AssertionError):
        check(profile_page(swapped, "a model", 4096, 512), compared_rows)


def test_scale_legend_and_table():
    compared_rows = rows()
    text = profile_page(compared_rows, "a <model>", 4096, 512)
    assert "a &lt;model&gt;" in text
    assert "<model>" not in text
    assert len(list(picture(text).iter("line"))) == len(scale(text))
    legend = re.search(r'<p class="legend">.*?</p>', text)[0]
    assert "measured" in legend
    assert "predicted" in legend
    assert text.count("<tr>") == len(compared_rows) + 1
    assert not re.search(r"https?://|<script", text)


@pytest.mark.parametrize("peak", [0.0, 3e4, 0.37 * MIB, 5 * MIB, 77.4 * MIB, 1.01 * GIB, 5e11])
def test_the_scale_is_round_and_has_room_for_the_peak(peak):
    text = profile_page([PhaseComparison("head", peak, peak / 2)], "a model", 64, 16)
    values = scale(text)
    assert 2 <= len(values) <= MAX_GRID_LINES + 2
    assert values[0] >= peak
    assert values[-1] == 0.0
    assert peak == 0.0 or values[1] < peak
    unit = GIB if peak >= GIB else MIB
    assert f"{values[-2] / unit:e}"[0] in "125"
    steps = [upper - lower for upper, lower in itertools.pairwise(values)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_backward_has_one_band_behind_its_phases():
    (band,) = [
        r
        for r in picture(profile_page(rows(), "m", 64, 16)).iter("rect")
        if r.get("class") == "band"
    ]
    step = PICTURE_WIDTH / len(rows())
    assert float(band.get("x")) == pytest.approx((LAYERS + 3) * step, abs=0.01)
    assert float(band.get("width")) == pytest.approx(LAYERS * step, abs=0.01)


def test_the_command_writes_the_page(tmp_path, capsys):
    build("llama", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "step.html"
    arguments = ["profile", str(tmp_path), "--seq-len", "64", "--chunk-size", "16", "--json"]
    capsys.readouterr()
    assert cli.main([*arguments, "--html", str(file)]) == 0
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


@pytest.mark.full
@pytest.mark.skipif(not (BROWSER and DRIVER), reason="no Chromium with chromedriver was found")
@pytest.mark.parametrize(
    ("layers", "width", "shown_labels", "hidden_labels"),
    [
        (2, 400, {"forward", "backward"}, {"head backward", "embedding backward"}),
        (2, 1280, {"embedding", "forward", "head", "head backward", "backward"}, set()),
        (LAYERS, 400, {"forward", "backward"}, {"embedding", "head", "embedding backward"}),
    ],
)
def test_labels_are_whole_or_hidden(layers, width, shown_labels, hidden_labels, tmp_path):
    file = tmp_path / "step.html"
    file.write_text(module.profile_page(rows(layers), "n", 2048, 256), "utf-8")
    with opened(file.as_uri(), width) as window:
        labels = window.run(LABELS)
    assert all(is_full != is_hidden for _, is_full, is_hidden in labels)
    assert shown_labels <= {label for label, is_full, _ in labels if is_full}
    assert hidden_labels <= {label for label, _, is_hidden in labels if is_hidden}
