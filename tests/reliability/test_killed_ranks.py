"""A rank that is killed, and the run that goes on from the last checkpoint, on as many ranks or on
one.

covers: layer/function.py, model/patching.py
"""

from __future__ import annotations

import itertools
import json
import signal

import pytest
import torch

from tests.distributed.ranks import launch
from tests.reliability.killed_worker import COLLECTIVE_TIMEOUT_SECONDS, checkpoint

STEPS, KILLED_AT = 4, 2


def trained(folder, ranks, kill=None):
    case = {"folder": str(folder), "ranks": ranks, "until": STEPS, "kill": kill}
    return launch(
        "tests.reliability.killed_worker",
        json.dumps(case),
        ranks=ranks,
        seconds=COLLECTIVE_TIMEOUT_SECONDS + 300,
    )


def weights(folder):
    saved = torch.load(checkpoint(folder), weights_only=True)
    assert saved["step"] == STEPS
    return saved["model"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    outputs, codes = trained(folder, 1)
    assert codes == [0], outputs
    return weights(folder)


CASES = list(itertools.product(("forward", "backward", "optimizer"), (2, 1)))


@pytest.mark.full
@pytest.mark.parametrize(("phase", "ranks"), CASES)
def test_a_killed_rank_ends_the_other_and_the_run_goes_on(
    phase, ranks, unbroken, tmp_path, record_property
):
    outputs, codes = trained(tmp_path, 2, [1, KILLED_AT, phase])
    assert codes[1] == -signal.SIGKILL, outputs
    # it ends by itself, with an error, and nobody waits for ever
    assert codes[0] not in (0, -signal.SIGKILL), outputs
    # gradients were exchanged: the other rank ends its step
    last_step = KILLED_AT + (phase == "optimizer")
    assert torch.load(checkpoint(tmp_path), weights_only=True)["step"] == last_step
    outputs, codes = trained(tmp_path, ranks)
    assert codes == [0] * ranks, outputs
    actual = weights(tmp_path)
    assert actual.keys() == unbroken.keys()
    for name, expected in unbroken.items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-6, atol=1e-9, msg=name)
    record_property("cases", 1)
