"""The CUDA path under pytest: `python -m pytest -m gpu tests/gpu`.

covers: attention/kernels.py, offload/engines.py
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import subprocess
import sys
from importlib import metadata

import pytest
import torch
import transformers

import streambp
from paper_repro.figures import Figures
from streambp.admission import entry
from streambp.admission.probe import Verdict
from streambp.attention import attend, backend, kernels, prefix
from streambp.layer import function as layer_function
from streambp.offload import manager_of
from tests.device import ACCELERATOR
from tests.families import build, make_batch
from tests.gpu import offload_rows, report, script
from tests.oracle import relative_l2


@pytest.mark.gpu(any=True)
@pytest.mark.parametrize("spans", report.SPAN_CASES)
def test_gradients_are_as_precise_as_unpatched_ones(spans):
    rows = list(
        report.report(arguments([f"{spans} *"], ACCELERATOR.type, ACCELERATOR.type != "cuda"))
    )
    assert len(rows) > len(report.SAVES)
    assert not [line for line, passed in rows if not passed]


def arguments(row, device="cpu", tiny=True):
    return argparse.Namespace(tiny=tiny, device=device, row=row, minutes=8.0)


@pytest.mark.full
@pytest.mark.parametrize(
    "names",
    [
        ["plain auto none", "plain math attn_out+kv"],
        pytest.param(["window * none", "window * attn_out+kv"], marks=pytest.mark.full),
    ],
)
def test_the_report_runs_without_a_gpu(names):
    rows = list(report.report(arguments(names)))
    assert len(rows) == 1 + (4 if "*" in names[0] else 2)
    assert all(passed for _, passed in rows)


@pytest.mark.full
def test_the_report_times_without_a_gpu():
    (_, (line, passed)) = report.report(arguments(["256"]))
    assert passed
    assert line.startswith("256 ")


@pytest.mark.fast("256")
@pytest.mark.parametrize("row", ["plain auto kv", "256"])
def test_the_report_fails_where_layers_do_not_stream(row, monkeypatch):
    def runs_whole(call):
        return Verdict(False, "a test wants it")

    monkeypatch.setattr(entry, "can_stream", runs_whole)
    (_, (line, passed)) = report.report(arguments([row]))
    assert not passed
    assert "a test wants it" in line


@pytest.mark.full
def test_the_report_fails_where_other_kernels_ran(monkeypatch):
    monkeypatch.setattr(prefix, "choose_backend", lambda *_: backend.Backend((kernels.MATH,)))
    (_, (line, passed)) = report.report(arguments(["plain auto kv"]))
    assert not passed
    assert "cpu flash did not run" in line


def scaled(monkeypatch, number, factor, longer_than=12):
    """Gradient `number` of attention times a factor, in chunks longer than what layers are tried
    with."""
    real = attend.PrefixAttention.backward

    def backward(ctx, grad):
        grads = list(real(ctx, grad))
        if grad.shape[1] > longer_than:
            grads[number] = grads[number] * factor
        return tuple(grads)

    monkeypatch.setattr(attend.PrefixAttention, "backward", staticmethod(backward))


@pytest.mark.full
@pytest.mark.parametrize("factor", [1.05, pytest.param(math.nan, marks=pytest.mark.full)])
def test_an_error_row_sees_a_twentieth_of_dv(factor, monkeypatch):
    """A truth of unrounded weights, with errors ten times as large, would let it pass."""
    scaled(monkeypatch, 2, factor)
    (_, (line, passed)) = report.report(arguments(["plain math kv"]))
    assert not passed
    assert "error above 1.15 x" in line


def test_the_mean_of_rows_is_judged():
    assert report.mean_row([1.0, 1.1, 0.95])[1]
    assert not report.mean_row([1.0, 1.1, 1.12])[1]
    assert not report.mean_row([1.0, math.nan])[1]


@pytest.mark.full
def test_figures_fail_where_nothing_is_a_number(monkeypatch):
    scaled(monkeypatch, 1, math.nan)
    (_, (line, passed)) = report.report(arguments(["256"]))
    assert not passed
    assert "gradient not finite: model.embed_tokens.weight, " in line
    assert "gradient norm nan instead of " in line


@pytest.mark.full
def test_figures_fail_where_gradient_buffers_are_not_used_again(monkeypatch):
    monkeypatch.setattr(layer_function, "may_overwrite", lambda *_: False)
    (_, (line, passed)) = report.report(arguments(["256"]))
    assert not passed
    assert "2 gradient buffers a step instead of one" in line


def test_figures_ask_for_what_runs_on_a_gpu(monkeypatch):
    monkeypatch.setattr(report, "backends", lambda device: ("cudnn", "flash", "math"))
    ran = {"cudnn", "cudnn backward", "head statistics", "head gradient", "merge"}
    assert report.wrong_figures(1, ran, "cuda") == []
    assert report.wrong_figures(1, ran - {"cudnn backward"}, "cuda") == [
        "cudnn backward did not run"
    ]
    assert report.wrong_figures(1, ran - {"head gradient"}, "cuda") == [
        "head gradient did not run in Triton"
    ]
    assert report.wrong_figures(1, ran | {"merge in torch"}, "cuda") == ["merge in torch ran"]


def test_rows_say_what_they_ran_on():
    ((line, _),) = script.environment("cpu")
    # of a CUDA build it may be without the "+cu130" of torch.__version__
    torchs = metadata.version("torch")
    assert f"torch {torchs}; transformers {transformers.__version__}" in line
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        patch.setattr(torch.backends.cudnn, "version", lambda: 91900)
        assert "; cuDNN 91900; commit" in next(script.environment("cpu"))[0]


def test_a_machine_without_git_is_told_apart(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert next(script.environment("cpu"))[0].endswith("commit unknown\n")


@pytest.mark.full
def test_a_row_that_raises_is_not_the_last(monkeypatch):
    real = report.relative_l2
    calls = []

    def fails_once(*pair):
        calls.append(pair)
        if len(calls) == 2:
            raise ValueError("injected")
        return real(*pair)

    monkeypatch.setattr(report, "relative_l2", fails_once)
    _, *rows = report.report(arguments(["plain auto none", "plain auto kv"]))
    assert [passed for _, passed in rows] == [False, True]
    assert "ValueError: injected" in rows[0][0]


LENGTH, WIDTH = (8192, 512) if ACCELERATOR.type == "cuda" else (200, 64)


def model_and_batch(**settings):
    sizes = {"num_hidden_layers": 4, "hidden_size": WIDTH, "head_dim": WIDTH // 4}
    model = build("qwen3", torch.bfloat16, device=ACCELERATOR, **sizes)
    streambp.patch(
        model,
        streambp.StreamConfig(
            kernels="own", chunk_size=LENGTH // 8, saves=("attn_out", "kv"), **settings
        ),
    )
    return model, make_batch("plain", length=LENGTH, device=ACCELERATOR)


def gradient_of(**settings):
    """Of the second step."""
    model, batch = model_and_batch(**settings)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(**batch, use_cache=False).loss.backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.gpu(any=True)
@pytest.mark.parametrize("gpu_memory", [None, 1])
def test_offloading_changes_nothing(gpu_memory):
    """As close to a run without it as two such runs are to each other (FlashAttention's backward
    adds in any order)."""
    plain, plain_again, offloaded = (
        gradient_of(),
        gradient_of(),
        gradient_of(offload="cpu", gpu_memory=gpu_memory),
    )
    assert relative_l2(offloaded, plain) <= 2 * relative_l2(plain_again, plain)


@pytest.mark.gpu(any=True)
@pytest.mark.parametrize("gpu_memory", [None, 1, "1GiB"])
def test_offloading_changes_no_bit_of_deterministic_kernels(gpu_memory, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        plain = gradient_of(attention="math")
        offloaded = gradient_of(attention="math", offload="cpu", gpu_memory=gpu_memory)
    finally:
        torch.use_deterministic_algorithms(False)
    assert plain.keys() == offloaded.keys()
    assert all(torch.equal(offloaded[name], gradient) for name, gradient in plain.items())


@pytest.mark.gpu(any=True)
@pytest.mark.parametrize("gpu_memory", [None, 1])
def test_no_growth_and_stalls_are_counted_on_a_device(gpu_memory):
    model, batch = model_and_batch(offload="cpu", gpu_memory=gpu_memory)
    sizes = []
    for _ in range(20):
        model(**batch, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
        torch.accelerator.synchronize()
        sizes.append((torch.accelerator.memory_allocated(), manager_of(model).host_bytes))
    assert len(set(sizes[2:])) == 1
    stats = manager_of(model).stats()
    assert stats["gb_per_s_out"] > 0
    assert stats["stall_out"] >= 0


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("name", offload_rows.ROWS)
def test_rows(name):
    process = subprocess.run(
        [sys.executable, offload_rows.__file__, "--here", name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]


@pytest.mark.fast("8B 65,536 auto")
@pytest.mark.parametrize("name", ["8B 65,536 auto", "8B LoRA step 131,072"])
def test_the_rows_run_without_a_gpu(name):
    line, passed = offload_rows.run(name, "cpu", tiny=True)
    assert passed
    assert "to the host" in line


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("8B 65,536", "gradient not finite"),
        pytest.param("4B full step 131,072", "weight not finite", marks=pytest.mark.full),
    ],
)
def test_rows_of_offloading_fail_where_nothing_is_a_number(row, message, monkeypatch):
    scaled(monkeypatch, 1, math.nan)
    line, passed = offload_rows.run(row, "cpu", tiny=True)
    assert not passed
    assert message in line


@pytest.mark.full
def test_rows_of_offloading_fail_where_layers_do_not_stream(monkeypatch):
    monkeypatch.setattr(offload_rows, "wrong_paths", lambda model: ["injected"])
    line, passed = offload_rows.run("8B 65,536", "cpu", tiny=True)
    assert not passed
    assert "FAILED: injected" in line


def test_rows_of_offloading_are_judged_on_a_gpu():
    row = offload_rows.Row("8B", 64, streambp.StreamConfig(kernels="own"), (34.6, 0.02, 115.0))
    good = Figures(
        1.0, 1.0, 33.0, 40.0, 0, 1.0, 1, 1.0, 1.0, ("cudnn", "cudnn backward"), frozenset(), ()
    )
    assert offload_rows.missed(row, good, 0.01, 100.0) == []
    assert offload_rows.missed(row, dataclasses.replace(good, ran=("cudnn",)), 0.01, 100.0) == [
        "no fused kernel attended"
    ]
    figures_above = dataclasses.replace(good, peak_gib=35.0)
    assert offload_rows.missed(row, figures_above, 0.03, math.nan) == [
        "peak 35 above 34.6", "stalls 0.03 above 0.02", "host nan above 115",
    ]  # fmt: skip
