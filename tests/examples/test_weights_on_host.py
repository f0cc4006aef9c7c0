"""The example with weights on the host trains under a limit that its weights exceed."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("peft", reason="peft is not installed")

from tests.emulated import backend
from tests.examples.test_long_context_sft import run_script


@pytest.mark.full
@pytest.mark.skipif(
    backend.why_not() is not None, reason=f"no emulated device: {backend.why_not()}"
)
def test_it_trains_what_does_not_fit():
    result = run_script("weights_on_host.py", "--steps", 4)
    assert result.returncode == 0, result.stderr[-3000:]
    weights, limit = map(
        int, re.search(r"weights: (\d+) MiB; .* may use (\d+) MiB", result.stdout).groups()
    )
    assert weights >= 2 * limit
    assert 'weights="device": out of memory' in result.stdout
    steps = [
        (float(loss), int(peak))
        for loss, peak in re.findall(r"loss ([\d.]+), peak (\d+) MiB", result.stdout)
    ]
    assert len(steps) == 4
    assert min(loss for loss, _ in steps[1:]) < steps[0][0]  # Adam's large steps overshoot once
    assert max(peak for _, peak in steps) <= limit
    assert "weights of 24 layers live on the host" in result.stdout
