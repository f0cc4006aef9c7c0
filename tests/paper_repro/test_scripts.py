"""The benchmarks' methods compute the same thing, and their tables have one row for each figure."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from paper_repro import figures, harness
from paper_repro.harness import Job, Row, run, sweep
from paper_repro.longest_sequence import search
from paper_repro.losses import OBJECTIVES
from paper_repro.methods import StreamBP, Unavailable
from paper_repro.recipes import METHODS, attends
from paper_repro.rows import Deadline, each, run_child
from paper_repro.shapes import build, make_batch
from streambp.attention import attend
from tests.device import ACCELERATOR
from tests.oracle import worst_error
from tests.seeds import seed_of
from tests.tiers import thinned

ROOT = Path(__file__).parents[2]
ON_CPU = ("plain", "trl", "trl-selective", "axolotl", "streambp", "streambp-lean")
CASES = [("sft", False), ("dpo", True)]


def gradients(name, objective, lora, device):
    model = build("mini", lora, torch.device(device), seed=seed_of(0))
    method = METHODS[name]()
    try:
        method.prepare(model, 24)
        with method.step(model):
            loss = OBJECTIVES[objective](
                method, model, make_batch(model, 100, seed=seed_of(1), rows=2), 2
            )
    except Unavailable as reason:
        pytest.skip(f"{name}: {reason}")
    loss.backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def check(name, objective, lora, device, bar):
    for library, is_needed in (("peft", lora), ("trl", name.startswith(("trl", "axolotl")))):
        if is_needed:
            pytest.importorskip(library, reason=f"{library} is not installed")
    ours, reference = (
        gradients(method, objective, lora, device) for method in (name, "checkpointing")
    )
    assert worst_error(ours, reference) < bar


@pytest.mark.fast("trl-selective-sft-False", "axolotl-dpo-True")
@pytest.mark.parametrize(
    ("name", "objective", "lora"),
    thinned(
        [(name, *case) for name in ON_CPU for case in CASES],
        lambda name, objective, lora: lora == (name not in ("trl-selective", "streambp-lean")),
    ),
)
def test_methods_agree(name, objective, lora):
    check(name, objective, lora, "cpu", 1e-4)  # float32


@pytest.mark.gpu(any=True)
@pytest.mark.parametrize(("objective", "lora"), CASES)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "checkpointing"])
def test_methods_agree_on_a_gpu(name, objective, lora):
    check(name, objective, lora, ACCELERATOR.type, 0.1)  # bf16


@pytest.mark.full
def test_axolotls_recipe_attends_once_and_has_its_mlp_in_tiles():
    """Forward keeps what attention gives; recomputation takes it, and asks the MLP for one tile at
    a time."""
    pytest.importorskip("trl", reason="trl is not installed")
    model = build("mini", False, torch.device("cpu"), seed=seed_of(0))
    lengths = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(
        lambda module, args, out: lengths.append(out.shape[1])
    )
    method = METHODS["axolotl"]()
    method.prepare(model, "auto")
    ids = make_batch(model, 600, seed=seed_of(1))
    attended = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            attended.extend([func.name()] * attends(func))
            return func(*args, **(kwargs or {}))

    with Count():
        with method.step(model):
            loss = method.nll(model, ids)
        loss.backward()
    assert len(attended) == len(model.model.layers)
    assert set(lengths) == {200}
    assert len(method.stash.saved) == 2 * len(model.model.layers)  # o and lse


@pytest.mark.full
def test_rows_are_stored(tmp_path):
    output = tmp_path / "rows.csv"
    run(Job("test", "streambp", "mini", (64, 256), chunk_size=64, device="cpu"), output)
    rows = list(csv.DictReader(output.open()))
    assert list(rows[0]) == list(Row.__dataclass_fields__)
    assert [(row["method"], row["tokens"], row["status"]) for row in rows] == [
        ("streambp", "64", "ok"), ("streambp", "256", "ok"),
    ]  # fmt: skip
    assert 0 < float(rows[0]["peak_gib"]) < float(rows[1]["peak_gib"])
    assert float(rows[0]["gradient_norm"]) > 0
    # A row of one chunk runs as unpatched; of four, all layers write over one buffer.
    assert [row["gradient_buffers"] for row in rows] == ["0", "1"]


def one_gradient_is_missing(real, model):
    next(model.parameters()).grad = None
    return real(model)


def one_problem_more(real, *args):
    return [*real(*args), "injected"]


@pytest.mark.fast("StreamBP-missing-one_problem_more-injected")
@pytest.mark.parametrize(
    ("owner", "attribute", "mutant", "message"),
    [
        (attend.PrefixAttention, "backward", lambda real, *a: tuple(g if g is None else g * math.nan for g in real(*a)),
         "gradient not finite: model.embed_tokens.weight, model.layers.0"),
        (figures, "judged_gradients", one_gradient_is_missing, "no gradient of model.embed_tokens.weight"),
        (harness, "wrong_paths", one_problem_more, "injected"),
        (StreamBP, "missing", one_problem_more, "injected"),
    ],
)  # fmt: skip
def test_a_row_whose_step_is_wrong_says_so(owner, attribute, mutant, message, monkeypatch, capfd):
    real = getattr(owner, attribute)
    wrapped = lambda *args: mutant(real, *args)  # noqa: E731 - one line for each kind of attribute
    monkeypatch.setattr(
        owner, attribute, staticmethod(wrapped) if attribute == "backward" else wrapped
    )
    harness.child(Job("test", "streambp", "mini", (64,), chunk_size=24, device="cpu"))
    row = json.loads(capfd.readouterr().out.partition("ROW ")[2])
    assert row["status"].startswith("failed: ")
    assert message in row["status"]


def test_kernels_that_did_not_run_are_missed():
    ran = ("cudnn", "cudnn backward", "head gradient", "head statistics", "merge")
    measured = figures.Figures(
        1.0, 1.0, 1.0, 1.0, 0, 1.0, 1, 1.0, 1.0, ran, frozenset(["gemm"]), ()
    )
    assert METHODS["streambp"]().missing(measured, "cuda") == []
    assert len(METHODS["streambp-liger"]().missing(measured, "cuda")) == 3
    some = dataclasses.replace(
        measured, ran=(*ran, "Liger's norm"), on_device=frozenset(["_triton_rope"])
    )
    assert METHODS["streambp-liger"]().missing(some, "cuda") == ["Liger's SwiGLU did not run"]
    all_of_them = dataclasses.replace(
        some, ran=(*ran, "Liger's norm", "Liger's SwiGLU"), on_device=frozenset()
    )
    assert METHODS["streambp-liger"]().missing(all_of_them, "cuda") == []
    slow = dataclasses.replace(measured, ran=("merge in torch",))
    assert METHODS["streambp"]().missing(slow, "cuda") == [
        "no fused kernel attended", "head statistics did not run in Triton", "head gradient did not run in Triton",
        "merge in torch ran",
    ]  # fmt: skip
    assert METHODS["streambp"]().missing(slow, "cpu") == []
    assert METHODS["trl"]().missing(slow, "cuda") == ["no fused kernel attended"]


def test_ligers_functions_are_counted_where_it_was_imported(monkeypatch):
    class LigerRMSNormFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    ops = types.ModuleType("liger_kernel.ops")
    ops.LigerRMSNormFunction = LigerRMSNormFunction
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    weight = torch.nn.Linear(3, 3)
    real = vars(LigerRMSNormFunction)["forward"]
    measured = figures.run_steps(
        weight, lambda: weight(LigerRMSNormFunction.apply(torch.ones(2, 3))).sum()
    )
    assert measured.ran == ("Liger's norm",)
    assert vars(LigerRMSNormFunction)["forward"] is real


def test_an_error_of_one_counter_leaves_no_other_on(monkeypatch):
    """The rows after it would run under a dispatch mode, compiled modules among them eagerly."""
    monkeypatch.setattr(figures, "OURS", ((figures, "_of_nobody", "nothing"),))
    weight = torch.nn.Linear(3, 3)
    with pytest.raises(KeyError, match="_of_nobody"):
        figures.run_steps(weight, lambda: weight(torch.ones(2, 3)).sum())
    assert _get_current_dispatch_mode_stack() == []


def test_kernels_that_run_at_once_are_counted_once():
    spans = [
        ("gemm", 0.0, 2.0),
        ("norm", 1.0, 3.0),
        ("Memcpy DtoH", 3.0, 9.0),
        ("gemm", 10.0, 11.0),
        ("norm", 10.2, 10.4),
    ]
    assert figures.busy(spans) == pytest.approx(4.0)
    assert figures.busy([]) == 0.0


def test_a_table_of_fewer_columns_gets_the_new_ones(tmp_path):
    output = tmp_path / "rows.csv"
    output.write_text("experiment,method,tokens\nearlier,plain,64\n")
    row = Row(
        **harness.row_of(Job("test", "plain", "mini", (128,), device="cpu"), 128, "ok", seconds=1.0)
    )
    harness.store(row, output)
    harness.store(row, output)
    rows = list(csv.DictReader(output.open()))
    assert [(row["experiment"], row["tokens"], row["seconds"]) for row in rows] == [
        ("earlier", "64", ""), ("test", "128", "1.0"), ("test", "128", "1.0"),
    ]  # fmt: skip


def test_a_method_that_cannot_run_here_gives_one_row(capsys):
    harness.child(Job("test", "liger", "mini", (64, 256), chunk_size=64, device="cpu"))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ROW ")]
    row = json.loads(line.removeprefix("ROW "))
    assert (row["method"], row["tokens"], row["status"]) == ("liger", 64, "needs a GPU")


@pytest.mark.parametrize(
    ("fits", "expected"), [(5000, "4864"), (100, "0"), (10**9, "at least 16384")]
)
def test_search_ends_at_a_length_that_ran(monkeypatch, fits, expected):
    class Options:
        start, up_to, halvings, budget_gib, seed, output = 1024, 16384, 4, 79.0, 0, None

    class Found:
        def __init__(self, length):
            self.status = "ok" if length <= fits else "out of memory"

    monkeypatch.setattr(
        "paper_repro.longest_sequence.run", lambda job, output, deadline: [Found(job.lengths[0])]
    )
    assert search("Qwen3-8B", False, "streambp", Options, Deadline()) == expected


def test_a_child_that_ends_badly_gives_a_row_and_the_sweep_goes_on(tmp_path, capfd, monkeypatch):
    shape = (
        "raise KeyError('no such shape')"  # a fresh Python with torch takes seconds to say as much
    )
    monkeypatch.setattr(
        "paper_repro.harness.run_child",
        lambda command, *args: run_child([sys.executable, "-S", "-c", shape], *args),
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
    seen_file, lines = tmp_path / "seen", []

    def line(text):
        lines.append(text)
        seen_file.touch()

    program = (
        f"print('one', flush=True)\nwhile not pathlib.Path({str(seen_file)!r}).exists(): "
        "time.sleep(0.01)\n"
    )
    ended = run_child(
        child(program + "print('two', flush=True)\nos.kill(os.getpid(), 9)"),
        tmp_path,
        Deadline(),
        line,
    )
    assert lines == ["one", "two"]
    assert ended.code == -9
    assert "exit code -9" in str(ended)


def test_a_fork_has_what_this_process_has(tmp_path):
    lines = []

    def child():
        print("one", os.environ.setdefault("STREAMBP_TEST_FORK", "here"), flush=True)
        raise ValueError("injected")

    ended = run_child(child, tmp_path, Deadline(), lines.append)
    assert lines == ["one here"]
    assert "STREAMBP_TEST_FORK" not in os.environ
    assert str(ended) == "failed with exit code 1: ValueError: injected"
    assert run_child(lambda: None, tmp_path, Deadline(), lines.append).code == 0


@pytest.mark.full
def test_a_child_is_stopped_when_the_time_is_over(tmp_path):
    lines = []
    ended = run_child(
        child("print('one', flush=True)\ntime.sleep(600)"), tmp_path, Deadline(0.02), lines.append
    )
    assert ended.code is None
    assert lines in ([], ["one"])
    assert "no time was left" in str(ended)


def test_rows_go_on_after_one_that_fails():
    def fails():
        raise ValueError("injected\nsecond line")

    line = fails.__code__.co_firstlineno + 1
    rows = [("a 1", lambda: ("first", True)), ("a 2", fails), ("b", lambda: ("last", True))]
    assert list(each(rows, None, Deadline())) == [
        ("first", True),
        (f"a 2: FAILED, ValueError in tests/paper_repro/test_scripts.py:{line}: injected", False),
        ("last", True),
    ]
    assert list(each(rows, ["a 1", "b"], Deadline())) == [("first", True), ("last", True)]
    assert [passed for _, passed in each(rows, ["c"], Deadline())] == [False]
    assert list(each(rows, ["a *"], Deadline(0))) == [
        ("not run, 0 minutes are over: --row 'a 1' --row 'a 2'", False)
    ]


LOST_ROWS_TEXT = """
import argparse, os, sys
from paper_repro import rows

