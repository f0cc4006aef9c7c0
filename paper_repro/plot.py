"""Draws the figures from the CSV files: python -m paper_repro.plot [--results paper_repro/results]

memory_and_time.csv -> memory.png and time.png (peak memory and seconds against length, a line for each method).
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--table", default="memory_and_time.csv")
    args = parser.parse_args()
    rows = list(csv.DictReader((args.results / args.table).open()))
    stem = args.table.removesuffix(".csv")
    for column, label in (("peak_gib", "peak memory (GiB)"), ("seconds", "forward + backward (s)")):
        draw(rows, column, label, args.results / f"{stem}-{column}.png")


def draw(rows: list[dict[str, str]], column: str, label: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    good = [row for row in rows if row["status"] == "ok" and row[column]]
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [
            (int(row["tokens"]), float(row[column])) for row in good if row["method"] == method
        ]
        if points:
            ours = method.startswith("streambp")
            style = (
                {"linewidth": 2.4, "linestyle": "-"}
                if ours
                else {"linewidth": 1.4, "linestyle": "--"}
            )
            axes.plot(
                *zip(*sorted(points), strict=True), marker="o", markersize=4, label=method, **style
            )
    first = rows[0]
    title = f"{first['shape']} ({first['trained']}), {first['device']}"
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label, title=title)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(path)


if __name__ == "__main__":
    main()
