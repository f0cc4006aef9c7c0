"""Ranks that decide differently: all collectives alike, gradients the unpatched engine's. [Note:
what a rank decides alone]

covers: distributed/engines.py, model/head_deferral.py, model/state.py,
    admission/layer_checkpoint.py
"""

from __future__ import annotations

import itertools
import json
import math
import time

import pytest

from tests.distributed import ranks
from tests.distributed.decisions import (
    CASE_TIMEOUT_SECONDS,
    DECISIONS,
    ENGINES,
    PADDING,
    fours,
    pairs,
)
from tests.distributed.ranks import launch, need_deepspeed, result_of, run_split
from tests.distributed.recorded import DifferentError
from tests.distributed.worker import ROW_PREFIX
from tests.hangs import HANG

MAX_RELATIVE_ERROR = (
    1e-6  # of the gradients of all steps and the weights after the last, in float32
)
SINGLE_CASES = {  # one case for each cure; that of FSDP2 has its own ranks
    "begun_again": {"engine": "fsdp2", "decisions": ["begun again", "chunks"]},
    "reads_the_weight": {
        "engine": "zero-3",
        "decisions": ["own loss", "chunks"],
        "projection": True,
    },
    "gathers_where_used": {"engine": "zero-3", "decisions": ["lazy, read", "lazy, unread"]},
    "tries_alone": {"engine": "fsdp2", "decisions": ["shares, mask", "shares"]},
    "stops_in_a_trial": {
        "engine": "fsdp2",
        "decisions": ["shares", "shares"],
        "fails_in_a_trial": 0,
    },
    "gradients_as_they_come": {"engine": "zero-2", "decisions": ["chunks", "a hook mixes"]},
}
ZERO_CASE = {**SINGLE_CASES["stops_in_a_trial"], "engine": "zero-3"}
# logits of which a loss was made before
HOOK_CASE = {"engine": "zero-2", "decisions": ["lazy, read", "lazy, unread"]}
AFTERWARDS_CASE = {
    "engine": "zero-3",
    "decisions": ["a hook mixes", "own loss, lazy"],
    "patched": "after",
}


def rows_of(cases):
    """What the ranks say of cases under one engine, as far as they came, and what they printed."""
    engine, ranks = cases[0]["engine"], len(cases[0]["decisions"])
    if engine.startswith("zero"):
        need_deepspeed()
    outputs, _ = launch(
        "tests.distributed.decisions",
        json.dumps(cases),
        str(ranks),
        ranks=ranks,
        seconds=60 + CASE_TIMEOUT_SECONDS * len(cases),
    )
    lines = [
        line.removeprefix(ROW_PREFIX)
        for line in outputs[0].splitlines()
        if line.startswith(ROW_PREFIX)
    ]
    return [json.loads(line) for line in lines], outputs


def check(cases):
    rows, outputs = rows_of(cases)
    assert len(rows) == len(cases), "\n".join(
        [str(cases[len(rows)]), *(output[-3000:] for output in outputs)]
    )
    for row, case in zip(rows, cases, strict=True):
        assert row["case"] == case
        for rank, name in zip(row["ranks"], case["decisions"], strict=True):
            assert rank["error"] <= MAX_RELATIVE_ERROR, (case, rank)
            assert rank["issued"] > 0
            assert rank["done"], (case, name, rank["said"])
            assert rank["issued"] == row["ranks"][0]["issued"]
    print(
        f"\n{cases[0]['engine']}, {len(cases[0]['decisions'])} ranks: {len(rows)} cases, all "
        "collectives alike; worst "
        f"{max(rank['error'] for row in rows for rank in row['ranks']):.1e}, longest "
        f"{max(rank['seconds'] for row in rows for rank in row['ranks']):.0f} s"
    )
    return rows


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "engine", ["fsdp2", "zero-2", pytest.param("zero-3", marks=pytest.mark.full)]
)
def test_what_one_rank_alone_did(engine):
    """Each was a hang: a forward begun again, a weight looked at, logits used on one rank, a trial,
    or one that fails; and a layer that one rank alone cannot cut."""
    cases = [
        case
        for case in (*SINGLE_CASES.values(), ZERO_CASE, AFTERWARDS_CASE, HOOK_CASE)
        if case["engine"] == engine
    ]
    rows = check(cases)
    for row in rows:
        if "fails_in_a_trial" in row["case"]:
            first, second = row["ranks"]
            assert first["raised"] == 1
            assert "a trial on a few random tokens failed (KeyError: 'rope')" in first["said"]
            assert "were computed as" in second["said"]
        if row["case"].get("projection"):
            for rank in row["ranks"]:
                assert (
                    rank["projection"]
                    == rank["projection unpatched"]
                    == {"forward": 0, "backward": 0}
                )


@pytest.mark.full
@pytest.mark.parametrize("mutant", SINGLE_CASES)
def test_without_its_cure(mutant):
    """The first collective that differs is named; the ranks do not wait for each other."""
    case = {**SINGLE_CASES[mutant], "mutant": mutant}
    rows, outputs = rows_of([case])
    # the same collectives, but the weight stays, or buckets hold other gradients on each rank
    if rows:
        assert mutant in ("reads_the_weight", "gradients_as_they_come")
        ranks = rows[0]["ranks"]
        assert (
            any(rank["projection"].get("forward") for rank in ranks)
            or max(rank["error"] for rank in ranks) > 100 * MAX_RELATIVE_ERROR
        )
    else:
        assert any(DifferentError.__name__ in output for output in outputs), outputs[0][-2000:]


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_some_decisions(engine):
    combinations = [
        ["short", "own loss, lazy"],
        ["begun again", "no label"],
        ["per token", "kept graphs"],
    ]
    cases = [{"engine": engine, "decisions": names} for names in combinations]
    check(cases)


