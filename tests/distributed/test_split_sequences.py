"""Two ranks, gloo, CPU: sequences split by DeepSpeed Ulysses, streamed, against unpatched Ulysses
and a single process.

covers: distributed/ulysses.py, sharded/call.py, sharded/layer_halves.py, sharded/layer.py,
sharded/shards.py
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.distributed.ranks import run_split
from tests.distributed.test_engines import CPU, NOTHING_CACHED
from tests.examples.test_distributed_examples import torchrun
from tests.oracle import assert_as_precise, worst_error

GRADIENT_BAR = 1e-10  # float64
TRAINING_BAR = 1e-6  # float32, weights after four steps

FAST_CASES = {
    "gradients": [
        {"stock": True}, {"mode": "packed"}, {"family": "gemma3", "mode": "left-padded"},
        {"changes": {"num_key_value_heads": 1}, "config": {"saves": ["attn_out", "kv", "mlp.*", "self_attn.*"]}},
        {"lora": True, "stock": True, "config": {"saves": ["kv", "self_attn.q_proj"], "offload": "cpu"}},
    ],
    "engines": [{"stage": 3, "zero": NOTHING_CACHED}],
}  # fmt: skip
FAMILIES = [{"family": name, "mode": mode} for name in ("llama", "mistral", "phi3", "olmo2", "gemma3", "qwen2")
            for mode in ("plain", "packed", "right-padded")]  # fmt: skip
SAVES = [{"config": {"saves": saves, "offload": offload}}
         for saves in ([], ["attn_out"], ["kv"], ["attn_out", "kv", "mlp.*"], ["self_attn.*"])
         for offload in ("none", "cpu")]  # fmt: skip
FULL_CASES = [
    {"gradients": FAMILIES},
    {"gradients": SAVES},
    {"gradients": [
        {"mode": "packed", "stock": "drops"}, {"family": "mistral", "stock": "drops"},
        {"mode": "left-padded", "stock": "drops"},
        {"frozen": True, "stock": True}, {"family": "qwen3_moe", "stock": True}, {"family": "mixtral"},
        {"family": "gemma3n_text"}, {"config": {"head": False}}, {"config": {"attention": "math"}, "mode": "packed"},
    ]},
    {"bf16": [{"seed": seed, "length": 256, "chunks": [29, 43], "changes": {"num_hidden_layers": 3, "hidden_size": 64}}
              for seed in range(8)]},
    *({"engines": [case]} for case in (
        {"stage": 1}, {"stage": 2, "accumulation": 3, "family": "llama"}, {"stage": 2, "lora": True},
        {"stage": 3, "zero": NOTHING_CACHED, "accumulation": 3, "eval": True},
        {"stage": 3, "zero": {**NOTHING_CACHED, "offload_param": CPU, "offload_optimizer": CPU}, "frozen": True},
        {"stage": 3, "zero": NOTHING_CACHED, "changes": {"tie_word_embeddings": True}},
        {"stage": 3, "zero": NOTHING_CACHED, "ranks": 4},  # two groups of two ranks
    )),
]  # fmt: skip


def check(runs):
    ranks = max(case.get("ranks", 2) for case in runs.get("engines", [{}]))
    results = run_split(json.dumps(runs), str(ranks), ranks=ranks)
    assert {kind: [row["case"] for row in rows] for kind, rows in results.items()} == runs
    for row in results.get("gradients", []):
        drops = row["case"].get("stock") == "drops"  # a mask that unpatched Ulysses ignores
        assert not drops or row["stock"] > 0.1
        against = ("single process",) if drops else ("single process", "unpatched Ulysses")
        errors = {name: value for name, value in row.items() if name.startswith(against)}
        print(
            row["case"],
            errors,
            row["counts"],
            "unpatched itself",
            row.get("stock"),
            row.get("stock counts"),
        )
        print("    unpatched with checkpointing", row.get("checkpointing counts"))
        assert all(error <= GRADIENT_BAR for error in errors.values())
        layers = row["layers"]
        if row["case"].get("stock"):
            assert row["stock counts"]["all_to_all_single forward"] >= layers
        assert row["counts"]["all_to_all_single forward"] == 4 * layers
        assert row["counts"]["all_to_all_single backward"] <= 8 * layers
        assert "split over 2 ranks" in row["described"]
        if row["case"].get("lora"):
            assert "6 Linears with adapters are computed as one operation" in row["described"]
            assert row["operations"] > 0
    for row in results.get("engines", []):
        engine = [f"zero-{row['case']['stage']}"]
        assert row["stock counts"]["engines"] == engine
        assert row["stock counts"]["all_to_all_single forward"] > 0
        for when in ("before", "after"):
            print(
                row["case"],
                "patched",
                when,
                row[when],
                "unpatched itself",
                row["stock"],
                row["stock counts"],
            )
            assert row[when]["unpatched Ulysses"] <= TRAINING_BAR
            assert row[when]["single process"] <= TRAINING_BAR
            counts = row[when]["counts"]
            assert counts["engines"] == engine
            # of two layers
            assert (counts["all_to_all_single forward"], counts["all_to_all_single backward"]) == (
                8,
                16,
            )
            # Embeddings and head each gather a weight that both have. An evaluation is not split,
            # so that its padded rows are tried as a packed one: two trials of two forwards.
            evaluates = row["case"].get("eval", False)
            uses = 2 if row["case"].get("changes", {}).get("tie_word_embeddings") else 1
            assert counts.get("gathers per parameter", 0) <= uses * (2 + evaluates)
            assert (
                counts.get("gathers in the first micro-step", 0)
                <= uses * (2 + evaluates) + 4 * evaluates
            )
    if "bf16" in results:
        counts = [row[f"{name} counts"] for row in results["bf16"] for name in ("ours", "stock")]
        assert all(count["all_to_all_single forward"] for count in counts)
        assert_as_precise((row["ours"], row["stock"]) for row in results["bf16"])


@pytest.mark.full
def test_split_sequences():
    check(FAST_CASES)


@pytest.mark.full
@pytest.mark.parametrize("runs", FULL_CASES, ids=str)
def test_every_setting(runs):
    check(runs)


@pytest.mark.full
def test_trainer(tmp_path):
    """accelerate's data loader adapter and Trainer's loss, a rank without a label, evaluation that
    is not split; training that goes on from a checkpoint of its own, and of the unpatched model."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    runs = {}
    for run_name in ("stock", "streamed", "streamed from streamed", "streamed from stock"):
        result = torchrun("-m", "tests.distributed.split_trainer", str(tmp_path), run_name)
        assert result.returncode == 0, result.stderr[-4000:]
        runs[run_name] = torch.load(tmp_path / f"{run_name}.pt")
        assert (runs[run_name]["engines"], runs[run_name]["steps"]) == (["zero-3"], 4)
    errors = {
        run_name: worst_error(runs[run_name]["weights"], runs["stock"]["weights"])
        for run_name in runs
    }
    print(
        "weights after 4 steps:",
        errors,
        "losses:",
        {run_name: run["logged"] for run_name, run in runs.items()},
    )
    assert max(errors.values()) <= TRAINING_BAR
    for name, weight in runs["streamed"]["weights"].items():
        assert torch.equal(weight, runs["streamed from streamed"]["weights"][name]), name
    assert runs["streamed"]["logged"] == pytest.approx(runs["stock"]["logged"], rel=1e-5)
