"""Collectives of a micro-step, unpatched and plain checkpointing beside ours; `pytest -s -m full`
prints the table.

covers: distributed/engines.py
"""

from __future__ import annotations

import pytest

from tests.distributed.ranks import run
from tests.distributed.test_engines import NOTHING_CACHED

ZERO_3 = {"stage": 3, "zero": NOTHING_CACHED}
CASES = {
    "ddp": [{}, {"accumulation": 3}],
    "fsdp": [{}, {"reshard": False}, {"accumulation": 3}],
    "deepspeed": [
        {"stage": 1, "accumulation": 3}, {"stage": 2, "accumulation": 3}, ZERO_3, {**ZERO_3, "tied": True},
        {**ZERO_3, "accumulation": 3}, {**ZERO_3, "model": "qwen3_moe"},
    ],
}  # fmt: skip
COLUMNS = ("streamed", "unpatched", "checkpointing")
ROWS = (
    "gathers per parameter", "gathered x trainable parameters", "calls gathered", "reduced x trainable parameters",
    "calls reduced",
)  # fmt: skip
MAX_COLLECTIVES = {
    "ddp": ROWS,
    "fsdp": ROWS,
    "deepspeed": ("gathers per parameter", "reduced x trainable parameters"),
}


@pytest.mark.full
@pytest.mark.parametrize("engine", CASES)
def test_collectives(engine):
    cases = [
        {**case, "count": True, "checkpointing": True, "patched": ["before"]}
        for case in CASES[engine]
    ]
    for row, case in zip(run(engine, cases), CASES[engine], strict=True):
        streamed, unpatched = row["before"]["counts"], row["unpatched"]["counts"]
        print(
            f"\n{engine} {case}\n{'of a micro-step':<32}", *(f"{column:>14}" for column in COLUMNS)
        )
        for name in ROWS:
            values = (
                streamed.get(name, 0),
                unpatched.get(name, 0),
                row["checkpointing"]["counts"].get(name, 0),
            )
            print(f"{name:<32}", *(f"{value:>14.2f}" for value in values))
        for name in MAX_COLLECTIVES[engine]:
            assert streamed.get(name, 0) <= unpatched.get(name, 0), (case, name)
        assert streamed.get("gathers per parameter", 0) <= 2
        # Bytes of gradients on the wire: once a backward, or once an optimizer step. Buckets and
        # units may be padded.
        once_a_step = engine == "ddp" or engine == "fsdp" or case.get("stage") == 1
        share = 1 / case.get("accumulation", 1) if once_a_step else 1
        assert share <= streamed["reduced x trainable parameters"] <= 1.05 * share, case
