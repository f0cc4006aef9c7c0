"""Experts that stay in MXFP4 from checkpoint to gradient: the numbers of the model whose experts
transformers decodes as it loads them.

The checkpoint has random bytes and scales. The reference is the unpatched model of transformers'
`Mxfp4Config(dequantize=True)`, with peft's adapters.

covers: offload/mxfp4.py, model/mxfp4_loading.py, layer/packed_experts.py
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

import streambp
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.layer import packed_experts
from streambp.model import mxfp4_loading
from streambp.offload import mxfp4
from streambp.offload.mxfp4 import Mxfp4Weight
from streambp.offload.ranges import tensors_inside
from tests import zoo
from tests.layer.test_expert_adapters import ADDED_ONCE_TEXT, SETTINGS, batch_of, streamed
from tests.layer.test_packed_expert_adapters import decodings
from tests.layer.test_packed_experts import EXPERTS, WEIGHTS
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch
from tests.tiers import thinned

peft = pytest.importorskip("peft", reason="adapters need peft")
reference = pytest.importorskip("transformers.integrations.mxfp4", reason="an old transformers")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
quantization = pytest.importorskip("transformers.utils.quantization_config", reason="transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")
SIZES = {"hidden_size": 64, "intermediate_size": 32}
TARGETS = {
    "none": None,  # all but the experts' weights is trained
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {
        "target_modules": [],
        "target_parameters": [f"mlp.experts.{name}" for name in EXPERTS],
    },
    "both": {
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": [f"mlp.experts.{name}" for name in EXPERTS],
    },
}
BARS = {torch.float64: 1e-10, torch.float32: 1e-4}
IMPLEMENTATIONS = {torch.float64: "eager", torch.float32: "grouped_mm"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a small gpt-oss whose experts are random bytes, with 2^-5 to 2^-2 as scales."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = zoo.build("gpt_oss", torch.bfloat16, **SIZES)
    tensors = {}
    seed_torch(3)
    for name, tensor in model.state_dict().items():
        if name.endswith(EXPERTS):
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // mxfp4.BLOCK_SIZE)
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)
        else:
            tensors[name] = tensor.contiguous()
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    model.config.save_pretrained(folder)
    return folder


def loaded(folder, dtype, adapters):
    """The model that transformers loads, with peft's adapters of the same random values."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=quantization.Mxfp4Config(dequantize=True)
    )
    model.to(dtype)  # older releases of transformers decode to bfloat16
    model.set_experts_implementation(IMPLEMENTATIONS.get(dtype, "grouped_mm"))
    if adapters == "none":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(EXPERTS))
        return model.to(dtype).train()
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **TARGETS[adapters])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, config)
    seed_torch(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return model.to(dtype).train()


def keep_packed(folder, dtype, adapters):
    with streambp.keep_mxfp4():
        return loaded(folder, dtype, adapters)


def check(folder, dtype, adapters, settings):
    """Two steps; the second runs without trials. Return the weights that the second decodes."""
    expected = gradients(loaded(folder, dtype, adapters), **batch_of())
    assert any("experts" in name for name in expected[1]) == (adapters != "attention")
    has_factors = adapters in ("experts", "both")
    model = keep_packed(folder, dtype, adapters)
    if not has_factors:
        unpatched = gradients(model, **batch_of())
        assert torch.equal(unpatched[0], expected[0])
        assert all(torch.equal(unpatched[1][name], value) for name, value in expected[1].items())
    ours = streamed(model, **SETTINGS[settings])
    gradients(ours, **batch_of())
    with decodings() as decoded:
        computed = gradients(ours, **batch_of())
    assert abs(computed[0] - expected[0]) <= BARS[dtype] * abs(expected[0])
    assert worst_error(computed[1], expected[1]) <= BARS[dtype]
    text = str(streambp.describe(ours))
    assert "streams: 2 x" in text
    assert (ADDED_ONCE_TEXT in text) == has_factors
    assert not parametrize._cache_enabled
    return len(decoded)


ROWS = tuple(itertools.product(BARS, TARGETS, SETTINGS))
FAST_CASES = (
    (torch.float32, "both", "chunks"),
    (torch.float64, "attention", "default"),
    (torch.float64, "experts", "weights on the host"),
)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("dtype", "adapters", "settings"), thinned(ROWS, lambda *row: row in FAST_CASES)
)
def test_cover(dtype, adapters, settings, checkpoint, request):
    """Forward and backward decode each weight once."""
    if dtype == torch.float64:
        request.getfixturevalue("float64_oracle")
    assert check(checkpoint, dtype, adapters, settings) == 2 * WEIGHTS


@pytest.mark.parametrize(
    "adapters", thinned(("attention", "experts", "both"), lambda adapters: adapters == "both")
)
def test_bfloat16_is_that_of_decoded_weights(adapters, checkpoint):
    """To the bit, in the same chunks."""
    decoded = gradients(streamed(loaded(checkpoint, torch.bfloat16, adapters)), **batch_of())
    computed = gradients(streamed(keep_packed(checkpoint, torch.bfloat16, adapters)), **batch_of())
    assert torch.equal(computed[0], decoded[0])
    assert all(torch.equal(computed[1][name], value) for name, value in decoded[1].items())


