"""The rows of bases in few bits run without a GPU, or say what they lack.

covers: offload/mxfp4.py, model/few_bits.py
"""

from __future__ import annotations

import argparse

import pytest

from streambp.offload import mxfp4
from tests.gpu import few_bits_rows

pytest.importorskip("peft", reason="adapters need peft")
FOR_A_GPU = ("int4", "NVFP4", "MXFP4")


def row(name):
    args = argparse.Namespace(tiny=True, device="cpu", row=[name], minutes=8.0)
    rows = list(few_bits_rows.report(args))
    assert len(rows) == 1
    return rows[0]


@pytest.mark.parametrize("name", FOR_A_GPU)
def test_rows_for_a_gpu_are_skipped_by_name(name):
    line, passed = row(name)
    assert passed
    assert line.startswith(f"{name} ")
    config = few_bits_rows.TORCHAO[name][1]
    assert line.endswith(f"skipped: {config} needs a CUDA device")


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "name", [name for name in few_bits_rows.NAMES if name not in FOR_A_GPU][::-1]
)
def test_rows_run_without_a_gpu(name):
    line, passed = row(name)
    assert passed, line
    if "skipped: torchao: No module" in line:
        pytest.skip("torchao is not installed")
    assert "weights: " in line, line
    assert "skipped" not in line


def test_a_row_sees_another_decoding(monkeypatch):
    monkeypatch.setattr(mxfp4, "EXPONENT_BIAS", 126)
    line, passed = row(few_bits_rows.EXPERTS_ROW)
    assert not passed
    assert "is not as transformers decodes it" in line
