"""Runs a check in a process whose Triton kernels are interpreted; they are compiled for a device
otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from streambp.head import triton_fold

needs_triton = pytest.mark.skipif(
    not triton_fold.TRITON_AVAILABLE, reason="triton is not installed"
)

NO_LOOPS = "only 0-dimensional arrays can be converted to Python scalars"  # triton 3.6, with numpy from 2.4 on


def interpreted(checks):
    """Names of modules' functions, called in one process: importing takes longer than most of
    them."""
    calls = "".join(
        f"print('{module}.{check}'); {module}.{check}()\n"
        for module, names in checks.items()
        for check in names
    )
    code = f"import torch; torch.set_num_threads(1)\nimport {', '.join(checks)}\n{calls}"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode and NO_LOOPS in result.stderr:
        pytest.skip("this triton's interpreter cannot run a loop under this numpy")
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]


def hard_rows(rows, columns, generator):
    """Logits [rows, columns] of five kinds: ordinary, far apart, far from 0, some -inf, and one
    entry above all others."""
    z = torch.randn(rows, columns, generator=generator) * 4
    z[1::5] *= 1000
    z[2::5] -= 30000
    z[3::5] = z[3::5].where(torch.rand(z[3::5].shape, generator=generator) < 0.5, -torch.inf)
    z[3::5, -1] = 1.0
    z[4::5, columns // 2] = 20000.0
    return z
