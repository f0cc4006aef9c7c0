"""Two ranks, gloo, CPU: encoders whose layers run in halves, decoders with an encoder (T5's, too), and
vision towers, under DDP, FSDP2 and ZeRO-2 and 3, against the bare engine and a single process.

covers: sharded/bidirectional.py, distributed/host.py, admission/t5_bias.py
"""

from __future__ import annotations

import json

import pytest

from tests.distributed.ranks import launch, need_deepspeed
from tests.distributed.test_engines import MAX_GRADIENT_ERROR, MAX_RELATIVE_ERRORS, NOTHING_CACHED
from tests.distributed.worker import CASE_TIMEOUT_SECONDS, ROW_PREFIX

BARS = {
    "gradients": MAX_RELATIVE_ERRORS,
    "weights": MAX_RELATIVE_ERRORS,
    "losses": MAX_RELATIVE_ERRORS,
    "worst gradient": MAX_GRADIENT_ERROR,
}
TOWERS = {"towers": True}
TOWER_LAYERS = {"paligemma": "SiglipEncoderLayer", "bart": "BartEncoderLayer"}
# the ranks' lengths differ by 6; with "one_chunk_on" one rank's layers are not cut
CASES = {
    "ddp": [
        {"model": "bert", "accumulation": 2, "eval": True},
        {"model": "modernbert", "one_chunk_on": 0},
        {"model": "modernbert", "engine": "fsdp"},
        {"model": "bert", "engine": "fsdp", "one_chunk_on": 1},
        {"model": "bart"},
        {"model": "bart", "engine": "fsdp", "one_chunk_on": 0},
        {"model": "t5"},
        {"model": "t5", "engine": "fsdp", "one_chunk_on": 0},
    ],
    "ddp, adapters": [
        {"model": name, "engine": engine, "lora": True}
        for name in ("bert", "modernbert", "bart")
        for engine in ("ddp", "fsdp")
    ],
    "ddp, towers": [
        {"model": "paligemma", "stream": TOWERS},
        {"model": "paligemma", "stream": TOWERS, "accumulation": 2, "eval": True},
        {"model": "paligemma", "stream": TOWERS, "one_chunk_on": 0},
        {"model": "paligemma", "stream": TOWERS, "engine": "fsdp"},
        {"model": "paligemma", "stream": TOWERS, "engine": "fsdp", "one_chunk_on": 1},
        {"model": "bart", "stream": TOWERS},
        {"model": "bart", "stream": TOWERS, "engine": "fsdp", "one_chunk_on": 0},
    ],
    "deepspeed": [
        {"model": "bert", "stage": 3, "zero": NOTHING_CACHED, "one_chunk_on": 0},
        {"model": "modernbert", "stage": 3, "zero": NOTHING_CACHED},
        {"model": "bart", "stage": 3, "zero": NOTHING_CACHED},
        {"model": "t5", "stage": 3, "zero": NOTHING_CACHED},
        {"model": "bert", "stage": 2, "accumulation": 2},
    ],
    "deepspeed, adapters": [
        {"model": name, "stage": 3, "zero": NOTHING_CACHED, "lora": True}
        for name in ("bert", "modernbert", "bart")
    ],
    "deepspeed, towers": [
        {"model": "paligemma", "stream": TOWERS, "stage": 3, "zero": NOTHING_CACHED},
        {"model": "paligemma", "stream": TOWERS, "stage": 3, "zero": NOTHING_CACHED, "one_chunk_on": 0},
        {"model": "paligemma", "stream": TOWERS, "stage": 2, "accumulation": 2},
        {"model": "bart", "stream": TOWERS, "stage": 3, "zero": NOTHING_CACHED},
    ],
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("engine", list(CASES))
def test_engines(engine):
    if engine.startswith("deepspeed"):
        need_deepspeed()
    cases = [{**case, "steps": 2, "patched": ["after"]} for case in CASES[engine]]
    outputs, _ = launch(
        "tests.distributed.bidirectional_worker",
        engine.partition(",")[0],
        json.dumps(cases),
        seconds=CASE_TIMEOUT_SECONDS * len(cases) + 60,
    )
    lines = [line for line in outputs[0].splitlines() if line.startswith(ROW_PREFIX)]
    assert len(lines) == len(cases), "\n".join(output[-4000:] for output in outputs)
    for line in lines:
        row = json.loads(line.removeprefix(ROW_PREFIX))
        results = row["after"]
        assert results["paths"] == ["streams"], row
        if "stream" in row["case"]:
            layer = TOWER_LAYERS[row["case"]["model"]]
            assert {layer, f"FSDP{layer}"} & set(results["kinds"]), row
        for reference in ("unpatched", "single process"):
            for name, value in results[reference].items():
                assert value <= BARS[name], (row["case"], reference, results)
