"""Write the benchmark page and its picture from the rows of `paper_repro/results`.

python -m scripts.benchmarks            writes docs/explanation/benchmarks.md and the picture
python -m scripts.benchmarks --check    exit code 1 if a file is not what the rows give

Measured figures are the first row of each method and length in h100/timed.csv; later rows repeat
some with another commit or set-up. Computed figures are the planner's, from predicted_longest.csv.
"""

from __future__ import annotations

import argparse
import csv
import html
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "paper_repro" / "results"
PAGE = ROOT / "docs" / "explanation" / "benchmarks.md"
PICTURE = ROOT / "docs" / "pictures" / "benchmarks.svg"

DEVICE_METHOD = "streambp, all on the device"
LEAN_METHOD = "streambp, saves and offload"
TRL_METHOD = "TRL"
METHODS = {
    "streambp-default": DEVICE_METHOD,
    "streambp-lean-liger": LEAN_METHOD,
    "trl-selective-liger": TRL_METHOD,
}
SETUPS = (  # columns `trained`, `shape` and `tokens` of the rows
    ("full", "Qwen3-8B", 2048),
    ("full", "Qwen3-8B", 4096),
    ("full", "Qwen3-8B", 16384),
    ("full", "Qwen3-8B", 65536),
    ("LoRA", "Qwen3-8B", 16384),
    ("LoRA", "Qwen3-8B", 131072),
    ("full AdamW", "Qwen3-4B", 4096),
)
COMPUTED_METHODS = {  # method in predicted_longest.csv -> name here
    "plain": "no checkpointing",
    "checkpointing": "checkpointing",
    "checkpointing, fused head": "checkpointing, chunked head",
    "streambp": "streambp",
    "streambp offload, rest kept": "streambp, offload",
}
BUDGET = ("Qwen3-8B", "full", "79.0")
MISSING_TEXT = "not measured"

PICTURE_WIDTH = 720
ROW_HEIGHT = 26
LABEL_WIDTH = 222  # columns of labels
MAX_BAR_WIDTH = 330  # longest bar
STYLE = """
svg { background: #ffffff; }
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 15px; }
.note { fill: #59636e; font-size: 12px; }
.ours { fill: #4051b5; }
.theirs { fill: #b0b7c3; }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; }
  text { fill: #e6edf3; }
  .note { fill: #9198a1; }
  .ours { fill: #8c9eff; }
  .theirs { fill: #58606b; }
}
"""


class StepMeasurement(NamedTuple):
    """Seconds and peak memory of one step."""

    seconds: float
    gib: float


class Bar(NamedTuple):
    """One bar of a panel: its label, its length and the text behind it."""

    label: str
    value: float
    text: str


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured() -> dict[tuple[str, str, int, str], StepMeasurement]:
    """Return seconds and memory by training, shape, tokens and method."""
    figures: dict[tuple[str, str, int, str], StepMeasurement] = {}
    for row in rows(RESULTS / "h100" / "timed.csv"):
        method = METHODS.get(row["method"])
        if method is None or row["status"] != "ok":
            continue
        key = (row["trained"], row["shape"], int(row["tokens"]), method)
        figures.setdefault(key, StepMeasurement(float(row["seconds"]), float(row["peak_gib"])))
    return figures


def longest() -> dict[str, int]:
    """Return the computed longest sequence of each method."""
    max_tokens = {}
    for row in rows(RESULTS / "predicted_longest.csv"):
        if (row["shape"], row["trained"], row["gpu_gib"]) == BUDGET and row[
            "method"
        ] in COMPUTED_METHODS:
            max_tokens[COMPUTED_METHODS[row["method"]]] = int(row["tokens"])
    return max_tokens


