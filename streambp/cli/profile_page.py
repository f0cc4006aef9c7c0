"""Draw the predicted and the measured memory of a step, as one HTML file for `streambp profile`.

The file has no external references and no script.
"""

from __future__ import annotations

import bisect
import html
import math
from collections.abc import Sequence

from streambp.planner.measure import PhaseComparison

MIB = 2**20
GIB = 2**30
BYTE_UNITS = {"GiB": GIB, "MiB": MIB}
PICTURE_WIDTH = 1000  # units of the picture, which is stretched to the window
PICTURE_HEIGHT = 320
MAX_GRID_LINES = 5  # horizontal lines above zero, at most
SCALE_STEPS = (1.0, 2.0, 5.0, 10.0)  # steps of the scale, times a power of ten
LAYER_PHASES = ("forward", "backward")  # phases of layers, whose names have a number

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --page: #ffffff;
  --line: #d1d9e0; --measured: #4051b5; --predicted: #bc4c00; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --page: #0d1117;
  --line: #3d444d; --measured: #8c9eff; --predicted: #ffa657; --band: #161b22; } }
body { margin: 0 auto; max-width: 1100px; padding: 16px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 4px; overflow-wrap: anywhere; }
p { margin: 0 0 12px; color: var(--soft); overflow-wrap: anywhere; }
.legend span { margin-right: 16px; color: var(--ink); white-space: nowrap; }
.legend i { display: inline-block; width: 22px; height: 0; margin-right: 6px;
  vertical-align: middle; border-top: 3px solid var(--measured); }
.legend i.predicted { border-top: 3px dashed var(--predicted); }
.chart { display: grid; grid-template-columns: auto minmax(0, 1fr); column-gap: 8px; }
.scale { display: flex; flex-direction: column; justify-content: space-between; height: 332px;
  margin: -6px 0; font-size: 12px; color: var(--soft); text-align: right; line-height: 12px; }
svg { width: 100%; height: 320px; display: block; }
svg line { stroke: var(--line); vector-effect: non-scaling-stroke; }
svg path { fill: none; stroke-width: 2.5; vector-effect: non-scaling-stroke; }
.measured { stroke: var(--measured); }
.predicted { stroke: var(--predicted); stroke-dasharray: 7 5; }
.band { fill: var(--band); }
.hit { fill: transparent; }
.parts { grid-column: 2; display: flex; font-size: 12px; color: var(--soft); }
.parts div { overflow: hidden; text-align: center; border-left: 1px solid var(--line);
  min-width: 0; height: 1.5em; }
/* A label that has no room moves to a second line, which is hidden. */
.parts div::before { content: ""; display: inline-block; width: 1px; }
.parts span { display: inline-block; white-space: nowrap; }
.wide { overflow-x: auto; margin-top: 16px; }
table { border-collapse: collapse; }
th, td { padding: 2px 12px 2px 0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""


def profile_page(rows: Sequence[PhaseComparison], name: str, seq_len: int, chunk_size: int) -> str:
    """Return an HTML page with the predicted and the measured memory of each phase of a training
    step (the forward or backward of a layer, for example).

    Args:
        rows: the phases of a step in order, with predicted and measured bytes.
        name: the model's name.
        seq_len: tokens of the row.
        chunk_size: tokens of a chunk.
    """
    peak = max(max(row.predicted, row.measured) for row in rows)
    step, lines, unit = _axis(peak)
    measured = max(rows, key=lambda row: row.measured)
    predicted = max(rows, key=lambda row: row.predicted)
    scale = []
    for line in range(lines, -1, -1):
        scale.append(f"<div>{step * line / BYTE_UNITS[unit]:,.6g} {unit}</div>")
    title = html.escape(f"Memory of a step: {name}")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f"<p>{seq_len:,} tokens in chunks of {chunk_size:,}; peak of each phase beyond the "
            f"memory before the step. Measured peak: {measured.measured / MIB:,.1f} MiB in "
            f"{html.escape(measured.phase)}. Predicted: {predicted.predicted / MIB:,.1f} MiB in "
            f"{html.escape(predicted.phase)}.</p>",
            '<p class="legend"><span><i></i>measured</span>'
            '<span><i class="predicted"></i>predicted</span></p>',
            f'<div class="chart"><div class="scale">{"".join(scale)}</div>',
            _picture(rows, step * lines, lines),
            f'<div class="parts">{_parts(rows)}</div></div>',
            f'<div class="wide">{_table(rows)}</div>',
            "</body></html>",
            "",
        ]
    )


