"""The headline's rows run without a GPU and fail where they should; the first hour goes on whatever
its steps find.

covers: attention/attend.py
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import fnmatch
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.integrations import sdpa_attention

from paper_repro.harness import Job, Row, row_of
from paper_repro.recipes import METHODS
from streambp.attention import attend
from tests.gpu import headline, offload_rows, op_rows, report, state_rows

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "first_hour.sh"


@pytest.mark.full
def test_the_check_runs_without_a_gpu():
    line, passed = check()
    assert passed, line
    assert float(re.search(r"ratio (\d\.\d+)", line)[1]) > 0.8


def rows_of(*names):
    return headline.report(
        argparse.Namespace(device="cpu", tiny=True, row=[*names], minutes=8.0, length=None, csv=None)
    )  # fmt: skip


def check():
    ((line, passed),) = rows_of("check")
    return line, passed


def a_third_more_in_dk(real, ctx, grad):
    grads = list(real(ctx, grad))
    if grad.shape[1] > 12:  # longer than what layers are tried with
        grads[1] = grads[1] * 1.3
    return tuple(grads)


def no_numbers_in_dv(real, ctx, grad):
    grads = list(real(ctx, grad))
    if grad.shape[1] > 12:
        grads[2] = grads[2] * math.nan
    return tuple(grads)


@pytest.mark.fast("no_numbers_in_dv")
@pytest.mark.parametrize("mutant", [a_third_more_in_dk, no_numbers_in_dv])
def test_the_check_fails_where_the_gradient_is_wrong(mutant, monkeypatch):
    real = attend.PrefixAttention.backward
    monkeypatch.setattr(
        attend.PrefixAttention, "backward", staticmethod(lambda *args: mutant(real, *args))
    )
    line, passed = check()
    assert not passed
    assert "error above 1.15 x" in line


def test_the_check_fails_where_layers_do_not_stream(monkeypatch):
    """A wrong merge is found when layers are tried: they run whole, exactly, and say so."""
    monkeypatch.setattr(attend, "merge", lambda o, lse, part_o, part_lse, out: out.copy_(o))
    line, passed = check()
    assert not passed
    assert "model.layers.0 checkpoints" in line


def test_what_the_truth_on_a_gpu_depends_on_is_there():
    assert callable(sdpa_attention.use_gqa_in_sdpa)


def row(method, **figures):
    defaults = {"seconds": 10.0, "peak_gib": 60.0, "loss": 11.9, "gradient_norm": 0.1}
    return Row(
        **row_of(
            Job("test", method, "mini", (64,), device="cpu"), 64, "ok", **{**defaults, **figures}
        )
    )


def test_a_method_whose_gradients_are_others_fails(monkeypatch):
    rows = {
        "checkpointing": row("checkpointing"),
        "streambp-lean": row("streambp-lean", gradient_norm=0.103),
    }
    monkeypatch.setattr(headline, "run", lambda job, output, deadline: [rows[job.method]])
    arguments = argparse.Namespace(
        device="cpu",
        tiny=True,
        row=["checkpointing", "streambp-lean"],
        minutes=8.0,
        length=None,
        csv=None,
    )
    first, second = headline.report(arguments)
    assert first[1]
    assert not second[1]
    assert "gradient norm 0.103 instead of checkpointing's 0.1" in second[0]
    rows["streambp-lean"] = dataclasses.replace(rows["checkpointing"], status="failed: injected")
    _, second = rows_of("checkpointing", "streambp-lean")
    assert not second[1]
    assert "FAILED: failed: injected" in second[0]


def test_bars():
    peer = row(headline.PEER)
    assert headline.bars(row(headline.LEAN, seconds=9.9, peak_gib=33.0), peer)[1] == []
    assert len(headline.bars(row(headline.LEAN, seconds=10.1, peak_gib=35.0), peer)[1]) == 2
    assert headline.bars(row(headline.FAST, seconds=9.2, peak_gib=60.0), peer)[1] == []
    assert len(headline.bars(row(headline.FAST, seconds=9.9, peak_gib=61.0), peer)[1]) == 2
    assert len(headline.bars(row(headline.LEAN, seconds=float("nan"), peak_gib=None), peer)[1]) == 2
    assert headline.bars(row(headline.LEAN), None)[1] == []


STAND_IN = """#!{python}
import pathlib, sys
words = sys.argv[1:]
with pathlib.Path({log!r}).open("a") as log:
    log.write(repr(words) + "\\n")
print("row", *words[:1])
sys.exit(3 if "tests/gpu/op_rows.py" in words else 0)
"""


def first_hour(folder, *words, python, **variables):
    command, variables = (
        ["bash", str(SCRIPT), str(folder), *words],
        {**os.environ, "PYTHON": str(python), **variables},
    )
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def lines():
    """Of the script: the steps of each with their seconds."""
    text = re.search(r"^LINES=\(\n(.*?)^\)", SCRIPT.read_text(), re.DOTALL | re.MULTILINE)[1]
    lists = [
        [step.split(":") for step in line.strip().strip('"').split()] for line in text.splitlines()
    ]
    return [{name: int(seconds) for name, seconds in steps} for steps in lists]


@pytest.fixture
def stand_in(tmp_path):
    """An interpreter that writes down what it was called with."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
    python.chmod(0o755)
    return python, log


