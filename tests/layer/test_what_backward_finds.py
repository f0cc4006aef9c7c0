"""What a layer's backward finds otherwise than its forward did, or cannot give a gradient to,
raises.

covers: layer/function.py, layer/gradients.py
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch.nn.utils import parametrize

import streambp
from streambp.errors import BackwardError, UnsupportedModelError
from tests import versions, zoo
from tests.families import build, make_batch
from tests.model.test_contract import CONFIG, check_agree, model_pair
from tests.oracle import gradients, worst_error

pytestmark = pytest.mark.usefixtures("float64_oracle")


@pytest.mark.sees_padding("no layer of a packed row reads the mask")
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("lfm2", "attention_mask"),
        pytest.param("gptj", "position_ids", marks=versions.needs_positions_in_layers),
    ],
)
def test_arguments_changed_between_forward_and_backward_raise(name, argument):
    """As when the next batch is written into the same buffers; lfm2's layers with states read the
    padding mask."""
    ours = streambp.patch(zoo.build(name), CONFIG)
    batch = make_batch("left-padded") | {"position_ids": torch.arange(23).repeat(2, 1)}
    expected = gradients(ours, **batch)[1]
    loss = ours(**batch, use_cache=False).loss
    original = batch[argument].clone()
    batch[argument].copy_(original.flip(-1))
    with pytest.raises(BackwardError, match=f"{argument} .* was changed in place"):
        loss.backward()
    batch[argument].copy_(original)
    assert worst_error(gradients(ours, **batch)[1], expected) == 0


@pytest.mark.parametrize("part_of_name", ["", "layers.0.mlp.down_proj"])
def test_other_weights_for_a_forward_alone_raise(part_of_name):
    """Recomputation would find the model's own."""
    _, ours = model_pair()
    batch = make_batch("plain")
    other_weights = {
        n: (p.detach() * 1.5).requires_grad_()
        for n, p in ours.named_parameters()
        if part_of_name in n
    }
    loss = torch.func.functional_call(ours, other_weights, (), {**batch, "use_cache": False}).loss
    with pytest.raises(BackwardError, match=r"mlp\.down_proj|another tensor in backward"):
        loss.backward()


class Scaled(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(rows, 1) + 0.5)

    def forward(self, weight):
        return weight * self.scale


@pytest.mark.parametrize("cached", [False, True])
def test_parametrized_weights(cached):
    stock = build("qwen3", torch.float64)
    for layer in stock.model.layers:
        for module in (layer.mlp.up_proj, layer.self_attn.k_proj):
            parametrize.register_parametrization(
                module, "weight", Scaled(len(module.weight)).double()
            )
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    with parametrize.cached() if cached else contextlib.nullcontext():
        check_agree(stock, ours, **make_batch("plain"))


def scaled_by_an_attribute(model, monkeypatch, **options):
    """One MLP is multiplied by a tensor of shape [3] that is not registered, whose gradient goes
    through the graph."""
    mlp = model.model.layers[1].mlp
    mlp.scale = torch.ones(3, **options, dtype=torch.float64)
    real = type(mlp).forward

    def scaled(self, x):
        y = real(self, x)
        return y * (self.scale * 2).sum() if hasattr(self, "scale") else y

    monkeypatch.setattr(type(mlp), "forward", scaled)
    return mlp.scale


def with_gradient_of(scale, model, batch):
    scale.grad = None
    by_name = gradients(model, **batch)[1]
    return {**by_name, "scale": scale.grad}


@pytest.mark.parametrize("config", [CONFIG, streambp.StreamConfig(chunk_size=64)])
def test_a_tensor_that_is_no_parameter_gets_its_gradient(config, monkeypatch):
    """Its layer runs whole, under a checkpoint, through which its gradient goes."""
    stock = build("qwen3", torch.float64)
    scale = scaled_by_an_attribute(stock, monkeypatch, requires_grad=True)
    batch = make_batch("plain")
    expected = with_gradient_of(scale, stock, batch)
    ours = streambp.patch(stock, config)
    for _ in range(2):
        assert worst_error(with_gradient_of(scale, ours, batch), expected) <= 1e-10
    layers = streambp.describe(ours).layers
    assert [layer.path for layer in layers] == ["streams", "checkpoints"]
    assert "tensor of shape (3,) that wants a gradient" in layers[1].reason


def test_a_tensor_that_wants_a_gradient_later_raises(monkeypatch):
    """The layer was tried when it wanted none."""
    stock = build("qwen3", torch.float64)
    scale = scaled_by_an_attribute(stock, monkeypatch)
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    check_agree(stock, ours, **make_batch("plain"))
    ours.model.layers[1].mlp.scale.requires_grad_()
    assert not scale.requires_grad
    with pytest.raises(
        UnsupportedModelError, match=r"tensor of shape \(3,\) that wants a gradient"
    ):
        gradients(ours, **make_batch("plain"))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("leaf", ["tensor", "module"])
def test_what_trains_in_a_hook_inside_a_frozen_layer(leaf, lora):
    """Neither the layer's input nor its parameters want a gradient."""
    model = build("qwen3", torch.float64).requires_grad_(False)
    model.lm_head.weight.requires_grad_()
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_(lora)
    steer = torch.nn.Linear(1, 32, bias=False, dtype=torch.float64)
    added = steer.weight[:, 0] if leaf == "tensor" else None
    scale = torch.ones(1, dtype=torch.float64)
    hook = lambda m, args, out: out + (steer(scale) if added is None else added)  # noqa: E731
    model.model.layers[0].mlp.register_forward_hook(hook)
    batch = make_batch("left-padded")

    def trained():
        steer.weight.grad = None
        model(**batch, use_cache=False).loss.backward(retain_graph=True)
        our_gradients = {
            "steer": steer.weight.grad,
            **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        }
        model.zero_grad(set_to_none=True)
        return our_gradients

    expected = trained()
    assert len(expected) == 2 + lora
    streambp.patch(model, CONFIG)
    our_gradients = trained()
    assert worst_error(our_gradients, expected) <= 1e-10
    assert [layer.path for layer in streambp.describe(model).layers] == ["checkpoints", "streams"]


def test_a_parameter_that_wanted_no_gradient_in_forward():
    """As when adapters are switched: unpatched, its graph has the old one."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("qwen3", torch.float64), config, adapter_name="first")
    model.add_adapter("second", config)
    streambp.patch(model, CONFIG)
    loss = model(**make_batch("plain"), use_cache=False).loss
    model.set_adapter("second")
    with pytest.raises(
        BackwardError, match=r"Linear\.weight \[2, 32\] wants a gradient .* before set_adapter"
    ):
        loss.backward()
    model.set_adapter("first")
    loss = model(**make_batch("plain"), use_cache=False).loss
    loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".first." in name)
