"""Expert blocks that DeepSpeed marked as ZeRO-3 leaves before the layer around them was patched.

covers: distributed/engines.py
"""

from __future__ import annotations

import sys
import types

import pytest
import torch

import streambp
from tests import zoo
from tests.families import make_batch


def reducing(model):
    """Hooks as DeepSpeed hangs them on its leaves, on every expert block; what they find when they
    run."""
    reductions = []

    def reduce(module, grad_input, grad_output):
        reductions.append(
            (
                module,
                {
                    name: None if p.grad is None else p.grad.clone()
                    for name, p in module.named_parameters()
                },
            )
        )

    reduce.__module__ = "deepspeed.runtime.zero.stage3"
    for layer in model.model.layers:
        layer.mlp._z3_leaf = True
        layer.mlp.register_full_backward_hook(reduce)
    return reductions


@pytest.mark.parametrize("dtype", [torch.float32])
def test_an_inner_leaf_is_reduced_once_with_all_its_gradients(dtype):
    model = zoo.build("qwen3_moe", dtype)
    reductions = reducing(model)
    streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    for step in range(2):
        model.zero_grad()
        loss = model(**make_batch("plain", seed=step), use_cache=False).loss
        assert not reductions
        loss.backward()
        assert [id(module) for module, _ in reductions] == [
            id(layer.mlp) for layer in reversed(model.model.layers)
        ]
        for module, gradients_of_leaf in reductions:
            for name, parameter in module.named_parameters():
                assert torch.equal(gradients_of_leaf[name], parameter.grad), name
        reductions.clear()


def test_without_grad_nothing_is_reduced():
    model = zoo.build("qwen3_moe", torch.float32)
    reductions = reducing(model)
    streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    with torch.no_grad():
        model(**make_batch("plain"), use_cache=False)
    assert not reductions


def test_layers_get_their_hook_once_deepspeed_was_imported(monkeypatch):
    """It costs every call of a layer, and does nothing before. DeepSpeed's own, which are there by
    then, come behind."""
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    model = zoo.build("qwen3", torch.float32)
    streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    batch = make_batch("plain", seed=0)

    def hooks():
        return [
            [hook.__name__ for hook in layer._forward_pre_hooks.values()]
            for layer in model.model.layers
        ]

    model(**batch, use_cache=False).loss.backward()
    assert all(layer._z3_leaf for layer in model.model.layers)
    assert not any(hooks())
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))

    def fetch(module, args):
        """As DeepSpeed's."""

    for layer in model.model.layers:
        layer.register_forward_pre_hook(fetch)
    for _ in range(2):
        with torch.no_grad():
            model(**batch)
        assert hooks() == [["differentiable_input", "fetch"]] * len(model.model.layers)
    streambp.unpatch(model)
    assert hooks() == [["fetch"]] * len(model.model.layers)
    assert not any(hasattr(layer, "_z3_leaf") for layer in model.model.layers)
    streambp.patch(model)  # it is there now
    assert hooks() == [["differentiable_input", "fetch"]] * len(model.model.layers)
