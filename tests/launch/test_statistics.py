"""`streambp launch` in front of a program that takes statistics over all logits of padded batches.

covers: launch/settings.py, prefixes/deferred_rows.py
"""

from __future__ import annotations

import sys

import pytest
import torch

from streambp.cli import main
from tests.launch import programs
from tests.launch.test_programs import (
    LOSSES,
    PROGRAM,
    assert_same_training,
    this_copy,  # noqa: F401  # a fixture
    without,
)

KIND = "statistics"


@pytest.mark.full
def test_statistics_are_those_of_the_program_without_launch(tmp_path, capfd):
    output = tmp_path / "out"
    command = ["launch", "--chunk-size", "5", "--at", "train", "--"]
    assert main([*command, sys.executable, PROGRAM, KIND, str(output)]) == 0
    report = capfd.readouterr().err
    assert "streams: 2 x Qwen3DecoderLayer" in report
    assert "costs memory" not in report
    results, expected = torch.load(output), without(KIND, tmp_path / "plain")
    assert_same_training(results, expected)
    for name in ("squares 0", "evaluated logsumexp"):
        with pytest.raises(AssertionError):
            assert_same_training({**results, name: results[name] + 2 * LOSSES}, expected)


def test_padding_is_in_the_statistics():
    """Without it they would be other numbers."""
    batch = programs.padded_rows(0)
    with torch.no_grad():
        logits = programs.model_of()(**batch).logits
    values = programs.statistics_of(logits)
    statistics = programs.statistics_of(logits, batch["attention_mask"])
    assert all(abs(values[name] - statistics[name]) > 100 * LOSSES for name in values)
