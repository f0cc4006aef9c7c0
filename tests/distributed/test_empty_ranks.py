"""One rank of two without labels, for each loss path, count and upstream gradient, under each engine
and with each kind of head, against the unpatched engine on the same ranks.

covers: head/one_pass.py, head/log_probs.py, integrations/trl/values.py, losses/ppo.py
"""

from __future__ import annotations

import json

import pytest

from tests.distributed.empty_worker import CELLS, PATH_TIMEOUT_SECONDS
from tests.distributed.ranks import launch, need_deepspeed
from tests.distributed.worker import ROW_PREFIX
from tests.loss_paths import SETUPS

MAX_RELATIVE_ERROR = 1e-6  # float32, of all finite gradients of a step
ENGINES = ("ddp", "fsdp2", "zero-2", "zero-3")


def rows_of(cases):
    """Return what both ranks said of each case, and what they printed."""
    if any(case["engine"].startswith("zero") for case in cases):
        need_deepspeed()
    outputs, _ = launch(
        "tests.distributed.empty_worker",
        json.dumps(cases),
        seconds=60 + PATH_TIMEOUT_SECONDS * sum(len(case["paths"]) for case in cases),
    )
    rows = []
    for line in outputs[0].splitlines():
        if line.startswith(ROW_PREFIX):
            rows.append(json.loads(line.removeprefix(ROW_PREFIX)))
    return rows, outputs


def check(cases):
    rows, outputs = rows_of(cases)
    assert len(rows) == len(cases), "\n".join(output[-4000:] for output in outputs)
    for row in rows:
        case = row["case"]
        for rank in row["ranks"]:
            assert len(rank) == len(CELLS) * len(case["paths"])
            for cell in rank:
                assert not cell["unlike"], (case, cell)
                assert cell["error"] <= MAX_RELATIVE_ERROR, (case, cell)


RANK_PATHS = ("one pass", "two passes", "lazy", "own loss", "sft", "dpo", "grpo", "ppo")


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("setup", SETUPS)
def test_one_rank_of_two_without_labels(setup, engine):
    check([{"engine": engine, "setup": setup, "paths": RANK_PATHS}])


MUTANTS = {
    "head of no label": RANK_PATHS,
    "factor of values": ("ppo",),
    "objective by product": ("ppo",),
}


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_turns_that_red(mutant):
    """Each path's rows of DDP hold a wrong one."""
    paths = MUTANTS[mutant]
    rows, outputs = rows_of([{"engine": "ddp", "setup": "full", "paths": paths, "mutant": mutant}])
    assert rows, outputs[0][-4000:]
    wrong = set()
    for rank in rows[0]["ranks"]:
        for cell in rank:
            if cell["unlike"] or not cell["error"] <= MAX_RELATIVE_ERROR:
                wrong.add(cell["cell"][0])
    assert wrong == set(paths)
