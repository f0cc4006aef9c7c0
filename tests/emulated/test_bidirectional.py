"""Layers whose attention reads ahead, on an emulated accelerator: patched on the CPU and moved.

covers: sharded/bidirectional.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from tests import device as tested
from tests.oracle import relative_l2
from tests.seeds import seed_torch
from tests.sharded.test_bidirectional import CHUNK, LENGTH, MAKE, in_halves, padding

__all__ = ["in_halves"]  # a fixture

pytestmark = pytest.mark.emulated


def gradients(model, batch, weights):
    device = next(model.parameters()).device
    model.zero_grad(set_to_none=True)
    states = model(**{name: x.to(device) for name, x in batch.items()}).last_hidden_state
    (states * weights.to(device)).sum().backward()
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "settings",
    [{}, {"offload": "cpu", "saves": ("attn_out", "kv")}, {"offload": "auto"}, {"weights": "cpu"}],
    ids=str,
)
@pytest.mark.parametrize("name", ["modernbert", "bert"])
def test_gradients_are_the_cpus(name, settings, in_halves):
    seed_torch(0)
    stock = MAKE[name]().train()
    mask = padding("right")
    batch = {"input_ids": torch.randint(3, 60, (3, LENGTH)), "attention_mask": mask}
    weights = torch.randn(3, LENGTH, 32) * mask[..., None]
    expected = gradients(stock, batch, weights)
    config = streambp.StreamConfig(**{"chunk_size": CHUNK, **settings})
    ours = streambp.patch(copy.deepcopy(stock), config).to(tested.DEVICE)
    for _ in range(3):
        found = gradients(ours, batch, weights)
        assert found.keys() == expected.keys()
        assert relative_l2(found, expected) <= 1e-5
    assert in_halves
