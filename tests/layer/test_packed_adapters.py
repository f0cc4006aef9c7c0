"""Adapters of Linears with 4-bit weights as one operation: the base is decoded as its own forward
does it.

covers: layer/adapters.py, offload/decoded_weights.py
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import streambp
from streambp.layer import adapted_linear as operation
from streambp.offload import decoded_weights
from tests.families import build, make_batch
from tests.oracle import gradients, relative_l2
from tests.seeds import seed_torch

peft = pytest.importorskip("peft", reason="adapters need peft")
bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")
LINEARS = ("gate_proj", "up_proj", "down_proj")


def quantised(dtype, as_loaded):
    """Adapters on MLPs in NF4. as_loaded: peft takes its class for them, as for a model that was
    loaded in 4 bits."""
    model = build("qwen3", hidden_size=64, intermediate_size=128).requires_grad_(False).to(dtype)
    for layer in model.model.layers:
        for name in LINEARS:
            old = getattr(layer.mlp, name)
            new = bitsandbytes.nn.Linear4bit(
                old.in_features, old.out_features, False, dtype, quant_type="nf4"
            )
            new.weight = bitsandbytes.nn.Params4bit(
                old.weight.detach().clone(), requires_grad=False, quant_type="nf4"
            )
            setattr(layer.mlp, name, new.to("cpu"))  # where it is quantised
    model.is_loaded_in_4bit = as_loaded
    seed_torch(4)
    config = peft.LoraConfig(r=4, target_modules=list(LINEARS), init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config).train()


def step(model, **settings):
    """The second step's gradients and decodings, and how often the operation ran in it."""
    config = streambp.StreamConfig(**{"chunk_size": 5, "unpatched_runs": False, **settings})
    ours = streambp.patch(copy.deepcopy(model), config)
    gradients(ours, **make_batch("plain"))
    with pytest.MonkeyPatch.context() as patch:
        runs, decodings = [], []
        forward, decode = operation._forward, decoded_weights._decode_weight
        patch.setattr(operation, "_forward", lambda *args: (runs.append(1), forward(*args))[1])
        patch.setattr(
            decoded_weights,
            "_decode_weight",
            lambda module: (decodings.append(1), decode(module))[1],
        )
        loss_and_gradients = gradients(ours, **make_batch("plain"))
    return *loss_and_gradients, len(runs), len(decodings)


@pytest.mark.parametrize("as_loaded", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_pefts(dtype, as_loaded):
    model = quantised(dtype, as_loaded)
    kind = type(model.base_model.model.model.layers[0].mlp.up_proj)
    assert (kind.__name__ == "Linear4bit") == as_loaded
    truth = gradients(model, **make_batch("plain"))[1]
    loss, expected, none, _ = step(model, kernels="own")
    ours_loss, our_gradients, runs, decodings = step(model)
    assert not none
    assert runs
    assert decodings
    bar = 1e-5 if dtype == torch.float32 else 0.03
    assert relative_l2(our_gradients, expected) <= bar
    assert relative_l2(our_gradients, truth) <= bar
    assert abs(ours_loss - loss) <= bar * abs(loss)


def test_weights_on_the_host_are_decoded_once_for_each_pass():
    model = quantised(torch.float32, True)
    expected, result = step(model), step(model, weights="cpu")
    assert result[2] == expected[2] > 0
    assert result[3] == 2 * 2 * len(LINEARS) < expected[3]  # layers, forward and backward
    assert all(torch.equal(result[1][name], gradient) for name, gradient in expected[1].items())


def the_weight_of_another(monkeypatch):
    real = decoded_weights._decode_weight
    monkeypatch.setattr(decoded_weights, "_decode_weight", lambda module: 1.1 * real(module))


def test_mutant(monkeypatch):
    the_weight_of_another(monkeypatch)
    with pytest.raises(AssertionError):
        test_gradients_are_pefts(torch.float32, True)
