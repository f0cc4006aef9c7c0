"""Opacus' hooks are refused by name, whoever comes first.

covers: admission/third_party.py, admission/stacks.py
"""

from __future__ import annotations

import pytest
from torch import nn

import streambp
from streambp.admission import third_party
from streambp.errors import UnsupportedModelError
from tests.families import build, make_batch
from tests.oracle import gradients

CONFIG = streambp.StreamConfig(chunk_size=5)
SOURCE = """
class GradSampleModule(nn.Module):
    def __init__(self, model):
        super().__init__()
        self._module, self.seen = model, []
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_hook(self.capture_activations_hook)

    def capture_activations_hook(self, module, given, output):
        self.seen.append(given[0].shape)

    def forward(self, *args, **kwargs):
        return self._module(*args, **kwargs)
"""


@pytest.fixture
def grad_sample_module():
    """Opacus' class, in a module of its name; the environment has no opacus."""
    names = {"__name__": "opacus.grad_sample.grad_sample_module", "nn": nn}
    exec(compile(SOURCE, "grad_sample_module.py", "exec"), names)
    return names["GradSampleModule"]


def test_a_model_inside_of_it(grad_sample_module):
    with pytest.raises(
        UnsupportedModelError, match=r"GradSampleModule has hooks of opacus.*without\s+streambp"
    ):
        streambp.patch(grad_sample_module(build("llama")), CONFIG)


@pytest.mark.parametrize("first", ["patch", "opacus", "a step"])
def test_its_hooks_inside_of_a_layer(first, grad_sample_module):
    model = build("llama")
    if first == "opacus":
        grad_sample_module(model)
    streambp.patch(model, CONFIG)
    if first == "a step":
        gradients(model, **make_batch("plain"))
    if first != "opacus":
        grad_sample_module(model)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="LlamaDecoderLayer has hooks of opacus"):
            gradients(model, **make_batch("plain"))


def test_mutant_its_hooks_are_like_others(monkeypatch, grad_sample_module):
    monkeypatch.setattr(third_party, "OPACUS", "another")
    with pytest.raises(pytest.fail.Exception):
        test_its_hooks_inside_of_a_layer("patch", grad_sample_module)
