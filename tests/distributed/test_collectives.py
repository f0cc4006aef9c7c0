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
COUNTED = {"count": True, "patched": ["before"]}
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
        {**case, **COUNTED, "checkpointing": True, "stream": {"rows": "as_given"}}
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
        # A tied weight is gathered for the embedding and for the head, in both directions.
        assert streamed.get("gathers per parameter", 0) <= (4 if case.get("tied") else 2)
        # Bytes of gradients on the wire: once a backward, or once an optimizer step. Buckets and
        # units may be padded.
        once_a_step = engine == "ddp" or engine == "fsdp" or case.get("stage") == 1
        share = 1 / case.get("accumulation", 1) if once_a_step else 1
        assert share <= streamed["reduced x trainable parameters"] <= 1.05 * share, case


@pytest.mark.full
def test_packed_rows_are_tried_once():
    """The first step tries whether rows may be packed, on all ranks; later steps gather no more
    than unpatched."""
    additional_calls = []
    for row, steps in zip(
        run("fsdp", [{**COUNTED, "steps": steps} for steps in (2, 4)]), (2, 4), strict=True
    ):
        streamed, unpatched = row["before"]["counts"], row["unpatched"]["counts"]
        additional_calls.append((streamed["calls gathered"] - unpatched["calls gathered"]) * steps)
    assert additional_calls[0] == additional_calls[1] > 0