@pytest.mark.parametrize(
    "dtype",
    thinned(
        (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        lambda dtype: dtype == torch.bfloat16,
    ),
)
def test_every_byte_with_every_scale(dtype, monkeypatch):
    """Bits, shape and strides of transformers' own decoding, one expert and several at a time."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255).view(3, 85, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(3, 85, 1).repeat(1, 1, 16)
    expected = reference.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    for limit in (1, 2 * expected[0].numel(), mxfp4.MAX_DECODED_ELEMENTS):
        monkeypatch.setattr(mxfp4, "MAX_DECODED_ELEMENTS", limit)
        computed = Mxfp4Weight(scales, dtype)(blocks)
        assert computed.stride() == expected.stride()
        assert torch.equal(computed.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(computed.signbit(), expected.signbit())


def test_bytes_of_experts(checkpoint):
    """4.25 bits for each number, all of which move with the layer. A cast changes what is decoded
    and not what is stored."""
    model = keep_packed(checkpoint, torch.bfloat16, "attention")
    numbers = stored = 0
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            numbers += module[0].shape.numel()
            stored += sum(p.nbytes for p in module.parameters())
            assert module().shape == module[0].shape
            assert module().dtype == torch.bfloat16
    assert 8 * stored == 4.25 * numbers
    layer = model.get_submodule("model.model.layers.0")
    on_host = set(map(id, tensors_inside(layer)))
    assert {id(p) for p in layer.mlp.experts.parameters()} <= on_host
    weights = layer.mlp.experts.parametrizations["down_proj"]
    earlier = weights()
    assert torch.equal(model.double() and weights(), earlier.double())
    assert weights.original.dtype == torch.uint8


def test_nothing_in_mxfp4_is_an_error():
    with pytest.raises(StreamBPError, match="No weights in MXFP4"), streambp.keep_mxfp4():
        pass


def test_a_stand_in_that_is_replaced_is_an_error(checkpoint):
    context = streambp.keep_mxfp4()
    context.__enter__()
    model = loaded(checkpoint, torch.bfloat16, "attention")
    experts = model.get_submodule("model.model.layers.0.mlp.experts")
    experts.down_proj = nn.Parameter(experts.down_proj.detach().clone(), requires_grad=False)
    with pytest.raises(StreamBPError, match="was moved or replaced"):
        context.__exit__(None, None, None)


def test_a_step_inside_computes_nothing(checkpoint):
    """Not a number, instead of a number that is wrong."""
    with streambp.keep_mxfp4():
        model = loaded(checkpoint, torch.float64, "attention")
        assert model(**batch_of()).loss.isnan()
    assert not model(**batch_of()).loss.isnan()


def test_transformers_is_as_before(checkpoint):
    """Also after an error inside."""
    methods = reference.Mxfp4Dequantize.convert
    context = streambp.keep_mxfp4()
    context.__enter__()
    assert reference.Mxfp4Dequantize.convert is not methods
    assert not context.__exit__(ArithmeticError, ArithmeticError(), None)  # the error goes on
    assert reference.Mxfp4Dequantize.convert is methods
    model = loaded(checkpoint, torch.bfloat16, "attention")
    assert not any(isinstance(m, Mxfp4Weight) for m in model.modules())


def test_adapters_after_the_context_are_refused_by_peft(checkpoint):
    """peft finds no parameter that is packed already, and says so."""
    with streambp.keep_mxfp4():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    config = peft.LoraConfig(r=4, **TARGETS["both"])
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        peft.get_peft_model(model, config)


def high_bits_first(monkeypatch):
    real = Mxfp4Weight.__init__

    def swapped(self, *args):
        real(self, *args)
        self.pairs = self.pairs.flip(-1)

    monkeypatch.setattr(Mxfp4Weight, "__init__", swapped)


def another_bias(monkeypatch):
    monkeypatch.setattr(mxfp4, "EXPONENT_BIAS", 128)


def scales_of_another_layer(monkeypatch):
    real, last = mxfp4_loading.keep_in_mxfp4, {}

    def swapped(module, name, blocks, scales):
        real(module, name, blocks, last.get(name, scales))
        last[name] = scales

    monkeypatch.setattr(mxfp4_loading, "keep_in_mxfp4", swapped)


def decoded_in_every_call(monkeypatch):
    monkeypatch.setattr(packed_experts, "packed_weights", lambda layer: [])


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("mutant", "adapters"),
    [
        (high_bits_first, "attention"),
        (another_bias, "both"),
        (scales_of_another_layer, "both"),
        (decoded_in_every_call, "attention"),
    ],
)
def test_mutants(mutant, adapters, checkpoint, monkeypatch, request):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, UnsupportedModelError)):
        test_cover(torch.float32, adapters, "chunks", checkpoint, request)