def fails():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

rows.device_is_lost = lambda: rows.FAILED_BEFORE not in os.environ
parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true")
rows.add_arguments(parser)
args = parser.parse_args()
told = lambda name: lambda: (f"{name} of {args.row}, {args.tiny}, {args.minutes < 7}", True)
table = [("a 1", told("a 1")), ("a 2", fails), ("b", told("b")), ("c *", told("c *")), ("a 3", told("a 3"))]
sys.exit(not rows.print_rows(rows.each(table, args.row, rows.Deadline(args.minutes))))
"""


def test_rows_after_a_lost_device_run_in_a_new_process(tmp_path):
    """Those that are left, within the time that is left, and what failed before still counts."""
    script = tmp_path / "rows.py"
    script.write_text(LOST_ROWS_TEXT)
    command = [
        sys.executable,
        str(script),
        "--row",
        "a *",
        "--tiny",
        "--row",
        "b",
        "--minutes",
        "7",
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert process.stdout.splitlines() == [
        "a 1 of ['a *', 'b'], True, False",
        "a 2: FAILED, RuntimeError: CUDA error: an illegal memory access was encountered",
        "the GPU gives this process nothing but errors; the next rows run in a new one",
        "b of ['b', 'a 3'], True, True",
        "a 3 of ['b', 'a 3'], True, True",
    ], process.stderr
    assert process.returncode == 1


def test_a_search_for_which_no_time_is_left_says_so(monkeypatch):
    class Options:
        start, up_to, halvings, budget_gib, seed, output = 1024, 16384, 4, 79.0, 0, None

    deadline = Deadline()
    status_of_length = {1024: "ok", 2048: "ok", 4096: "stopped: no time was left"}
    monkeypatch.setattr(
        "paper_repro.longest_sequence.run",
        lambda job, output, deadline: [
            type("Found", (), {"status": status_of_length[job.lengths[0]]})
        ],
    )
    assert (
        search("mini", False, "streambp", Options, deadline)
        == "at least 2048 (stopped: no time was left)"
    )
    assert search("mini", False, "streambp", Options, Deadline(0)) == "no time was left"


def test_saves_are_gone_where_a_step_takes_most():
    """Of two layers with 10 bytes each: before backward both wait, at the last phase none does."""
    assert harness.peak_of([(math.inf, 5.0), (1.0, 6.0), (0.0, 15.0), (-1.0, 24.0)], 20.0, 2) == (
        6.0,
        20.0,
    )
    assert harness.peak_of([(math.inf, 5.0), (0.0, 17.0), (-1.0, 24.0)], 20.0, 2) == (17.0, 10.0)
    assert harness.peak_of([(math.inf, 2.0), (-1.0, 24.0)], 20.0, 2) == (24.0, 0.0)
