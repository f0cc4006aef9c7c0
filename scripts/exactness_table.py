"""Writes the table of docs/explanation/exactness.md that says what programs may do: `python
scripts/exactness_table.py`.

Each row is a program of tests/what_programs_do.py, run on the unpatched model and on a streamed one
in float64.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "explanation" / "exactness.md"
START, END = "<!-- table: what-programs-do -->", "<!-- end -->"
TITLES = ("when", "what the program does", "outcome")


def main() -> None:
    sys.path.insert(0, str(ROOT))
    import pytest

    from tests.oracle import lift_float32_casts
    from tests.what_programs_do import PROGRAMS, outcome

    rows = []
    with pytest.MonkeyPatch.context() as patch:
        lift_float32_casts(patch)
        for program in PROGRAMS:
            result, message = outcome(program)
            print(f"{program.when}: {program.action}: {result} {message}", flush=True)
            rows.append((program.when, program.action, result))
    order = list(dict.fromkeys(program.when for program in PROGRAMS))
    rows.sort(key=lambda row: order.index(row[0]))
    head, _, tail = split(TARGET.read_text("utf-8"))
    TARGET.write_text(head + table(rows) + tail, "utf-8")


def table(rows: list[tuple[str, str, str]]) -> str:
    lines = [TITLES, ("---",) * len(TITLES), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def split(text: str) -> tuple[str, str, str]:
    """The page up to the table, the table, and what follows."""
    head, remainder = text.split(START + "\n")
    body, tail = remainder.split(END, 1)
    return head + START + "\n", body, END + tail


def documented() -> dict[tuple[str, str], str]:
    """The outcome of each row of the page, by when and what."""
    _, body, _ = split(TARGET.read_text("utf-8"))
    cells = [re.split(r" \| ", line.strip("| ")) for line in body.strip().splitlines()[2:]]
    return {(when, action): result for when, action, result in cells}


if __name__ == "__main__":
    main()
