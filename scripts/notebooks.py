"""Run the cells of the examples' notebooks, and store what they print and draw in the notebooks.

    python scripts/notebooks.py
    python scripts/notebooks.py --into FOLDER examples/notebooks/first_steps.ipynb

Stored are the lines that a cell prints, and its charts as pictures; warnings and progress, which
go to stderr, are not. Jupyter is not needed. Each notebook runs in a process and a folder of its
own, offline, on a CPU.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
CHART_DPI = 72  # dots per inch of stored charts


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that hold code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells(notebook: dict[str, Any]) -> None:
    """Run a notebook's cells in order, and replace their outputs in the notebook."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    charts = collect_charts()
    for count, cell in enumerate(code_cells(notebook), 1):
        code = compile("".join(cell["source"]), f"cell {count}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        cell["outputs"] = text_outputs(printed.getvalue()) + charts
        cell["execution_count"] = count
        charts.clear()


def text_outputs(text: str) -> list[dict[str, Any]]:
    """Return what a cell printed as a list of at most one output of a notebook."""
    lines = text.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


def collect_charts() -> list[dict[str, Any]]:
    """Return a list to which `plt.show()` appends each chart from now on, as an output; without
    matplotlib it stays empty."""
    charts: list[dict[str, Any]] = []
    if importlib.util.find_spec("matplotlib") is None:
        return charts
    import matplotlib.pyplot as plt

    def show(*args: object, **kwargs: object) -> None:
        for number in plt.get_fignums():
            picture = io.BytesIO()
            plt.figure(number).savefig(picture, format="png", dpi=CHART_DPI, metadata={})
            data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
            charts.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")

    plt.show = show
    return charts


def write_outputs(path: Path, target: Path) -> None:
    """Run a notebook in this process, and write it with its outputs to a file."""
    notebook = json.loads(path.read_text("utf-8"))
    run_cells(notebook)
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


def run_in_process(path: Path, target: Path) -> None:
    """Run a notebook in a process of its own, and write it with its outputs to a file.

    Raises:
        subprocess.CalledProcessError: a cell failed.
    """
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, __file__, "--here", "--into", str(target.parent), str(path)],
            cwd=folder,
            env=environment,
            check=True,
        )


def main() -> None:
    """Run the notebooks that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS)
    parser.add_argument("--into", type=Path, help="folder for the results (default: in place)")
    parser.add_argument("--here", action="store_true", help="run in this process and folder")
    arguments = parser.parse_args()
    for path in arguments.notebooks:
        target = (arguments.into or path.parent).resolve() / path.name
        run = write_outputs if arguments.here else run_in_process
        run(path.resolve(), target)
        print(f"{path.name}: {target}")


if __name__ == "__main__":
    main()
