"""Layers with states on a CUDA device: `python -m pytest -m gpu tests/gpu/test_states.py`.

covers: recurrent/documents.py, recurrent/scans.py
"""

from __future__ import annotations

import argparse

import pytest
import torch

from streambp.admission import entry
from streambp.admission.probe import Verdict
from streambp.recurrent import documents, scans
from tests import zoo
from tests.gpu import state_rows
from tests.versions import needs_mixer_functions

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def rows(name, device="cpu", tiny=True):
    _, *found = state_rows.report(argparse.Namespace(device=device, tiny=tiny, row=[name], minutes=8.0))
    return found


@pytest.mark.gpu
@needs_gpu
@needs_mixer_functions
@pytest.mark.parametrize("name", state_rows.ROWS)
def test_rows(name):
    if lacking := state_rows.absent(name):
        pytest.skip(f"needs {' and '.join(lacking)}")
    ((line, passed),) = rows(name, "cuda", tiny=False)
    assert passed, line


@needs_mixer_functions
@pytest.mark.parametrize(
    "name",
    [*state_rows.KERNELS, "bf16 lfm2 documents", "bf16 bamba", state_rows.FUSED],
)
def test_the_rows_run_without_a_gpu(name):
    if name in state_rows.KERNELS:
        zoo.tiny_config(state_rows.KERNELS[name].modeling)  # skips where this transformers does not have it
    ((line, passed),) = rows(name)
    assert passed, line
    assert line.startswith(f"{name} ")


def one_state_without_gradient(cls, value, *readers):
    return value


def ids_of_the_whole_row(real, told, chunk, *args, **kwargs):
    return real(*args, **kwargs)


def no_start_state(real, told, chunk, *args, **kwargs):
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


@needs_mixer_functions
def test_the_rows_fail_where_layers_do_not_stream(monkeypatch):
    def runs_whole(call):
        return Verdict(False, "a test wants it")

    monkeypatch.setattr(entry, "can_stream", runs_whole)
    ((line, passed),) = rows("bf16 lfm2")
    assert not passed
    assert "a test wants it" in line
