"""Layers with states on a CUDA device: `python -m pytest -m gpu tests/gpu/test_states.py`.

covers: recurrent/documents.py, recurrent/scans.py
"""

from __future__ import annotations

import argparse
import functools
import inspect
import math
import sys

import pytest
import torch
from transformers.models.bamba.modeling_bamba import BambaMixer

from streambp.admission import entry
from streambp.admission.probe import Verdict
from streambp.attention import attend
from streambp.recurrent import documents, scans
from tests import zoo
from tests.gpu import state_rows
from tests.layer import reference_kernels
from tests.versions import needs_mixer_functions


def rows(name, device="cpu", tiny=True):
    _, *results = state_rows.report(
        argparse.Namespace(device=device, tiny=tiny, row=[name], minutes=8.0)
    )
    return results


@pytest.mark.gpu
@needs_mixer_functions
@pytest.mark.parametrize("name", state_rows.ROWS)
def test_rows(name):
    if lacking := state_rows.absent(name):
        pytest.skip("; ".join(lacking))
    ((line, passed),) = rows(name, "cuda", tiny=False)
    assert passed, line


@needs_mixer_functions
@pytest.mark.parametrize(
    "name",
    [*state_rows.KERNELS, "bf16 lfm2 documents", "bf16 bamba", state_rows.FUSED_SCAN_TEXT],
)
def test_the_rows_run_without_a_gpu(name):
    if name in state_rows.KERNELS:
        # skips where this transformers does not have it
        zoo.tiny_config(state_rows.KERNELS[name].modeling)
    ((line, passed),) = rows(name)
    assert passed, line
    assert line.startswith(f"{name} ")


def one_state_without_gradient(cls, value, *readers):
    return value


def ids_of_the_whole_row(real, row_documents, chunk, *args, **kwargs):
    return real(*args, **kwargs)


def no_start_state(real, row_documents, chunk, *args, **kwargs):
    out, end = real(*args, **{**kwargs, "initial_state": None})
    return out, end[-1:]


@needs_mixer_functions
@pytest.mark.parametrize(
    ("row", "owner", "attribute", "mutant"),
    [
        ("scan documents", documents, "_tell_scan", ids_of_the_whole_row),
        ("delta rule documents", documents, "_tell_rule", no_start_state),
        ("selective scan", scans.EndState, "apply", classmethod(one_state_without_gradient)),
    ],
)
def test_the_rows_fail_where_states_are_wrong(row, owner, attribute, mutant, monkeypatch):
    monkeypatch.setattr(owner, attribute, mutant)
    ((line, passed),) = rows(row)
    assert not passed, line
    assert "FAILED" in line


def half_the_gradient_of_values(real, ctx, grad):
    dq, dk, dv, *other_grads = real(ctx, grad)
    return (
        dq,
        dk,
        dv * 0.5 if grad.shape[0] > 1 else dv,
        *other_grads,
    )  # layers are tried with one row


def test_a_model_fails_where_its_gradients_are_wrong(monkeypatch):
    real = attend.PrefixAttention.backward
    mutant = functools.partial(half_the_gradient_of_values, real)
    monkeypatch.setattr(attend.PrefixAttention, "backward", staticmethod(mutant))
    ((line, passed),) = rows("bf16 lfm2")
    assert not passed
    assert "FAILED" in line


@needs_mixer_functions
def test_a_composed_scan_that_is_another_fails(monkeypatch):
    real = BambaMixer.forward

    def forward(self, x, cache_params=None):
        return real(self, x, cache_params) * (1.0 if cache_params is None else 1.5)

    monkeypatch.setattr(BambaMixer, "forward", forward)
    ((line, passed),) = rows(state_rows.FUSED_SCAN_TEXT)
    assert not passed
    assert "FAILED: they differ" in line


@needs_mixer_functions
@pytest.mark.parametrize("row", ["scan", "bf16 lfm2"])
def test_the_rows_fail_where_nothing_is_a_number(row, monkeypatch):
    real = state_rows.relative_l2, state_rows.mean
    monkeypatch.setattr(state_rows, "relative_l2", lambda *args: real[0](*args) * math.nan)
    monkeypatch.setattr(state_rows, "mean", lambda *args: real[1](*args) * math.nan)
    ((line, passed),) = rows(row)
    assert not passed
    assert "not finite" in line


def in_torch(monkeypatch, name):
    """As where no package can be imported."""
    module, kernels, other_kernels = state_rows.kernels_of(name)
    for kernel in (*kernels, *other_kernels):
        monkeypatch.setattr(
            sys.modules[module], kernel, inspect.unwrap(getattr(sys.modules[module], kernel))
        )
    return module, (*kernels, *other_kernels)


@needs_mixer_functions
def test_a_package_that_cannot_be_imported_fails_its_row(tmp_path, monkeypatch):
    """transformers takes its own torch code then, and a row would compare torch with torch."""
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import of_another_abi\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mamba_ssm", raising=False)
    in_torch(monkeypatch, "scan")
    ((line, passed),) = rows("scan", device="cuda")
    assert not passed
    assert (
        "not run: mamba2_chunk_scan is torch's: mamba_ssm cannot be imported, ModuleNotFoundError"
        in line
    )


@needs_mixer_functions
def test_a_kernel_of_a_package_is_known_by_its_wrapper(monkeypatch):
    model = zoo.build("bamba", torch.float32)
    module, kernels = in_torch(monkeypatch, "bf16 bamba")
    assert len(state_rows.fallbacks(module, kernels)) == len(kernels) > 1
    reference_kernels.install(monkeypatch, model)
    assert state_rows.fallbacks(module, kernels) == []


def test_a_model_may_do_without_what_it_is_not_about():
    assert state_rows.kernels_of("bf16 qwen3_next")[1] == ("torch_chunk_gated_delta_rule",)
    assert set(state_rows.kernels_of("bf16 qwen3_next documents")[1]) > {
        "torch_chunk_gated_delta_rule"
    }


@needs_mixer_functions
def test_the_rows_fail_where_layers_do_not_stream(monkeypatch):
    def runs_whole(call):
        return Verdict(False, "a test wants it")

    monkeypatch.setattr(entry, "can_stream", runs_whole)
    ((line, passed),) = rows("bf16 lfm2")
    assert not passed
    assert "a test wants it" in line