NO_LABELS = [
    ["nothing counted", "chunks"], ["chunks", "nothing counted"], ["nothing counted", "nothing counted"],
    ["nothing counted, lazy", "short"],
]  # fmt: skip


@pytest.mark.fast("ddp")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_without_labels(engine):
    """Its gradients are zero, as unpatched, and the other rank's weights stay finite."""
    check([{"engine": engine, "decisions": names} for names in NO_LABELS])


MODEL_CASES = {
    "tied": {"tied": True},
    "lora": {"lora": True},
    "head saved": {"lora": True, "head_saved": True},
}


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", MODEL_CASES)
def test_a_rank_without_labels_of_other_models(kind, engine):
    """With a head that is tied, that adapters leave alone, or of which they train a copy."""
    check(
        [
            {"engine": engine, "decisions": names, "changes": MODEL_CASES[kind]}
            for names in NO_LABELS
        ]
    )


MUTANT_CASES = [
    "ddp",
    *(pytest.param(name, marks=pytest.mark.full) for name in ENGINES if name != "ddp"),
]


@pytest.mark.full
@pytest.mark.parametrize("engine", MUTANT_CASES)
def test_zeros_that_are_scaled_turn_that_red(engine):
    check_spoiled(engine, {})


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tied", "head saved"])
def test_zeros_that_are_scaled_turn_other_models_red(kind):
    check_spoiled("ddp", MODEL_CASES[kind])


def check_spoiled(engine, changes):
    """The weights become NaN, if the engine does not refuse the gradients before."""
    case = {"engine": engine, "decisions": NO_LABELS[0], "mutant": "scales_zeros"}
    rows, outputs = rows_of([{**case, "changes": changes}])
    errors = [rank["error"] for row in rows for rank in row["ranks"]]
    assert any(map(math.isnan, errors)) or any("AssertionError" in output for output in outputs), (
        outputs[0][-2000:]
    )


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_with_padding_and_one_without(engine):
    """As rows="packed" and rows="auto" take a batch, with labels and lazy logits; and two ranks
    with unlike padding."""
    combinations = [["padded", "full"], ["full", "padded, lazy"], ["padded, offloaded", "padded"]]
    combinations += (
        [["padded, packed", "full, packed"], ["no mask", "padded"]] if engine != "ddp" else []
    )
    check([{"engine": engine, "decisions": names} for names in combinations])


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_every_pair_with_padding(engine):
    combinations = [
        pair for pair in itertools.combinations_with_replacement(PADDING, 2) if alike(pair)
    ]
    check([{"engine": engine, "decisions": list(pair)} for pair in combinations])


def alike(names):
    """Whether ranks have the setting of a run: it is one for all of them."""
    return len({PADDING[name].stream["rows"] for name in names}) == 1


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_every_pair(engine):
    assert len(pairs()) == len(DECISIONS) * (len(DECISIONS) + 1) // 2
    check([{"engine": engine, "decisions": list(pair)} for pair in pairs()])


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_every_pair_on_four_ranks(engine):
    check([{"engine": engine, "decisions": names} for names in fours()])


# what a rank decides that holds a part of each sequence; saves of keys and of attention are agreed
# upon
SPLIT_CASES = {
    "chunks": {}, "one chunk": {"chunk_size": 64}, "automatic": {"chunk_size": 64, "saves": "auto"},
    "offloads": {"saves": ["mlp.gate_proj"], "offload": "cpu"}, "lazy": {"lazy_logits": True},
}  # fmt: skip


def in_splits():
    """Every pair of these, as cases of the workers for split sequences, with padding and
    without."""
    for number, names in enumerate(itertools.combinations_with_replacement(SPLIT_CASES, 2)):
        yield {
            "configs": [SPLIT_CASES[name] for name in names],
            "mode": ("packed", "left-padded", "plain")[number % 3],
        }


@pytest.mark.full
@pytest.mark.parametrize("split", ["context parallelism", "Ulysses"])
def test_every_pair_where_sequences_are_split(split):
    """In float64, against one process; the workers record the collectives."""
    cases = list(in_splits())
    if split == "Ulysses":
        results = run_split(json.dumps({"gradients": cases}), "2")["gradients"]
        errors = [row[name] for row in results for name in row if name.startswith("single process")]
    else:
        runs = json.dumps({"gradients": cases})
        results = result_of(
            *launch("tests.distributed.context_worker", runs, "2", seconds=60 * len(cases))
        )["gradients"]
        errors = [row["error"] for row in results]
        assert all(row["issued alike"] for row in results)
    print(
        f"\n{split}, 2 ranks: {len(results)} cases, all collectives alike; worst {max(errors):.1e}"
    )
    assert len(results) == len(cases) == 15
    assert max(errors) <= 1e-10


def main():
    """A rank that waits for ever."""
    print("begun", flush=True)
    time.sleep(HANG)


@pytest.mark.full
@pytest.mark.skipif(ranks.TRACEBACK_SIGNAL is None, reason="this system has no signal for it")
def test_a_rank_whose_time_is_over_says_where_it_is(tmp_path):
    output = tmp_path / "output"
    arguments = ("tests.distributed.test_decisions", ("0", "0"), output)
    process = ranks.server().Process(target=ranks.as_program, args=arguments, daemon=True)
    process.start()
    try:
        while process.is_alive() and not (output.exists() and "begun" in output.read_text()):
            time.sleep(0.1)
        ranks.say_where(process)
    finally:
        process.kill()
        process.join()
    assert "test_decisions.py" in output.read_text()
    assert "in main" in output.read_text()
