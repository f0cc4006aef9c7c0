"""Two and four ranks, gloo, CPU: sequences split by torch's context parallelism, streamed, against a single process.

covers: distributed/context_parallel.py, distributed/engines.py, sharded/call.py, sharded/gathered.py, sharded/layer.py,
sharded/masks.py, sharded/shards.py, model/split.py
"""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
import torch

from tests.distributed.context_mutants import MUTANTS
from tests.distributed.ranks import launch, result_of
from tests.distributed.split_worker import LENGTH
from tests.families import build
from tests.oracle import worst_error

GRADIENT_BAR = 1e-10  # float64
TRAINING_BAR = 1e-6  # float32, weights after four steps
UPDATE_BAR = 2e-5  # float32, in which each update is rounded to the weights' precision
MODES = ("plain", "packed", "left-padded", "right-padded")
HELD = {"saves": ["attn_out"]}

FAST = {
    "gradients": [
        {}, {"mode": "packed", "heads": 1, "config": {"saves": ["attn_out", "kv"], "offload": "cpu"}},
        {"family": "gemma3", "mode": "left-padded", "config": HELD},
        {"family": "gpt_oss", "mode": "packed", "heads": 1},
        {"family": "qwen3_moe", "order": "consecutive", "mode": "packed"},
        {"family": "deepseek_v3", "mode": "packed"},
        *({"mutant": name, "mode": "packed", "heads": 1} for name in MUTANTS),
    ],
    "refused": [
        {"without": ["shift_labels"]}, {"without": ["position_ids"]}, {"outside": ["position_ids"]},
        {"configs": [{"saves": ["attn_out"]}, {}]}, {"length": 23}, {"family": "qwen3_next"},
    ],
    "training": [{"mode": "right-padded", "dtype": "float32"}],
}  # fmt: skip
FAMILIES = ("llama", "qwen3", "gemma3", "mistral", "gpt_oss", "qwen3_moe", "deepseek_v3", "gemma2", "gemma3n_text")
SAVES = [{"saves": saves, "offload": offload}
         for saves in ([], ["attn_out"], ["kv"], ["attn_out", "kv", "self_attn.*"])
         for offload in ("none", "cpu")]  # fmt: skip


def settings(ranks):
    """Every family and mode, with saves, heads at a time, orders and numbers of chunks that take turns."""
    size = {"length": 2 * LENGTH} if ranks == 4 else {}  # a shard must show where windows end
    for family, part in itertools.groupby(itertools.product(FAMILIES, MODES), key=lambda pair: pair[0]):
        cases = []
        for number, (name, mode) in enumerate(part):
            if (name, mode) == ("gemma3n_text", "left-padded"):
                continue  # unpatched its gradients are NaN
            for turn in range(2):
                index = 2 * number + turn + FAMILIES.index(family)
                extra = {"heads": 1} if index % 3 else {}
                order = {"order": "consecutive"} if index % 4 == 1 else {}
                chunks = {"chunks": "others"} if turn else {}
                cases.append({"family": name, "mode": mode, "config": SAVES[index % 8], **size, **extra, **order, **chunks})
        yield ranks, {"gradients": cases}
    if ranks == 2:
        yield ranks, {"gradients": [{"config": config, "heads": heads} for config in SAVES for heads in (1, 2)]}
        yield ranks, {"gradients": [{"stock": True, "mode": mode} for mode in MODES]}
        uncertain = {"saves": ["attn_out", "kv"], "offload": "cpu", "on_host_full": "recompute", "host_memory": 3000}
        yield ranks, {"gradients": [{"config": uncertain, "heads": 1}, {"lora": True}, {"frozen": True}]}
    yield ranks, {"training": [{"mode": mode, "dtype": "float32"} for mode in MODES]}


def run(runs, ranks):
    outputs, codes = launch("tests.distributed.context_worker", json.dumps(runs), str(ranks), ranks=ranks, seconds=400)
    results = result_of(outputs, codes)
    assert {what: [row["case"] for row in rows] for what, rows in results.items()} == runs
    return results


def check_collectives(row, ranks, layers=2):
    """So many for a layer whatever its chunks: facts of the model and the settings decide. The same on every rank."""
    case, issued = row["case"], Counter(row["issued"])
    assert row["issued alike"]
    assert issued["trades"] == 0
    groups = {"deepseek_v3": 4}.get(case.get("family"), 2) if case.get("heads") == 1 else 1
    saves = case.get("config", {})
    certain = "attn_out" in saves.get("saves", ()) and saves.get("on_host_full") != "recompute"
    backward = 2 * groups if groups == 1 or certain else 4 * groups
    assert issued["sums"] == 2 * groups * layers
    assert issued["gathers"] == (2 * groups + backward) * layers
    assert issued["lists"] <= 5  # what the shards are, positions, padding; what each kind of mask shows


