"""Trials leave quantised weights in their mode: on a CPU, a 4-bit Linear of bitsandbytes repacks
its weight for good in eval mode. tests/distributed/test_engines.py has a run with the Linear itself.

covers: admission/rehearsal.py, prefixes/admission.py
"""

from __future__ import annotations

import pytest
from torch import nn

from streambp.admission import rehearsal
from streambp.prefixes import admission as prefix_admission


def gathered():
    """A layer with a 4-bit Linear as FSDP2 gathers it: bytes of a floating dtype, and the state on
    the module alone."""
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layer[1].quant_state = object()
    return layer


def test_quantised_weights_keep_their_mode():
    layer = gathered()
    assert rehearsal._plain_modules(layer) == [layer, layer[0]]
    with prefix_admission._eval_mode(layer):
        assert not layer[0].training
        assert layer[1].training
    assert layer[0].training


@pytest.mark.parametrize("module", [rehearsal, prefix_admission])
def test_mutant_that_looks_at_parameters_alone(module, monkeypatch):
    monkeypatch.setattr(module, "QUANT_STATE", "no_such_attribute")
    with pytest.raises(AssertionError):
        test_quantised_weights_keep_their_mode()
