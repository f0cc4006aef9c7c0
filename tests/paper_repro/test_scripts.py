"""The benchmarks' methods compute the same thing, and their tables have one row for each figure."""

from __future__ import annotations

import csv

import pytest
import torch

from paper_repro.harness import Job, Row, run
from paper_repro.longest_sequence import search
from paper_repro.losses import OBJECTIVES
from paper_repro.methods import METHODS, Unavailable
from paper_repro.shapes import build, make_batch
from tests.oracle import worst_error

ON_CPU = ("plain", "trl", "trl-selective", "streambp", "streambp-lean")
CASES = [("sft", False), ("dpo", True)]


def gradients(name, objective, lora, device):
    model = build("mini", lora, torch.device(device), seed=0)
    method = METHODS[name]()
    try:
        method.prepare(model, 24)
        with method.step(model):
            loss = OBJECTIVES[objective](method, model, make_batch(model, 100, seed=1, rows=2), 2)
    except Unavailable as reason:
        pytest.skip(f"{name}: {reason}")
    loss.backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def check(name, objective, lora, device, bar):
    for library, needed in (("peft", lora), ("trl", name.startswith("trl"))):
        if needed:
            pytest.importorskip(library, reason=f"{library} is not installed")
    ours, reference = (gradients(which, objective, lora, device) for which in (name, "checkpointing"))
    assert worst_error(ours, reference) < bar


@pytest.mark.parametrize(("objective", "lora"), CASES)
@pytest.mark.parametrize("name", ON_CPU)
def test_methods_agree(name, objective, lora):
    check(name, objective, lora, "cpu", 1e-4)  # float32


@pytest.mark.gpu
@pytest.mark.parametrize(("objective", "lora"), CASES)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "checkpointing"])
def test_methods_agree_on_a_gpu(name, objective, lora):
    check(name, objective, lora, "cuda", 0.1)  # bf16


def test_rows_are_stored(tmp_path):
    output = tmp_path / "rows.csv"
    for method in ("streambp", "liger"):
        run(Job("test", method, "mini", (64, 1024), chunk_size=64, device="cpu"), output)
    rows = list(csv.DictReader(output.open()))
    assert list(rows[0]) == list(Row.__dataclass_fields__)
    assert [(row["method"], row["tokens"], row["status"]) for row in rows] == [
        ("streambp", "64", "ok"), ("streambp", "1024", "ok"), ("liger", "64", "needs a GPU"),
    ]  # fmt: skip
    assert 0 < float(rows[0]["peak_gib"]) < float(rows[1]["peak_gib"])


@pytest.mark.parametrize(("fits", "expected"), [(5000, "4864"), (100, "0"), (10**9, "at least 16384")])
def test_search_ends_at_a_length_that_ran(monkeypatch, fits, expected):
    class Options:
        start, up_to, halvings, budget_gib, seed, output = 1024, 16384, 4, 79.0, 0, None

    class Found:
        def __init__(self, length):
            self.status = "ok" if length <= fits else "out of memory"

    monkeypatch.setattr("paper_repro.longest_sequence.run", lambda job, output: [Found(job.lengths[0])])
    assert search("Qwen3-8B", False, "streambp", Options) == expected