def page() -> str:
    """Return the page's text."""
    figures = measured()
    first = rows(RESULTS / "h100" / "timed.csv")[0]
    lines = [
        "# Benchmarks",
        "",
        "<!-- written by python -m scripts.benchmarks -->",
        "",
        "![Longest sequence and memory beside other methods](../pictures/benchmarks.svg)",
        "",
        "## Seconds and memory of a step",
        "",
        f"Forward and backward in bf16, batch size 1, on one {first['device']}. Versions: "
        f"{first['versions']}.",
        "TRL has its chunked head, selective checkpointing and Liger's kernels; streambp has Liger's "
        "kernels too.",
        f'"{LEAN_METHOD}" is `saves=("attn_out",), offload="cpu"`; "{DEVICE_METHOD}" is '
        '`offload="none"`. Rows: `paper_repro/results/h100/timed.csv`; '
        "[how they were measured](measurements.md#on-one-h100).",
        "",
        f"| trained | model | tokens | {DEVICE_METHOD} | {LEAN_METHOD} | {TRL_METHOD} |",
        "|---|---|---|---|---|---|",
    ]
    for trained, shape, tokens in SETUPS:
        cells = [trained, shape, f"{tokens:,}"]
        for method in METHODS.values():
            row = figures.get((trained, shape, tokens, method))
            cells.append(MISSING_TEXT if row is None else f"{row.seconds:.2f} s, {row.gib:.1f} GiB")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Longest sequence",
        "",
        "Computed by `streambp plan`, not measured: all parameters of Qwen3-8B's shape, forward and "
        "backward on a GPU of 80 GB, 115 GiB of host memory. Rows: "
        "`paper_repro/results/predicted_longest.csv`.",
        "",
        "| method | tokens |",
        "|---|---|",
    ]
    lines += [f"| {method} | {tokens:,} |" for method, tokens in longest().items()]
    lines += [
        "",
        "## Not measured",
        "",
        "Several GPUs, other GPUs than this one, axolotl, Unsloth and DeepSpeed's ALST beside streambp, "
        "TRL at 131,072 tokens, and full training of more than 65,536 tokens.",
        "",
    ]
    return "\n".join(lines)


def panel(title: str, note: str, bars: list[Bar], top: int) -> tuple[list[str], int]:
    """Return a panel's SVG elements and the row below it."""
    parts = [
        f'<text class="title" x="16" y="{top + 16}">{html.escape(title)}</text>',
        f'<text class="note" x="16" y="{top + 34}">{html.escape(note)}</text>',
    ]
    max_value = max(bar.value for bar in bars)
    y = top + 46
    for bar in bars:
        kind = "ours" if bar.label.startswith("streambp") else "theirs"
        width = max(2.0, MAX_BAR_WIDTH * bar.value / max_value)
        parts.append(f'<text x="16" y="{y + 14}">{html.escape(bar.label)}</text>')
        parts.append(
            f'<rect class="{kind}" x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="18" '
            'rx="3"/>'
        )
        parts.append(
            f'<text x="{LABEL_WIDTH + width + 8:.1f}" y="{y + 14}">{html.escape(bar.text)}</text>'
        )
        y += ROW_HEIGHT
    return parts, y + 14


def picture() -> str:
    """Return the picture as SVG."""
    bars = []
    for method, tokens in longest().items():
        bars.append(Bar(method, tokens, f"{tokens:,} tokens"))
    parts, top = panel(
        "Longest sequence, Qwen3-8B, all parameters, 80 GB",
        "computed by streambp plan: forward and backward, 115 GiB of host memory",
        bars,
        14,
    )
    figures = measured()
    bars = []
    for method in (LEAN_METHOD, TRL_METHOD, DEVICE_METHOD):
        row = figures["full", "Qwen3-8B", 65536, method]
        bars.append(Bar(method, row.gib, f"{row.gib:.1f} GiB, {row.seconds:.2f} s"))
    panel_parts, top = panel(
        "Peak memory and seconds of a step, 65,536 tokens",
        "measured on one H100 of 80 GB; streambp on the device uses all free memory",
        bars,
        top,
    )
    legend = (
        f'<rect class="ours" x="16" y="{top}" width="12" height="12" rx="2"/>'
        f'<text x="34" y="{top + 11}">streambp</text>'
        f'<rect class="theirs" x="116" y="{top}" width="12" height="12" rx="2"/>'
        f'<text x="134" y="{top + 11}">other methods</text>'
    )
    height = top + 26
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PICTURE_WIDTH} {height}" '
            'role="img" '
            'aria-label="Longest sequence and memory beside other methods">',
            f"<style>{STYLE}</style>",
            *parts,
            *panel_parts,
            legend,
            "</svg>",
            "",
        ]
    )


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = 0
    for path, text in ((PAGE, page()), (PICTURE, picture())):
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale = 1
        if not arguments.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        print(path.relative_to(ROOT))
    return stale if arguments.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
