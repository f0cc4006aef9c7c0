"""Code inside a layer that writes in place to a part of what a Linear gives.

covers: layer/products.py, layer/adapted_linear.py, tensors.py
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

import streambp
from streambp.layer import adapted_linear, products
from tests import zoo
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error

CONFIG = streambp.StreamConfig(chunk_size=7, rows="as_given")


def writes(module, args, out):
    out[..., :4].tanh_()  # backward reads what it writes, so that the product is computed


class Writing(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)
        writes(self, (x,), out)
        return out


def with_bias():
    model = zoo.build("gptj")
    for layer in model.transformer.h:
        layer.mlp = Writing(layer.mlp)
    return model


def with_adapters():
    model = build("llama", torch.float64)
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(writes)
        layer.mlp.register_forward_hook(writes)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, lora).double()


@pytest.mark.parametrize("make", [with_bias, with_adapters])
def test_the_layer_streams(make, float64_oracle):
    stock = make()
    ours = make()
    ours.load_state_dict(stock.state_dict())
    streambp.patch(ours, CONFIG)
    _, expected = gradients(stock, **make_batch("plain"))
    _, our_gradients = gradients(ours, **make_batch("plain"))
    assert our_gradients.keys() == expected.keys()
    assert worst_error(our_gradients, expected) <= 1e-10
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


def test_mutant_views_from_functions(monkeypatch):
    """torch refuses to write to a view that a Function has made. From torch 2.15 on a Linear with a
    bias returns no view."""
    monkeypatch.setattr(products, "strip_view", lambda result: result)
    monkeypatch.setattr(adapted_linear, "strip_view", lambda result, shape: result.view(shape))
    weight, bias = torch.randn(5, 4), torch.randn(5)
    if torch.nn.functional.linear(torch.randn(2, 3, 4), weight, bias)._is_view():
        model = streambp.patch(with_bias(), CONFIG)
        with pytest.raises(RuntimeError, match="is being modified inplace"):
            gradients(model, **make_batch("plain"))
    model = streambp.patch(with_adapters(), CONFIG)
    gradients(model, **make_batch("plain"))
    assert {layer.path for layer in streambp.describe(model).layers} == {"checkpoints"}
