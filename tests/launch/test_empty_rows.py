"""`streambp launch` in front of a program whose data set has rows without a label.

covers: launch/__main__.py, launch/process.py, model/empty_batches.py
"""

from __future__ import annotations

import math
import sys

import pytest
import torch

from streambp.cli import main
from tests.launch.test_programs import PROGRAM, assert_same_training, this_copy, without  # noqa: F401  # a fixture

KIND = "empty row"


def until_the_empty_step(results):
    """Return the results with the losses before the step without labels: Trainer subtracts what it
    has logged, so NaN of the unpatched program stays in all later ones."""
    return {**results, "losses": results["losses"][:1]}


@pytest.mark.full
def test_weights_are_those_of_the_program_without_launch(tmp_path, capfd):
    output = tmp_path / "out"
    command = ["launch", "--chunk-size", "5", "--", sys.executable, PROGRAM, KIND, str(output)]
    assert main(command) == 0
    report = capfd.readouterr().err
    assert "streams: 2 x Qwen3DecoderLayer" in report
    assert "A batch has no labelled token" in report
    results = torch.load(output)
    assert all(weight.isfinite().all() for weight in results["weights"].values())
    assert results["losses"][1] == 0.0
    assert math.isfinite(results["losses"][2])
    expected = without(KIND, tmp_path / "plain")
    assert [math.isnan(loss) for loss in expected["losses"]] == [False, True, True]
    results, expected = until_the_empty_step(results), until_the_empty_step(expected)
    assert_same_training(results, expected)
    spoiled = {name: weight + math.nan for name, weight in results["weights"].items()}
    with pytest.raises(AssertionError):
        assert_same_training({**results, "weights": spoiled}, expected)