def check(runs, ranks):
    results = run(runs, ranks)
    for row in results.get("gradients", []):
        case, pairs = row["case"], row["pairs"]
        length = case.get("length", LENGTH)
        loaded = max(pairs) * ranks / sum(pairs)
        print(case, row["error"], "unpatched ring:", row.get("unpatched"), f"most loaded rank / mean: {loaded:.3f}")
        if "mutant" in case:
            assert row["error"] > 0.1, case
            continue
        assert row["error"] <= GRADIENT_BAR, case
        assert f"split over {ranks} ranks (context parallelism)" in row["described"]
        if case.get("family", "qwen3") == "qwen3" and not case.get("frozen"):  # a frozen layer has no backward
            check_collectives(row, ranks)
            saves = case.get("config", {})
            if case.get("mode", "plain") == "plain" and "order" not in case and "on_host_full" not in saves:
                attended = 1 if "attn_out" in saves.get("saves", ()) else 2  # in forward, and again in backward
                assert len(set(pairs)) == 1  # each rank as many; together the causal half, of 2 layers, 4 heads and 2 rows
                assert sum(pairs) == attended * 2 * 4 * 2 * length * (length + 1) // 2
        if case.get("stock"):
            dropped = case["mode"] in ("packed", "left-padded")  # the unpatched ring attends across documents and padding
            assert row["unpatched"] > 0.1 if dropped else row["unpatched"] <= GRADIENT_BAR
    for row in results.get("training", []):
        print(row)
        assert row["error"] <= TRAINING_BAR
    return results


MESSAGES = ("without shift_labels", "position_ids are missing", "position_ids of row", "must be the same on all ranks",
            "must divide the number of tokens", "cannot stream")  # fmt: skip


@pytest.mark.full
def test_context_parallelism():
    results = check(FAST, 2)
    for row, message in zip(results["refused"], MESSAGES, strict=True):
        assert all(message in (said or "") for said in row["messages"]), row  # on every rank alike


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "runs"), [*settings(2), *settings(4)], ids=str)
def test_every_setting(ranks, runs):
    check(runs, ranks)


def trained(folder, objective, what):
    """What rank 0 saved of that run of `context_trainer.py`."""
    ranks = {"alone": 1, "stock twice": 4, "streamed twice": 4}.get(what, 2)
    outputs, codes = launch(
        "tests.distributed.context_trainer", str(folder), objective, what, str(ranks), ranks=ranks, seconds=400
    )
    assert not any(codes), [output[-4000:] for output in outputs]
    found = torch.load(folder / f"{objective}-{what}.pt")
    assert what == "alone" or "fsdp2" in found["engines"]
    return found


def distance(a, b):
    """Between two updates, relative."""
    before = {name: parameter.detach().double() for name, parameter in build("qwen3").named_parameters()}
    return worst_error(*({name: run["weights"][name] - value for name, value in before.items()} for run in (a, b)))


@pytest.mark.full
@pytest.mark.parametrize("objective", ["trainer", "sft"])
def test_trainers(objective, tmp_path):
    """accelerate's cp_size=2 on FSDP2, accumulation, evaluation, and training that goes on from a checkpoint."""
    pytest.importorskip("trl", reason="SFTTrainer is TRL's")
    found = {what: trained(tmp_path, objective, what) for what in ("alone", "stock", "streamed")}
    ours, stock = (distance(found[what], found["alone"]) for what in ("streamed", "stock"))
    print(objective, "updates after 3 steps: from one process", ours, "unpatched", stock)
    assert max(ours, stock) <= UPDATE_BAR
    for mine, theirs in zip(found["streamed"]["logged"], found["stock"]["logged"], strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=1e-5)
    if objective == "trainer":
        resumed = trained(tmp_path, objective, "resumed")
        assert distance(resumed, found["streamed"]) == 0.0


@pytest.mark.full
def test_context_parallelism_inside_data_parallelism(tmp_path):
    """Two groups of two ranks, parameters sharded over all four."""
    stock, ours = (trained(tmp_path, "trainer", what) for what in ("stock twice", "streamed twice"))
    assert distance(ours, stock) <= UPDATE_BAR
