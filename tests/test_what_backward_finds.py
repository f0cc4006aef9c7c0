"""What a layer's backward finds otherwise than its forward did, or cannot give a gradient to, raises."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch.nn.utils import parametrize

import streambp
from streambp.errors import BackwardError, UnsupportedModelError
from tests import zoo
from tests.families import build, make_batch
from tests.oracle import gradients, worst_error
from tests.test_contract import CONFIG, check_agree, model_pair

pytestmark = pytest.mark.usefixtures("float64_oracle")


@pytest.mark.parametrize(("name", "changed"), [("lfm2", "attention_mask"), ("gptj", "position_ids")])
def test_arguments_changed_between_forward_and_backward_raise(name, changed):
    """As when the next batch is written into the same buffers; lfm2's layers with states read the padding mask."""
    ours = streambp.patch(zoo.build(name), CONFIG)
    batch = make_batch("left-padded") | {"position_ids": torch.arange(23).repeat(2, 1)}
    expected = gradients(ours, **batch)[1]
    loss = ours(**batch, use_cache=False).loss
    before = batch[changed].clone()
    batch[changed].copy_(before.flip(-1))
    with pytest.raises(BackwardError, match=f"{changed} .* was changed in place"):
        loss.backward()
    batch[changed].copy_(before)
    assert worst_error(gradients(ours, **batch)[1], expected) == 0


@pytest.mark.parametrize("named", ["", "layers.0.mlp.down_proj"])
def test_other_weights_for_a_forward_alone_raise(named):
    """Recomputation would find the model's own."""
    _, ours = model_pair()
    batch = make_batch("plain")
    others = {n: (p.detach() * 1.5).requires_grad_() for n, p in ours.named_parameters() if named in n}
    loss = torch.func.functional_call(ours, others, (), {**batch, "use_cache": False}).loss
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
            parametrize.register_parametrization(module, "weight", Scaled(len(module.weight)).double())
    ours = streambp.patch(copy.deepcopy(stock), CONFIG)
    with parametrize.cached() if cached else contextlib.nullcontext():
        check_agree(stock, ours, **make_batch("plain"))


@pytest.mark.parametrize("config", [CONFIG, streambp.StreamConfig(chunk_size=64)])
def test_a_tensor_that_is_no_parameter_is_not_left_without_its_gradient(config, monkeypatch):
    """A plain attribute, say, whose gradient goes through the graph unpatched."""
    _, ours = model_pair(config=config)
    mlp = ours.model.layers[1].mlp
    mlp.scale = torch.ones(3, requires_grad=True)
    real = type(mlp).forward
    scaled = lambda self, x: real(self, x) * (self.scale * 2).sum() if hasattr(self, "scale") else real(self, x)  # noqa: E731
    monkeypatch.setattr(type(mlp), "forward", scaled)
    batch = make_batch("plain")
    with pytest.raises(UnsupportedModelError, match=r"tensor of shape \(3,\) that wants a gradient"):
        gradients(ours, **batch)
    mlp.scale.requires_grad_(False)
    check_agree(copy.deepcopy(streambp.unpatch(copy.deepcopy(ours))), ours, **batch)


def test_a_parameter_that_wanted_no_gradient_in_forward():
    """As when adapters are switched: unpatched, its graph has the old one."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("qwen3", torch.float64), config, adapter_name="first")
    model.add_adapter("second", config)
    streambp.patch(model, CONFIG)
    loss = model(**make_batch("plain"), use_cache=False).loss
    model.set_adapter("second")
    with pytest.raises(BackwardError, match=r"Linear\.weight \[2, 32\] wants a gradient .* before set_adapter"):
        loss.backward()
    model.set_adapter("first")
    loss = model(**make_batch("plain"), use_cache=False).loss
    loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".first." in name)
