"""Plans of released models as a table: three cards, three trainings and three lengths of each.

    OMP_NUM_THREADS=1 python scripts/released_plans.py
    OMP_NUM_THREADS=1 python scripts/released_plans.py --models Qwen3-8B gpt-oss-20b \\
        --counts FOLDER --csv paper_repro/results/released_plans.csv

Each model runs in a process of its own. A line has the training, the processor seconds of its first
count without imports, those of its nine plans and their remedies, and the settings that each plan
chooses. Each plan is checked as tests/planner/test_fastest.py does: nothing that the planner knows
is 2 % faster and not named, and each remedy fits when it is planned by its printed options. The
exit code is 1 if a plan fails the check, or if a first count takes more than `MOST_SECONDS`.

`--counts` keeps the counts in a folder, so that a run that is interrupted goes on where it stopped.
A count of other code is not read. `--csv` replaces the rows of these models in a file.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def kept_count(name: str, training: Any, folder: Path | None) -> tuple[Any, float]:
    """Return a model's profile with a training, and the processor seconds of its count.

    Args:
        name: the model.
        training: the training.
        folder: folder of counts; None: count anew.
    """
    from streambp.planner.estimate import BASELINES
    from streambp.planner.profile import from_json, to_json
    from streambp.planner.profile_cache import CountRequest, code_in_use, count_profile, write_file
    from streambp.planner.survey import STREAMED_RECIPES
    from tests.planner.released import RELEASED_CONFIGS

    file = None
    config = RELEASED_CONFIGS[name]()
    if folder is not None:
        parts = [config.to_dict(), list(training), code_in_use()]
        text = json.dumps(parts, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        file = folder / f"{name}-{digest}.json"
        if file.exists():
            stored = json.loads(file.read_text("utf-8"))
            return from_json(stored["profile"]), stored["seconds"]
    begun = time.process_time()
    request = CountRequest(config, lora=training.lora, bits=training.bits)
    profile = count_profile(request, (*BASELINES, *STREAMED_RECIPES))
    spent = time.process_time() - begun
    if file is not None:
        write_file(file, {"seconds": spent, "profile": to_json(profile)})
    return profile, spent


def cell(plan: Any, wrong: str) -> dict[str, Any]:
    """Return the columns of one plan: bytes, seconds and settings; empty if nothing fits.

    Args:
        plan: the plan.
        wrong: how the plan fails the check; empty if it passes.
    """
    row: dict[str, Any] = {"check": wrong or "passes"}
    choice = plan.choice
    if choice is None:
        return {**row, "settings": "does not fit"}
    row["peak_gib"] = f"{choice.peak.total / 2**30:.1f}"
    row["host_gib"] = f"{choice.peak.host / 2**30:.1f}"
    row["step_s"] = f"{choice.seconds.total:.3g}"
    row["settings"] = f"{choice.method}, chunks of {choice.chunk_size}"
    if choice.on_host is not None:
        row["layers_on_host"] = choice.on_host.layers
    if plan.default_wins:
        row["peak_gib"] = f"{plan.by_default.peak / 2**30:.1f}"
        row["host_gib"] = f"{plan.by_default.leaving / 2**30:.1f}"
        row["step_s"] = f"{plan.by_default.seconds:.3g}"
        row["settings"] = f"default, chunks of {plan.by_default.chunk_size}"
        row["layers_on_host"] = ""
    return row


def checked(name: str, training: Any, profile: Any) -> list[dict[str, Any]]:
    """Return the columns of the nine plans of a training, checked.

    Args:
        name: the model.
        training: the training.
        profile: returns the model's profile with a training.
    """
    from streambp.planner import Memory, Setting
    from streambp.planner.plan import plan_profile
    from tests.planner.test_fastest import CARDS, GIB, LENGTHS, check_cell

    rows = []
    for size in CARDS:
        for length in LENGTHS:
            memory = Memory(size * GIB, 256 * GIB)
            wrong = ""
            try:
                check_cell(name, memory, training, length, profile)
            except Exception as error:  # a traceback is what this table looks for
                wrong = f"{type(error).__name__} {str(error).splitlines()[0][:200]}"
            plan = plan_profile(profile(training), length, memory, Setting())
            rows.append({"card_gib": size, "tokens": length, **cell(plan, wrong)})
    return rows


def table(name: str, folder: Path | None, file: Path | None) -> bool:
    """Print the lines of a model; return True if all of its plans pass.

    Args:
        name: the model.
        folder: folder of counts; None: none are kept.
        file: file of rows; None: rows are printed only.
    """
    from tests.planner.released import MOST_SECONDS
    from tests.planner.test_fastest import LORA, Training

    counts = functools.cache(lambda training: kept_count(name, training, folder))
    rows = []
    passed = True
    trainings = (Training(), LORA, Training(16, 4))
    for training in trainings:  # in this order, so that no plan's seconds contain a count
        counts(training)
    for training in trainings:
        first = counts(training)[1]
        passed &= first <= MOST_SECONDS
        begun = time.process_time()
        cells = checked(name, training, lambda how: counts(how)[0])
        plan_seconds = time.process_time() - begun
        print(f"{name}, {training}: first count {first:.1f} s, nine plans {plan_seconds:.1f} s")
        for row in cells:
            line = {"model": name, "training": str(training), "first_count_s": f"{first:.1f}"} | row
            rows.append(line)
            passed &= row["check"] == "passes"
            print("    " + "  ".join(f"{value}" for value in row.values()), flush=True)
    if file is not None:
        replace_rows(file, name, rows)
    return passed


def replace_rows(file: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write a model's rows to a CSV file in the order of the models, in place of older ones."""
    from tests.planner.released import COLUMNS, RELEASED_CONFIGS

    old_rows = []
    if file.exists():
        with file.open(encoding="utf-8", newline="") as stream:
            old_rows = [row for row in csv.DictReader(stream) if row["model"] != name]
    order = list(RELEASED_CONFIGS)
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*old_rows, *rows], key=lambda row: order.index(row["model"])))


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tests.planner.released import RELEASED_CONFIGS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=RELEASED_CONFIGS, default=list(RELEASED_CONFIGS)
    )
    parser.add_argument("--counts", type=Path, help="folder of counts")
    parser.add_argument("--csv", type=Path, help="file of rows")
    parser.add_argument("--one", choices=RELEASED_CONFIGS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return 0 if table(arguments.one, arguments.counts, arguments.csv) else 1
    wrong = 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = []
    if arguments.counts is not None:
        options += ["--counts", str(arguments.counts.resolve())]
    if arguments.csv is not None:
        options += ["--csv", str(arguments.csv.resolve())]
    for name in arguments.models:
        command = [sys.executable, "-W", "ignore", __file__, "--one", name, *options]
        wrong += subprocess.run(command, env=environment, check=False).returncode != 0
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
