"""`verify` of models whose frozen weights are stored in few bits, with adapters.

The truth has the decoded weights. torchao's weights decode themselves, and experts in MXFP4 stand
for the same numbers in each dtype.

covers: verify/truth.py, verify/compare.py
"""

from __future__ import annotations

import warnings

import pytest
import torch

from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.layer import packed_experts
from streambp.verify import truth
from streambp.verify.compare import verify
from tests import zoo
from tests.layer.test_covering_table import ATTENTION, in_nf4, layers_of
from tests.layer.test_mxfp4 import checkpoint, keep_packed
from tests.seeds import seed_torch
from tests.tiers import thinned

__all__ = ["checkpoint"]
peft = pytest.importorskip("peft", reason="adapters need peft")
pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")
TORCHAO = {
    "int8": ("Int8WeightOnlyConfig", {}),
    "float8": ("Float8WeightOnlyConfig", {}),
    "int4": ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
}
FAMILIES = ("qwen3", "qwen3_moe")
DTYPES = (torch.float32, torch.bfloat16)


def with_torchao(family, dtype, name):
    """A base of torchao's weights with adapters of random values."""
    library = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    config, settings = TORCHAO[name]
    seed_torch(1)
    model = zoo.build(family, dtype)
    library.quantize_(layers_of(model), getattr(library, config)(**settings))
    lora = peft.LoraConfig(r=4, target_modules=list(ATTENTION), init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, lora).to(dtype).train()


def check(model):
    """The verdict is printed. `verify` raises if no layer ran in chunks."""
    verification = verify(model, seq_len=64)
    text = str(verification)
    print(text)
    assert verification.exact
    assert "\nEXACT: to rounding in" in text


@pytest.mark.parametrize(
    ("family", "dtype", "name"),
    thinned(
        [(family, dtype, name) for family in FAMILIES for dtype in DTYPES for name in TORCHAO],
        lambda *row: row == ("qwen3", torch.float32, "float8"),
    ),
)
def test_torchao(family, dtype, name):
    check(with_torchao(family, dtype, name))


@pytest.mark.parametrize(
    "dtype", thinned((*DTYPES, torch.float64), lambda dtype: dtype == torch.bfloat16)
)
@pytest.mark.parametrize("adapters", ["attention", "both"])
def test_mxfp4(dtype, adapters, checkpoint):
    """peft's own step is left in place again; it cannot add adapters to packed experts."""
    model = keep_packed(checkpoint, dtype, adapters)
    check(model)
    assert not any("_activate_lora" in vars(module) for module in model.modules())


def test_the_truth_has_decoded_weights(checkpoint):
    """In float64, from float32: nothing else is rounded."""
    model = keep_packed(checkpoint, torch.float32, "attention")
    wide = truth.copy_to_host(model, torch.float64)
    name = "model.model.layers.1.mlp.experts"
    ours, theirs = model.get_submodule(name), wide.get_submodule(name)
    assert theirs.down_proj.dtype == torch.float64
    assert torch.equal(ours.down_proj.double(), theirs.down_proj)
    assert ours.down_proj.dtype == torch.float32


def test_other_weights_in_few_bits_are_refused():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = zoo.build("qwen3", torch.float32)
    in_nf4(model)
    with pytest.raises(UnsupportedModelError, match="Verify the checkpoint without quantisation"):
        verify(model, seq_len=64)


def test_mutant_that_keeps_the_weights_of_a_library(monkeypatch):
    """A weight of torchao has its own ways to become wide."""
    monkeypatch.setattr(truth, "inner_bytes", lambda value: None)
    model = with_torchao("qwen3", torch.float32, "float8")
    with pytest.raises((AssertionError, RuntimeError)):
        check(model)


def test_mutant_that_decodes_other_numbers(monkeypatch, checkpoint):
    """A thousandth more, in streamed layers alone."""
    real = packed_experts.DecodedOnce.__call__
    monkeypatch.setattr(packed_experts.DecodedOnce, "__call__", lambda self: real(self) * 1.001)
    with pytest.raises((AssertionError, StreamBPError)):
        check(keep_packed(checkpoint, torch.float32, "attention"))
