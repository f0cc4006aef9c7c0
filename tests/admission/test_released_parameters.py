"""A trial's snapshot of parameters whose values ZeRO-3 frees and gathers meanwhile.

covers: admission/values.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from streambp.admission import values
from streambp.admission.generators import restore_module_state

FULL = torch.ones(3, 4)


class Gathered(nn.Module):
    """A module whose weight has the mark of ZeRO-3, and values between `gather` and `release`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.weight.ds_id, self.weight.ds_shape = 0, FULL.shape

    def gather(self):
        self.weight.data = FULL.clone()

    def release(self):
        self.weight.data = torch.empty(0)


def check_gathered_inside():
    """A gather that began before the trial ends inside it."""
    module = Gathered()
    with restore_module_state(module) as restored:
        module.gather()
        restored.end_run()
        restored.rewind()
        assert torch.equal(module.weight, FULL)
        assert not restored.values_set_again()
    assert torch.equal(module.weight, FULL)


def check_released_inside():
    """A release inside leaves nothing of the parameter on the device."""
    module = Gathered()
    module.gather()
    with restore_module_state(module) as restored:
        module.release()
        restored.end_run()
        restored.rewind()
        assert module.weight.numel() == 0
    assert module.weight.numel() == 0


CHECKS = (check_gathered_inside, check_released_inside)


@pytest.mark.parametrize("check", CHECKS)
def test_an_engines_gathers_are_left_alone(check):
    check()


@pytest.mark.parametrize("check", CHECKS)
def test_mutant_restores_what_was_there(check, monkeypatch):
    monkeypatch.setattr(values, "_is_released", lambda holder: False)
    with pytest.raises(AssertionError):
        check()


def test_what_a_module_writes_to_a_gathered_weight_is_restored():
    module = Gathered()
    module.gather()
    with restore_module_state(module), torch.no_grad():
        module.weight.mul_(2.0)
    assert torch.equal(module.weight, FULL)
