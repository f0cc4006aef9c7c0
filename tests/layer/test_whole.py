"""Layers that cannot be cut run whole, under torch's checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from tests import zoo
from tests.families import make_batch
from tests.oracle import gradients, worst_error


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_checkpointing_switched_on_between_forward_and_backward(family, float64_oracle):
    """As TRL does, which switches it off for its forward alone."""
    stock = zoo.build(family)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    batch = make_batch("left-padded")
    _, expected = gradients(stock, **batch)
    for enabled_before in (False, True):
        if enabled_before:
            ours.gradient_checkpointing_enable()
        loss = ours(**batch, use_cache=False).loss
        ours.gradient_checkpointing_enable()
        loss.backward()
        assert worst_error({name: p.grad for name, p in ours.named_parameters() if p.grad is not None}, expected) <= 1e-10
        assert all(layer.gradient_checkpointing for layer in ours.model.layers)
        ours.zero_grad(set_to_none=True)
    assert "checkpoints" in {layer.path for layer in streambp.describe(ours).layers}
    assert torch.is_grad_enabled()
