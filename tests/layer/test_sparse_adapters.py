"""Adapters whose weights are sparse tensors, which have no storage for the trace of unread products
to label.

covers: layer/recompute.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from tests.families import build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, gradients, worst_error

peft = pytest.importorskip("peft", reason="adapters need peft")

ADAPTERS = {
    "SHiRA": ("ShiraConfig", {"r": 4}),
    "FRoD": ("FrodConfig", {"progressbar": False}),
}


def adapted(name):
    config, settings = ADAPTERS[name]
    if not hasattr(peft, config):
        pytest.skip(f"this version of peft has no {config}")
    targets = ["q_proj", "k_proj", "down_proj"]
    model = build("qwen3", torch.float64)
    return peft.get_peft_model(
        model, getattr(peft, config)(target_modules=targets, init_weights=False, **settings)
    )


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("name", ADAPTERS)
def test_gradients_are_exact(name, wrapped, float64_oracle):
    stock = adapted(name)
    expected = gradients(stock, **make_batch("plain"))[1]
    assert expected
    ours = copy.deepcopy(stock)
    streambp.patch(ours if wrapped else ours.base_model.model, streambp.StreamConfig(chunk_size=5))
    our_gradients = gradients(ours, **make_batch("plain"))[1]
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
