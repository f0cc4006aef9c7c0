"""What `describe` says of weights in few bits.

covers: model/few_bits.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import streambp
from streambp.model import few_bits
from tests import zoo
from tests.layer.test_covering_table import (
    Ignored,
    experts_of,
    in_nf4,
    layers_of,
    pack_parameter,
)
from tests.layer.test_mxfp4 import checkpoint, keep_packed
from tests.layer.test_packed_experts import EXPERTS, pack
from tests.seeds import seed_torch

__all__ = ["checkpoint"]
pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")


def lines_of(model):
    for parameter in model.parameters():
        parameter.requires_grad_(type(parameter) is nn.Parameter and parameter.is_floating_point())
    ours = streambp.patch(model, streambp.StreamConfig(chunk_size=8, unpatched_runs=False))
    text = str(streambp.describe(ours))
    lines = [note for note in streambp.describe(ours).notes if note.startswith("weights: ")]
    assert all(f"note        {line}" in text for line in lines)
    return lines


def small(family="mixtral", dtype=torch.float32):
    seed_torch(1)
    return zoo.build(family, dtype)


def test_plain_weights_have_no_line():
    assert lines_of(small()) == []


def test_packed_experts():
    model = small()
    for experts in experts_of(model):
        for name in EXPERTS:
            pack(experts, name, Ignored())
    assert lines_of(model) == ["weights: experts of 2 layers in 4 bits, decoded once a pass"]


def test_bitsandbytes():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = small()
    in_nf4(model)
    for experts in experts_of(model):
        for name in EXPERTS:
            pack_parameter(experts, name)
    assert lines_of(model) == [
        "weights: 8 Linears in 4 bits (bitsandbytes nf4), "
        "experts of 2 layers in 4 bits (bitsandbytes nf4), decoded once a pass"
    ]


def test_bitsandbytes_in_8_bits():
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    model = small("qwen3")
    for layer in layers_of(model):
        old = layer.self_attn.q_proj
        new = library.Linear8bitLt(old.in_features, old.out_features, old.bias is not None)
        new.weight = library.Int8Params(old.weight.detach(), requires_grad=False)
        layer.self_attn.q_proj = new.to("cpu")
    assert lines_of(model) == ["weights: 2 Linears in 8 bits (bitsandbytes int8)"]


@pytest.mark.parametrize(
    ("config", "settings", "text"),
    [
        ("Int8WeightOnlyConfig", {}, "in 8 bits (torchao Int8Tensor)"),
        ("Float8WeightOnlyConfig", {}, "in 8 bits (torchao Float8Tensor)"),
        (
            "IntxWeightOnlyConfig",
            {"weight_dtype": torch.int4},
            "in 8 bits (torchao IntxUnpackedToInt8Tensor)",
        ),
    ],
)
def test_torchao(config, settings, text):
    """torchao's int4 for a CPU takes a byte for each number."""
    library = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = small("qwen3", torch.bfloat16)
    library.quantize_(layers_of(model), getattr(library, config)(**settings))
    [line] = lines_of(model)
    assert line == f"weights: 14 Linears {text}"


def test_mxfp4(checkpoint):
    assert lines_of(keep_packed(checkpoint, torch.float32, "attention")) == [
        "weights: experts of 2 layers in 4 bits (MXFP4), decoded once a pass"
    ]


def test_numbers_of_a_byte():
    model = small("qwen3")
    linear = layers_of(model)[0].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert few_bits.few_bits_notes(layers_of(model)) == [
        "weights: 1 Linears in 8 bits (float8_e4m3fn)"
    ]


def test_training_in_float8(monkeypatch):
    model = small("qwen3")
    monkeypatch.setattr(few_bits, "is_float8", lambda linear: isinstance(linear, Float8))
    linear = layers_of(model)[0].self_attn.q_proj
    linear.__class__ = Float8
    assert few_bits.few_bits_notes(layers_of(model)) == [
        "weights: 1 Linears that train in float8 (torchao Float8Linear)"
    ]


class Float8(nn.Linear):
    """Stand-in."""


def test_mutant_that_counts_no_experts(monkeypatch):
    monkeypatch.setattr(few_bits, "packed_kinds", tuple)
    with pytest.raises(AssertionError):
        test_packed_experts()


def test_mutant_that_reads_the_dtype_of_a_weight(monkeypatch):
    """A weight of torchao has the dtype that it decodes to."""
    monkeypatch.setattr(few_bits, "inner_bytes", lambda weight: None)
    pytest.importorskip("torchao", reason="torchao is not installed")
    with pytest.raises((AssertionError, ValueError)):
        test_torchao("Int8WeightOnlyConfig", {}, "in 8 bits (torchao Int8Tensor)")
