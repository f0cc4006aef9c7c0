"""The rows that come first on a GPU run without one, and fail where they should.

covers: layer/oom.py, layer/recompute.py
"""

from __future__ import annotations

import argparse
import contextlib

import pytest

from streambp.attention import attend
from streambp.device import RandomState
from streambp.model import unpatched
from tests.gpu import exact_rows


def row(name):
    rows = list(
        exact_rows.report(argparse.Namespace(tiny=True, device="cpu", row=[name], minutes=8.0))
    )
    assert len(rows) == 1
    return rows[0]


NAMES = [
    *(f"float64 {family}" for family in exact_rows.FAMILIES),
    "default short", "default long", "default short full", "default long full", "autocast", "stream", "dropout",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _as_unpatched(monkeypatch):
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", 0.25)


@pytest.mark.sees_padding("a packed row never runs as unpatched")
@pytest.mark.fast("float64 qwen3", "default short", "default long full", "dropout")
@pytest.mark.parametrize("name", NAMES)
def test_rows_run_without_a_gpu(name):
    line, passed = row(name)
    assert passed, line


def test_float64_rows_see_a_millionth_of_dv(monkeypatch):
    real = attend.PrefixAttention.backward

    def backward(ctx, grad):
        grads = list(real(ctx, grad))
        if ctx.layout.length > 20:  # longer than what layers are tried with
            grads[2] = grads[2] * (1 + 1e-6)
        return tuple(grads)

    monkeypatch.setattr(attend.PrefixAttention, "backward", staticmethod(backward))
    line, passed = row("float64 qwen3")
    assert not passed
    assert "e-0" in line


def test_a_row_sees_masks_that_are_not_drawn_again(monkeypatch):
    monkeypatch.setattr(RandomState, "replay", lambda self: contextlib.nullcontext())
    assert not row("dropout")[1]


def test_a_row_sees_that_nobody_lets_go_of_saves(monkeypatch):
    monkeypatch.setattr("streambp.layer.call.run_with_retry", lambda compute, **_: compute(False))
    line, passed = row("default long full")
    assert not passed
    assert "DeviceMemoryError" in line
