"""4-bit weights are decoded once for each pass through a layer, with the numbers of their own
Linear.

covers: offload/decoded_weights.py, planner/host_weights.py
"""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from streambp.layer import adapters
from streambp.offload import decoded_weights
from streambp.offload.decoded_weights import packed_linears
from tests.families import make_batch
from tests.offload.test_weights_programs import quantised
from tests.offload.weights_runs import assert_same, invert, step, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")
LINEARS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture
def decodings(monkeypatch):
    """The modules that decode, in order; one entry each time."""
    modules, real = [], decoded_weights._decode_weight

    def noted(module):
        modules.append(module)
        return real(module)

    monkeypatch.setattr(decoded_weights, "_decode_weight", noted)
    return modules


def model_pair(dtype):
    models = []
    for weights in ("cpu", "device"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models.append(quantised(weights, dtype))
    invert(models[0])
    return models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_once_for_each_pass_and_the_same_bits(dtype, decodings):
    model, resident = model_pair(dtype)
    step(model, 1)  # tries layers, with the Linears' own forwards
    decodings.clear()
    result = step(model, 2)
    layers = len(weights_of(model).ranges.layer_states)
    assert len(decodings) == 2 * 2 * layers * len(LINEARS)  # micro-batches, forward and backward
    assert_same(result, step(resident, 2))  # which decodes in each call
    assert not any("forward" in vars(module) for module in decodings)


def test_calls_that_do_not_stream_go_to_the_linears_own_forward(decodings):
    model, resident = model_pair(torch.float32)
    ids = make_batch("plain")["input_ids"][:, :9]
    with torch.no_grad():
        logits, expected = (
            tested_model(input_ids=ids, use_cache=True).logits for tested_model in (model, resident)
        )
    assert torch.equal(logits, expected)
    assert not decodings


def test_another_dtype_goes_to_the_linears_own_forward(decodings):
    """Under autocast, which would cast the product's factors anew."""
    model, resident = model_pair(torch.float32)

    def run(tested_model):
        with torch.autocast("cpu", torch.bfloat16):
            return step(tested_model, 1)

    for _ in range(2):
        assert_same(run(model), run(resident))
    assert not decodings


def test_a_forward_that_somebody_put_there_is_left():
    model, _ = model_pair(torch.float32)
    layer = model.get_base_model().model.layers[0]
    assert {type(module).__name__ for module in packed_linears(layer)} == {"Linear4bit"}
    assert len(packed_linears(layer)) == len(LINEARS)
    linear = packed_linears(layer)[0]
    linear.forward = lambda x: x
    assert linear not in packed_linears(layer)


def test_mutant_decoded_in_every_call(monkeypatch, decodings):
    monkeypatch.setattr(
        adapters, "decoded_weight", lambda module: decoded_weights._decode_weight(module)
    )
    with pytest.raises(AssertionError):
        test_once_for_each_pass_and_the_same_bits(torch.float32, decodings)
