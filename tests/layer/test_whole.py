"""Layers that cannot be cut run whole, under torch's checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from tests.families import build, make_batch, mix_neighbours
from tests.oracle import gradients, worst_error


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_checkpointing_switched_on_between_forward_and_backward(family, float64_oracle, monkeypatch):
    """As TRL does, which switches it off for its forward alone."""
    stock = build(family, torch.float64)
    mix_neighbours(monkeypatch, stock)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    batch = make_batch("plain")
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
    assert {layer.path for layer in streambp.describe(ours).layers} == {"checkpoints"}