def test_steps_go_on_and_are_not_repeated(tmp_path, stand_in):
    python, log = stand_in
    first_run = first_hour(tmp_path / "out", python=python, GO_ON="1")
    assert first_run.returncode == 1, first_run.stderr  # two steps failed
    commands = log.read_text().splitlines()
    steps = [step for line in lines() for step in line]
    assert len(commands) == len(steps)
    for number, script in enumerate(
        ("device_rows.py", "exact_rows.py", "op_rows.py", "headline.py")
    ):
        assert script in commands[number]
    for step, code in (("headline", 0), ("ops", 3), ("planner", 0)):
        text = (tmp_path / "out" / f"{step}.txt").read_text()
        assert text.startswith("row ")
        assert text.endswith(f"exit code {code}\n")
    (tmp_path / "out" / "states.txt").write_text("row interrupted\n")
    assert len(list((tmp_path / "out").iterdir())) == len(steps)  # the stand-in writes no table
    second_run = first_hour(tmp_path / "out", python=python)
    assert second_run.returncode == 0
    assert len(log.read_text().splitlines()) == len(commands) + 1
    assert (
        (tmp_path / "out" / "states.txt")
        .read_text()
        .startswith("row interrupted\nrow tests/gpu/state_rows.py\n")
    )
    unknown = first_hour(tmp_path / "out", "no_step", python=python)
    assert unknown.returncode == 2
    assert (
        "no line or step is named no_step; lines are 1 to 6, steps: device exact " in unknown.stderr
    )


def test_a_step_that_fails_ends_the_call_and_names_what_is_left(tmp_path, stand_in):
    python, log = stand_in
    process = first_hour(tmp_path, "1", "headline", python=python)
    assert process.returncode == 1
    assert len(log.read_text().splitlines()) == 3
    assert "!! ops failed with exit code 3: not begun are check headline. " in process.stdout
    check_process = first_hour(tmp_path, "check", python=python)
    assert check_process.returncode == 0
    assert "exit code 0" in (tmp_path / "check.txt").read_text()


def test_a_step_ends_when_its_time_is_over(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho row 1: FAILED, an error\nexec sleep 60\n")
    python.chmod(0o755)
    script = tmp_path / "tests" / "gpu" / "first_hour.sh"
    script.parent.mkdir(parents=True)
    script.write_text(re.sub(r"check:\d+", "check:1", SCRIPT.read_text()))
    command = ["bash", str(script), str(tmp_path / "out"), "check"]
    process = subprocess.run(
        command,
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert "!! row 1: FAILED, an error\n!! stopped after its 1 s\nexit code 124\n" in process.stdout


def test_lines_fit_into_a_command():
    """Each is one command of less than ten minutes that leaves eight files at most; the last is a
    list of steps."""
    for line in lines()[:-1]:
        assert sum(line.values()) < 600
        assert len(line) + 1 <= 8
    assert max(seconds for line in lines() for seconds in line.values()) < 600
    assert list(lines()[0]) == ["device", "exact", "ops", "check"]


def test_steps_name_rows_and_methods_that_there_are(tmp_path, stand_in):
    python, log = stand_in
    first_hour(tmp_path / "out", python=python, GO_ON="1")
    names = {
        "default_rows": ["limit 0.9 in a chunk"],
        "exact_rows": ["float64 qwen3", "default long", "stream", "dropout", "autocast"],
        "headline": headline.ORDER,
        "offload_rows": offload_rows.ROWS,
        "state_rows": state_rows.ROWS,
        "op_rows": [*op_rows.SUMS, *(f"plain cudnn {size}" for size in op_rows.SIZES)],
        "report": [*(f"{spans} cudnn none" for spans in report.SPAN_CASES), "8192", "65536"],
    }
    patterns = collections.defaultdict(set)
    for words in map(ast.literal_eval, log.read_text().splitlines()):
        if "--methods" in words:
            assert set(words[words.index("--methods") + 1 :]) <= set(METHODS)
        patterns[Path(words[0]).stem] |= {
            pattern_word for word, pattern_word in itertools.pairwise(words) if word == "--row"
        }
    for script, rows in names.items():
        assert script in patterns
        assert not [pattern for pattern in patterns[script] if not fnmatch.filter(rows, pattern)]
    assert not [
        name
        for name in names["report"]
        if not any(fnmatch.fnmatch(name, row) for row in patterns["report"])
    ]
    assert not [
        name
        for name in names["op_rows"]
        if not any(fnmatch.fnmatch(name, row) for row in patterns["op_rows"])
    ]
    assert not [
        name
        for name in offload_rows.ROWS
        if not any(fnmatch.fnmatch(name, r) for r in patterns["offload_rows"])
    ]


@pytest.mark.full
def test_every_step_runs_on_a_cpu(tmp_path):
    process = first_hour(tmp_path, "--", "--device", "cpu", "--tiny", python=sys.executable)
    assert process.returncode == 0, process.stdout + process.stderr
