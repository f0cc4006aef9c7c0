"""The TRL examples run offline on a CPU and learn; long_context_sft has tests of its own."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from tests.examples.test_long_context_sft import run_here, run_script

LEARNT = {
    "sft": ("mean_token_accuracy", 0.9),
    "dpo": ("rewards/accuracies", 0.9),
    "grpo": ("reward", 0.8),
    "ppo": ("reward", 0.8),
}


def last(output, key):
    return float(re.search(rf"^{key}: [-\d.]+ -> ([-\d.]+)$", output, re.MULTILINE).group(1))


def test_short_run(tmp_path):
    result = run_here("--steps", 2, "--chunk-size", 4, "--output", tmp_path, name="dpo.py")
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "dpo.png").stat().st_size > 10_000


@pytest.mark.full
@pytest.mark.parametrize("name", LEARNT)
def test_default_run_learns(name, tmp_path):
    result = run_script(f"{name}.py", "--output", tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    key, bar = LEARNT[name]
    assert last(result.stdout, key) >= bar
    assert (tmp_path / f"{name}.png").exists()
