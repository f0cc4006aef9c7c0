"""Layers that cannot be cut run whole, under torch's checkpoint.

covers: admission/layer_checkpoint.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import parametrize

import streambp
from streambp.errors import BackwardError
from tests.families import build, make_batch, mix_neighbours
from tests.layer.test_what_backward_finds import Scaled
from tests.model.test_contract import check_agree
from tests.oracle import gradients, worst_error


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_checkpointing_switched_on_between_forward_and_backward(
    family, float64_oracle, monkeypatch
):
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
        assert (
            worst_error(
                {name: p.grad for name, p in ours.named_parameters() if p.grad is not None},
                expected,
            )
            <= 1e-10
        )
        assert all(layer.gradient_checkpointing for layer in ours.model.layers)
        ours.zero_grad(set_to_none=True)
    assert {layer.path for layer in streambp.describe(ours).layers} == {"checkpoints"}


def whole_pair(monkeypatch, change=lambda model: None):
    stock = build("qwen3", torch.float64)
    change(stock)
    mix_neighbours(monkeypatch, stock)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    return stock, ours


def other_parameters(model, batch):
    new_parameters = {
        name: (p.detach() * 1.5).requires_grad_()
        for name, p in model.named_parameters()
        if "mlp.down_proj" in name
    }
    return torch.func.functional_call(model, new_parameters, (), {**batch, "use_cache": False}).loss


def written_parameters(model, batch):
    loss = model(**batch, use_cache=False).loss
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    return loss


def other_mode(model, batch):
    loss = model(**batch, use_cache=False).loss
    model.eval()
    return loss


def other_positions(model, batch):
    batch["position_ids"] = torch.arange(23).repeat(2, 1)
    loss = model(**batch, use_cache=False).loss
    batch["position_ids"].add_(3)
    return loss


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (other_parameters, r"mlp\.down_proj\.weight is another tensor"),
        (written_parameters, r"mlp\.down_proj\.weight was changed in place"),
        (other_mode, "in train mode in forward and is in the other mode"),
        (other_positions, r"position_ids \[2, 23\], .* was changed in place"),
    ],
)
def test_what_backward_finds_otherwise_raises(forward, message, float64_oracle, monkeypatch):
    """torch's checkpoint would recompute it without a word."""
    stock, ours = whole_pair(monkeypatch)
    with pytest.raises(BackwardError, match=message):
        forward(ours, make_batch("plain")).backward()
    ours.train().load_state_dict(stock.state_dict())
    check_agree(stock, ours, **make_batch("plain"))


def test_parametrized_weights_under_cached(float64_oracle, monkeypatch):
    """The second forward takes them out of a cache, its recomputation computes them."""

    def parametrized(model):
        for layer in model.model.layers:
            up = layer.mlp.up_proj
            parametrize.register_parametrization(up, "weight", Scaled(len(up.weight)).double())

    runs = []
    for model in whole_pair(monkeypatch, parametrized):
        with parametrize.cached():
            loss = sum(
                model(**make_batch(mode), use_cache=False).loss for mode in ("plain", "left-padded")
            )
            loss.backward()
        runs.append({name: p.grad for name, p in model.named_parameters()})
    assert worst_error(runs[1], runs[0]) <= 1e-10
