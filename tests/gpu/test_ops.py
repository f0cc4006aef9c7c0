"""The rows of kernels run without a GPU, and each fails where its kernel is wrong.

covers: accumulate.py, attention/kernels.py, attention/attend.py
"""

from __future__ import annotations

import argparse
import re

import pytest
import torch

from streambp import accumulate
from streambp.attention import attend, kernels
from streambp.attention.kernels import CpuFlashKernel
from streambp.attention.spans import BlockKind
from tests.gpu import op_rows

SIZE = "64"


def row(name):
    arguments = argparse.Namespace(device="cpu", tiny=True, row=[name], minutes=8.0)
    (_, (line, passed)) = op_rows.report(arguments)
    return line, passed


@pytest.mark.parametrize(
    "name",
    [
        *(f"{spans} auto {SIZE}" for spans in op_rows.SPAN_CASES), "plain math 192/128",
        *op_rows.SUMS,
        *(pytest.param(f"{spans} {attention} {size}", marks=pytest.mark.full)
          for spans in op_rows.SPAN_CASES for attention in ("auto",
              "math") for size in op_rows.SIZES),
    ],
)  # fmt: skip
def test_the_rows_run_without_a_gpu(name):
    line, passed = row(name)
    assert passed, line
    if "auto" in name:
        assert re.search(r"cpu flash full \d\.\d\d, lse|math full", line)


def no_numbers_in_dk(real, *args):
    dq, dk, dv = real(*args)
    return dq, dk * torch.nan, dv


def dv_of_the_square_alone(real, self, *args):
    dq, dk, dv = real(self, *args)
    return dq, dk, dv if args[-1].block.kind is BlockKind.CAUSAL else torch.zeros_like(dv)


def lse_a_little_off(real, *args):
    o, lse = real(*args)
    return o, lse + 0.004


def half_of_the_keys(real, self, q, k, v, task):
    middle = k.shape[2] // 2
    if task.block.kind is not BlockKind.FULL or not middle:
        return real(self, q, k, v, task)
    return real(self, q, k[:, :, :middle], v[:, :, :middle], task)


def band_without_its_edge(real, task, device):
    tile = real(task, device)
    return torch.ones_like(tile) if task.block.kind is BlockKind.BAND else tile


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "mutant", "message"),
    [
        (
            "plain auto",
            CpuFlashKernel,
            "backward",
            no_numbers_in_dk,
            "dk of cpu flash on causal blocks is nan x",
        ),
        (
            "plain auto",
            CpuFlashKernel,
            "backward",
            dv_of_the_square_alone,
            "dv of cpu flash on full blocks",
        ),
        (
            "packed auto",
            CpuFlashKernel,
            "forward",
            lse_a_little_off,
            "lse of cpu flash on causal blocks is",
        ),
        ("low auto", CpuFlashKernel, "forward", half_of_the_keys, "o of cpu flash on full blocks"),
        ("window math", kernels, "_tile", band_without_its_edge, "o of math on band blocks"),
    ],
)
def test_a_row_fails_where_its_kernel_is_wrong(
    name, owner, attribute, mutant, message, monkeypatch
):
    real = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, lambda *args: mutant(real, *args))
    monkeypatch.setattr(op_rows, "DRAW_COUNTS", {})  # blocks are judged in the first draw
    line, passed = row(f"{name} {SIZE}")
    assert not passed, line
    assert message in line


def test_a_row_fails_where_its_kernel_did_not_run(monkeypatch):
    monkeypatch.setattr(CpuFlashKernel, "takes", lambda self, block: False)
    line, passed = row(f"plain auto {SIZE}")
    assert not passed
    assert "cpu flash did not run" in line


def test_a_row_fails_where_blocks_are_merged_wrongly(monkeypatch):
    """Each kernel is right then; the whole is not."""

    def first_block_alone(o, lse, part_o, part_lse, out, *_):
        out.copy_(o)

    monkeypatch.setattr(attend, "merge", first_block_alone)
    line, passed = row(f"plain auto {SIZE}")
    assert not passed
    assert "x as far off as one call" in line
    assert "o of cpu flash" not in line


def test_a_kernel_that_refuses_is_told_with_its_reason():
    line, passed = op_rows.attention_row(
        "plain", "cudnn", "192/128", argparse.Namespace(device="cpu", tiny=True)
    )
    assert passed
    assert "refused: attention='cudnn' cannot attend here" in line


def test_a_sum_that_was_rounded_fails(monkeypatch):
    def rounded(total, left, right):
        product = (left @ right).float()
        return product if total is None else total + product

    monkeypatch.setattr(op_rows, "add_product", rounded)
    line, passed = row("sum layer")
    assert not passed
    assert "FAILED: error" in line
    monkeypatch.setattr(
        op_rows, "add_product", lambda *args: accumulate.add_product(*args).bfloat16()
    )
    assert "the sum is bfloat16" in row("sum layer")[0]