def _axis(peak: float) -> tuple[float, int, str]:
    """Return the vertical scale of a chart of memory: the bytes between two horizontal grid lines,
    the number of grid lines above zero, and the labels' unit ("GiB" or "MiB"). The bytes between
    two lines are a round number of units.

    Args:
        peak: the largest number of bytes in the chart.
    """
    unit = "GiB" if peak >= GIB else "MiB"
    min_step = max(peak / BYTE_UNITS[unit], 1e-6) / MAX_GRID_LINES
    power = 10.0 ** math.floor(math.log10(min_step))
    times = SCALE_STEPS[bisect.bisect_left(SCALE_STEPS, min_step / power)]
    step = BYTE_UNITS[unit] * power * times
    return step, max(1, math.ceil(peak / step)), unit


def _picture(rows: Sequence[PhaseComparison], top: float, lines: int) -> str:
    """Return an SVG chart of the memory of a training step, with a line for the measured and a line
    for the predicted peak bytes of each phase. A phase is the forward or backward of one layer, for
    example.

    Args:
        rows: the phases in order, with predicted and measured bytes.
        top: bytes at the chart's upper edge.
        lines: number of horizontal grid lines above zero.
    """
    step = PICTURE_WIDTH / len(rows)
    parts = []
    backward = []
    for number, row in enumerate(rows):
        if row.phase.partition(" ")[0] == LAYER_PHASES[1]:
            backward.append(number)
    if backward:  # one rectangle, because the edges of neighbours would be visible
        parts.append(
            f'<rect class="band" x="{backward[0] * step:.2f}" y="0" '
            f'width="{len(backward) * step:.2f}" height="{PICTURE_HEIGHT}"/>'
        )
    for line in range(lines + 1):
        y = PICTURE_HEIGHT * line / lines
        parts.append(f'<line x1="0" x2="{PICTURE_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for kind in ("measured", "predicted"):
        points = []
        for number, row in enumerate(rows):
            y = PICTURE_HEIGHT * (1 - getattr(row, kind) / top)
            points.append(f"{number * step:.2f} {y:.2f} H{(number + 1) * step:.2f}")
        parts.append(f'<path class="{kind}" d="M{" L".join(points)}"/>')
    for number, row in enumerate(rows):
        parts.append(
            f'<rect class="hit" x="{number * step:.2f}" y="0" width="{step:.2f}" '
            f'height="{PICTURE_HEIGHT}"><title>{html.escape(row.phase)}: measured '
            f"{row.measured / MIB:,.1f} MiB, predicted {row.predicted / MIB:,.1f} MiB"
            "</title></rect>"
        )
    return (
        f'<svg viewBox="0 0 {PICTURE_WIDTH} {PICTURE_HEIGHT}" preserveAspectRatio="none" '
        'role="img" '
        f'aria-label="Memory of each phase, measured and predicted">{"".join(parts)}</svg>'
    )


def _parts(rows: Sequence[PhaseComparison]) -> str:
    """Return as HTML the labels below the chart of a step's memory (`_picture`), which has a column
    for each phase. A label is the name of a phase. Consecutive phases of the same kind share a
    label: "forward" for the forwards of all layers, for example.

    Args:
        rows: the phases of the step in order, of which only the names are read.
    """
    runs: list[list[str]] = []
    for row in rows:
        first = row.phase.partition(" ")[0]
        label = first if first in LAYER_PHASES else row.phase
        if runs and runs[-1][0] == label:
            runs[-1].append(label)
        else:
            runs.append([label])
    cells = []
    for run in runs:
        cells.append(
            f'<div style="flex: {len(run)} 1 0" title="{run[0]}"><span>{run[0]}</span></div>'
        )
    return "".join(cells)


def _table(rows: Sequence[PhaseComparison]) -> str:
    """Return an HTML table with the predicted and the measured peak MiB of each phase of a step
    (the forward or backward of one layer, for example)."""
    lines = []
    for row in rows:
        lines.append(
            f"<tr><td>{html.escape(row.phase)}</td><td>{row.predicted / MIB:,.2f}</td>"
            f"<td>{row.measured / MIB:,.2f}</td></tr>"
        )
    return (
        "<table><thead><tr><th>MiB</th><th>predicted</th><th>measured</th></tr>"
        f"</thead><tbody>{''.join(lines)}</tbody></table>"
    )
