"""Write docs/reference/support.md: families of models by engine, adapters and kernels, as tested.

    python -m scripts.support_matrix            writes docs/reference/support.md
    python -m scripts.support_matrix --check    exit code 1 if the page is not current

A cell is what the parameters of a test say: the script imports them and runs no test. A family
without a test in some column is "not run" there.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from scripts.reference import FAMILIES
from scripts.reference import families as number_of_families
from tests.distributed import (
    test_bidirectional_engines,
    test_context_parallel,
    test_engines,
    test_split_sequences,
)
from tests.distributed.split_worker import DEFAULT_FAMILY
from tests.model import test_kernels_cover

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "support.md"
NOT_RUN_TEXT = "not run"
ENGINES = {"DDP": "ddp", "FSDP2": "fsdp", "ZeRO": "deepspeed"}
HEADER = """# What runs with what

Which model families were compared with the unpatched model under which engine, adapters and kernels. All runs are on
CPUs: engines have two or four ranks, and Liger's kernels have a stand-in in PyTorch. On several GPUs nothing has run
yet ([benchmarks](../explanation/benchmarks.md)). "full" is training of all parameters; numbers are stages of ZeRO.

"""
SOURCES = """
The table is made from the parameters of tests by `python -m scripts.support_matrix`: `tests/model/test_families.py` (one
device), `test_engines.py`, `test_bidirectional_engines.py` (encoders, encoder-decoders, prefixes),
`test_split_sequences.py` (Ulysses) and `test_context_parallel.py` in `tests/distributed`, and
`tests/model/test_kernels_cover.py` (kernels, and LoRA on one device).
"""


def trainings_of_engine(engine: str) -> dict[str, set[str]]:
    """Return the trainings, "full" or "LoRA", of each family under an engine."""
    trainings: dict[str, set[str]] = {}
    for family in test_engines.MODELS:
        trainings[family] = {"full"}
        if any(case.get("lora") for case in test_engines.SINGLE_CASES[engine]):
            trainings[family].add("LoRA")
    for family in test_engines.HYBRIDS:
        trainings[family] = {"full"}
        if family == test_engines.ADAPTED_HYBRID:
            trainings[family].add("LoRA")
    for case in bidirectional_cases(engine):
        training = "LoRA" if case.get("lora") else "full"
        trainings.setdefault(case["model"], set()).add(training)
    return trainings


def bidirectional_cases(engine: str) -> list[dict[str, Any]]:
    """Return the cases of encoders, encoder-decoders and towers under an engine."""
    cases = []
    for launcher, listed in test_bidirectional_engines.CASES.items():
        default = launcher.partition(",")[0]
        cases += [case for case in listed if case.get("engine", default) == engine]
    return cases


def stages(family: str) -> str:
    """Return the stages of ZeRO that a family was trained with, such as " (1, 2, 3)"."""
    bidirectional = [case for case in bidirectional_cases("deepspeed") if case["model"] == family]
    if bidirectional:
        cases = bidirectional
    elif family in test_engines.MODELS:
        cases = test_engines.MATRIX["deepspeed"]
    else:
        cases = test_engines.RECURRENT_CASES["deepspeed"]
    return f" ({', '.join(map(str, sorted({case['stage'] for case in cases})))})"


def split_families() -> set[str]:
    """Return the families whose sequences Ulysses splits in tests; cases without a family have the
    worker's default."""
    cases = (*test_split_sequences.FAMILIES, *test_split_sequences.SAVES)
    return {case.get("family", DEFAULT_FAMILY) for case in cases}


def kernels_of(family: str) -> dict[str, set[str]]:
    """Return the trainings of a family with each kind of kernels, of the covering design."""
    kernels: dict[str, set[str]] = {}
    for row in test_kernels_cover.ROWS:
        kind = "Liger" if row[1] == "liger" else "compiled"
        if row[0] == family:
            kernels.setdefault(kind, set()).add({"lora": "LoRA"}.get(row[4], row[4]))
    return kernels


def cell(trainings: Any) -> str:
    """Return the text of a cell, such as "full, LoRA"."""
    return ", ".join(sorted(trainings, reverse=True)) or NOT_RUN_TEXT


def rows() -> dict[str, dict[str, str]]:
    """Return the cells of each family, by column."""
    engines = {name: trainings_of_engine(engine) for name, engine in ENGINES.items()}
    context = set(test_context_parallel.FAMILIES)
    split = split_families()
    names = set(test_kernels_cover.FACTORS[0]) | context | split
    for families in engines.values():
        names |= set(families)
    table = {}
    for family in sorted(names):
        kernels = kernels_of(family)
        trainings = {"full"}.union(*kernels.values())
        cells = {"one device": cell(trainings)}
        for name, families in engines.items():
            cells[name] = cell(families.get(family, ()))
            if name == "ZeRO" and family in families:
                cells[name] += stages(family)
        cells["Ulysses"] = cell({"full"} if family in split else ())
        cells["context parallel"] = cell({"full"} if family in context else ())
        cells["Liger"] = cell(kernels.get("Liger", ()))
        cells["compiled"] = cell(kernels.get("compiled", ()))
        table[family] = cells
    return table


def page() -> str:
    """Return the page's text."""
    table = rows()
    columns = list(next(iter(table.values())))
    lines = ["| family | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for family, cells in table.items():
        lines.append(f"| {family} | " + " | ".join(cells.values()) + " |")
    listed = set(re.findall(r"^\| (\w+) \|", FAMILIES.read_text("utf-8"), re.MULTILINE))
    other_families = int(number_of_families()) - len(listed & set(table))
    cells_of_others = ["full", *[NOT_RUN_TEXT] * (len(columns) - 1)]
    lines.append(
        f"| [{other_families} others](families.md) | " + " | ".join(cells_of_others) + " |"
    )
    return HEADER + "\n".join(lines) + "\n" + SOURCES


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    text = page()
    if arguments.check:
        return int(not PAGE.exists() or PAGE.read_text("utf-8") != text)
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
