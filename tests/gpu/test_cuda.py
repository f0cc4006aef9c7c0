"""The CUDA path under pytest: `python -m pytest -m gpu tests/gpu`.

covers: attention/kernels.py, offload/engines.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
import torch

import streambp
from streambp.admission import entry
from streambp.admission.probe import Verdict
from streambp.attention import backend, kernels, prefix
from streambp.offload import manager_of
from tests.families import build, make_batch
from tests.gpu import offload_rows, report
from tests.oracle import relative_l2

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("spans", report.SPANS)
def test_gradients_are_as_precise_as_unpatched_ones(spans):
    rows = list(report.report(arguments(row=[f"{spans} *"], device="cuda", tiny=False)))
    assert len(rows) > len(report.SAVES)
    assert not [line for line, passed in rows if not passed]


def arguments(row, device="cpu", tiny=True):
    return argparse.Namespace(tiny=tiny, device=device, row=row, minutes=8.0)


@pytest.mark.parametrize(
    "wanted",
    [
        ["plain auto none", "plain math attn_out+kv"],
        pytest.param(["window * none", "window * attn_out+kv"], marks=pytest.mark.full),
    ],
)
def test_the_report_runs_without_a_gpu(wanted):
    rows = list(report.report(arguments(wanted)))
    assert len(rows) == 1 + (4 if "*" in wanted[0] else 2)
    assert all(passed for _, passed in rows)


def test_the_report_times_without_a_gpu():
    (_, (line, passed)) = report.report(arguments(["256"]))
    assert passed
    assert line.startswith("256 ")


@pytest.mark.parametrize("row", ["plain auto kv", "256"])
def test_the_report_fails_where_layers_do_not_stream(row, monkeypatch):
    def runs_whole(call):
        return Verdict(False, "a test wants it")

    monkeypatch.setattr(entry, "can_stream", runs_whole)
    (_, (line, passed)) = report.report(arguments([row]))
    assert not passed
    assert "a test wants it" in line


def test_the_report_fails_where_other_kernels_ran(monkeypatch):
    monkeypatch.setattr(prefix, "choose_backend", lambda *_: backend.Backend((kernels.MATH,)))
    (_, (line, passed)) = report.report(arguments(["plain auto kv"]))
    assert not passed
    assert "cpu flash did not run" in line


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


def model_and_batch(**settings):
    model = build("qwen3", torch.bfloat16, num_hidden_layers=4, hidden_size=512, head_dim=128).cuda()
    streambp.patch(model, streambp.StreamConfig(chunk_size=1024, saves=("attn_out", "kv"), **settings))
    return model, {name: value.cuda() for name, value in make_batch("plain", length=8192).items()}


def gradient_of(**settings):
    """Of the second step."""
    model, batch = model_and_batch(**settings)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(**batch, use_cache=False).loss.backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("gpu_memory", [None, 1])
def test_offloading_changes_nothing(gpu_memory):
    """As close to a run without it as two such runs are to each other (FlashAttention's backward adds in any order)."""
    plain, again, moved = gradient_of(), gradient_of(), gradient_of(offload="cpu", gpu_memory=gpu_memory)
    assert relative_l2(moved, plain) <= 2 * relative_l2(again, plain)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("gpu_memory", [None, 1, "1GiB"])
def test_offloading_changes_no_bit_of_deterministic_kernels(gpu_memory, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        plain = gradient_of(attention="math")
        moved = gradient_of(attention="math", offload="cpu", gpu_memory=gpu_memory)
    finally:
        torch.use_deterministic_algorithms(False)
    assert plain.keys() == moved.keys()
    assert all(torch.equal(moved[name], gradient) for name, gradient in plain.items())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("gpu_memory", [None, 1])
def test_no_growth_and_stalls_are_counted_on_a_device(gpu_memory):
    model, batch = model_and_batch(offload="cpu", gpu_memory=gpu_memory)
    sizes = []
    for _ in range(20):
        model(**batch, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        sizes.append((torch.cuda.memory_allocated(), manager_of(model).host_bytes))
    assert len(set(sizes[2:])) == 1
    stats = manager_of(model).stats()
    assert stats["gb_per_s_out"] > 0
    assert stats["stall_out"] >= 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.full
@pytest.mark.parametrize("name", offload_rows.ROWS)
def test_rows(name):
    found = subprocess.run(
        [sys.executable, offload_rows.__file__, "--here", name], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]


@pytest.mark.parametrize("name", ["8B 65,536 auto", "8B LoRA step 131,072"])
def test_the_rows_run_without_a_gpu(name):
    line, passed = offload_rows.run(name, "cpu", tiny=True)
    assert passed
    assert "to the host" in line
