"""The benchmarks' methods compute the same thing, and their tables have one row for each figure."""

from __future__ import annotations

import csv
import json
import sys

import pytest
import torch

from paper_repro import harness
from paper_repro.harness import Job, Row, run, sweep
from paper_repro.longest_sequence import search
from paper_repro.losses import OBJECTIVES
from paper_repro.methods import METHODS, Unavailable
from paper_repro.rows import Deadline, each, run_child
from paper_repro.shapes import build, make_batch
from tests.oracle import worst_error
from tests.seeds import seed_of
from tests.tiers import thinned

ON_CPU = ("plain", "trl", "trl-selective", "streambp", "streambp-lean")
CASES = [("sft", False), ("dpo", True)]


def gradients(name, objective, lora, device):
    model = build("mini", lora, torch.device(device), seed=seed_of(0))
    method = METHODS[name]()
    try:
        method.prepare(model, 24)
        with method.step(model):
            loss = OBJECTIVES[objective](method, model, make_batch(model, 100, seed=seed_of(1), rows=2), 2)
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


@pytest.mark.parametrize(
    ("name", "objective", "lora"),
    thinned(
        [(name, *case) for name in ON_CPU for case in CASES],
        lambda name, objective, lora: lora == (name not in ("trl-selective", "streambp-lean")),
    ),
)
def test_methods_agree(name, objective, lora):
    check(name, objective, lora, "cpu", 1e-4)  # float32


@pytest.mark.gpu
@pytest.mark.parametrize(("objective", "lora"), CASES)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "checkpointing"])
def test_methods_agree_on_a_gpu(name, objective, lora):
    check(name, objective, lora, "cuda", 0.1)  # bf16


def test_rows_are_stored(tmp_path):
    output = tmp_path / "rows.csv"
    run(Job("test", "streambp", "mini", (64, 256), chunk_size=64, device="cpu"), output)
    rows = list(csv.DictReader(output.open()))
    assert list(rows[0]) == list(Row.__dataclass_fields__)
    assert [(row["method"], row["tokens"], row["status"]) for row in rows] == [
        ("streambp", "64", "ok"), ("streambp", "256", "ok"),
    ]  # fmt: skip
    assert 0 < float(rows[0]["peak_gib"]) < float(rows[1]["peak_gib"])


def test_a_method_that_cannot_run_here_gives_one_row(capsys):
    harness.child(Job("test", "liger", "mini", (64, 256), chunk_size=64, device="cpu"))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ROW ")]
    row = json.loads(line.removeprefix("ROW "))
    assert (row["method"], row["tokens"], row["status"]) == ("liger", 64, "needs a GPU")


@pytest.mark.parametrize(("fits", "expected"), [(5000, "4864"), (100, "0"), (10**9, "at least 16384")])
def test_search_ends_at_a_length_that_ran(monkeypatch, fits, expected):
    class Options:
        start, up_to, halvings, budget_gib, seed, output = 1024, 16384, 4, 79.0, 0, None

    class Found:
        def __init__(self, length):
            self.status = "ok" if length <= fits else "out of memory"

    monkeypatch.setattr("paper_repro.longest_sequence.run", lambda job, output, deadline: [Found(job.lengths[0])])
    assert search("Qwen3-8B", False, "streambp", Options, Deadline()) == expected


def test_a_child_that_ends_badly_gives_a_row_and_the_sweep_goes_on(tmp_path, capfd, monkeypatch):
    shape = "raise KeyError('no such shape')"  # a fresh Python with torch takes seconds to say as much
    monkeypatch.setattr(
        "paper_repro.harness.run_child", lambda command, *more: run_child([sys.executable, "-S", "-c", shape], *more)
    )
    output = tmp_path / "rows.csv"
    jobs = [
        Job("test", "streambp", "no such shape", (64, 128), device="cpu"),
        Job("test", "plain", "nor this", (64,), device="cpu"),
    ]
    sweep(jobs, output, Deadline())
    rows = list(csv.DictReader(output.open()))
    assert [(row["method"], row["tokens"], row["status"].split(":")[0]) for row in rows] == [
        ("streambp", "64", "failed with exit code 1"), ("plain", "64", "failed with exit code 1"),
    ]  # fmt: skip
    assert "KeyError: 'no such shape'" in rows[0]["status"]
    sweep(jobs, output, Deadline(0))
    assert "not run, 0 minutes are over: sft streambp, sft plain" in capfd.readouterr().out
    assert len(list(csv.DictReader(output.open()))) == 2


def child(program):
    return [sys.executable, "-c", "import os, pathlib, time\n" + program]


def test_lines_of_a_child_come_as_it_writes_them(tmp_path):
    """It goes on only when the first was seen, and is killed then."""
    seen, lines = tmp_path / "seen", []

    def line(text):
        lines.append(text)
        seen.touch()

    program = f"print('one', flush=True)\nwhile not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.01)\n"
    ended = run_child(child(program + "print('two', flush=True)\nos.kill(os.getpid(), 9)"), tmp_path, Deadline(), line)
    assert lines == ["one", "two"]
    assert ended.code == -9
    assert "exit code -9" in str(ended)


def test_a_child_is_stopped_when_the_time_is_over(tmp_path):
    lines = []
    ended = run_child(child("print('one', flush=True)\ntime.sleep(600)"), tmp_path, Deadline(0.02), lines.append)
    assert ended.code is None
    assert lines in ([], ["one"])
    assert "no time was left" in str(ended)


def test_rows_go_on_after_one_that_fails():
    def fails():
        raise ValueError("injected\nsecond line")

    rows = [("a 1", lambda: ("first", True)), ("a 2", fails), ("b", lambda: ("last", True))]
    assert list(each(rows, None, Deadline())) == [
        ("first", True),
        ("a 2: FAILED, ValueError: injected", False),
        ("last", True),
    ]
    assert list(each(rows, ["a 1", "b"], Deadline())) == [("first", True), ("last", True)]
    assert [passed for _, passed in each(rows, ["c"], Deadline())] == [False]
    assert list(each(rows, ["a *"], Deadline(0))) == [("not run, 0 minutes are over: --row 'a 1' --row 'a 2'", False)]


def test_a_search_for_which_no_time_is_left_says_so(monkeypatch):
    class Options:
        start, up_to, halvings, budget_gib, seed, output = 1024, 16384, 4, 79.0, 0, None

    deadline = Deadline()
    found = {1024: "ok", 2048: "ok", 4096: "stopped: no time was left"}
    monkeypatch.setattr(
        "paper_repro.longest_sequence.run",
        lambda job, output, deadline: [type("Found", (), {"status": found[job.lengths[0]]})],
    )
    assert search("mini", False, "streambp", Options, deadline) == "at least 2048 (stopped: no time was left)"
    assert search("mini", False, "streambp", Options, Deadline(0)) == "no time was left"
