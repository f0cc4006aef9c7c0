"""Families by how the base is stored, by what is trained, by settings: every cell of the table is
the unpatched model's step, or a refusal that says why.

Bases in few bits are bitsandbytes' and torchao's own where these are installed. Without them a
stand-in stores the experts, another one trains in float8, and the other cells are skipped. Cells
are float64 for plain bases, float32 for others: stored weights have the same values on both sides,
so what differs is the order of sums.
In float8 the difference is a twentieth of the unpatched model's own error, at most.

covers: layer/packed_experts.py, layer/expert_adapters.py, layer/adapters.py, offload/ranges.py
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import re
import warnings

import pytest
import torch
from torch import nn

import streambp
from streambp.errors import UnsupportedModelError
from streambp.layer import expert_adapters, packed_experts
from streambp.layer.adapters import Adaptation
from streambp.offload.ranges import HostRanges
from tests import zoo
from tests.admission import float8_stand_in
from tests.layer.test_expert_adapters import SETTINGS, batch_of, streamed
from tests.layer.test_packed_experts import EXPERTS, pack
from tests.oracle import (
    MAX_ERROR_RATIO,
    gradients,
    relative_l2,
    worst_error,
)
from tests.seeds import seed_torch
from tests.tiers import thinned

peft = pytest.importorskip("peft", reason="adapters need peft")
pytestmark = pytest.mark.filterwarnings("ignore:Move the model to an accelerator")
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss")
FAMILIES = (*MIXTURES, "qwen3")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")  # of a mixture peft takes these for its experts
ADAPTERS = ("none", "Linears", "experts", "both")
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def layers_of(model):
    return model.get_submodule("model.layers")


def in_nf4(model):
    """Linears of layers as `load_in_4bit` leaves them."""
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    for module in list(layers_of(model).modules()):
        for name, old in list(module.named_children()):
            if isinstance(old, nn.Linear):
                sizes = (old.in_features, old.out_features, old.bias is not None)
                new = library.Linear4bit(*sizes, old.weight.dtype, quant_type="nf4")
                new.weight = library.Params4bit(
                    old.weight.detach().clone(), requires_grad=False, quant_type="nf4"
                )
                new.bias = old.bias
                setattr(module, name, new.to("cpu"))  # where it is quantised
    model.is_loaded_in_4bit = True


def by_torchao(model, config, **settings):
    library = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    library.quantize_(layers_of(model), getattr(library, config)(**settings))


def in_int8(model):
    by_torchao(model, "Int8WeightOnlyConfig")


def in_int4(model):
    """For a CPU: int4's numbers in a byte each."""
    by_torchao(model, "IntxWeightOnlyConfig", weight_dtype=torch.int4)


def in_float8_weights(model):
    by_torchao(model, "Float8WeightOnlyConfig")


def in_float8(model):
    """Scales of rows are powers of two, which give chunks the rounding of the whole sequence."""
    if not HAS_TORCHAO:
        float8_stand_in.convert(layers_of(model), float8_stand_in.config("axiswise", True))
        return
    library = importlib.import_module("torchao.float8")
    settings = library.Float8LinearConfig.from_recipe_name("rowwise")
    library.convert_to_float8_training(
        layers_of(model), config=dataclasses.replace(settings, emulate=True)
    )


def pack_parameter(module, name):
    if HAS_BITSANDBYTES:
        library = importlib.import_module("bitsandbytes.nn.parametrize")
        library.replace_parameter_4bit(module, name, quant_type="nf4")
    else:
        pack(module, name, Ignored())


class Ignored:
    """The stand-in's record of decodings: a list in a layer that grows is a value of the layer."""

    def append(self, entry):
        pass


def experts_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Experts")]


@dataclasses.dataclass(frozen=True)
class Base:
    """How a base is stored: what is done to its Linears, and whether experts are packed."""

    linears: object = None
    packed: bool = False
    stored_in_few_bits: bool = True


BASES = {
    "plain": Base(stored_in_few_bits=False),
    "4-bit Linears": Base(in_nf4),
    "4-bit experts": Base(packed=True),
    "4-bit Linears and experts": Base(in_nf4, packed=True),
    "int8": Base(in_int8),
    "int4": Base(in_int4),
    "float8 weights": Base(in_float8_weights),
    "float8": Base(in_float8, stored_in_few_bits=False),
}
OF_TORCHAO = {
    "int8": "Int8Tensor",
    "int4": "IntxUnpackedToInt8Tensor",
    "float8 weights": "Float8Tensor",
}
# Linears of torchao are alike in all mixtures: those beside int8 are in one of them.
ELSEWHERE = set(itertools.product(("mixtral", "gpt_oss"), ("int4", "float8 weights")))
CELLS = tuple(
    cell
    for cell in itertools.product(FAMILIES, BASES, ADAPTERS, SETTINGS)
    if (cell[0] in MIXTURES or not (BASES[cell[1]].packed or cell[2] in ("experts", "both")))
    and cell[:2] not in ELSEWHERE
)


def adapted(model, family, adapters):
    """peft's model, or what of the model can be trained without adapters."""
    if adapters == "none":
        for parameter in model.parameters():
            plain = parameter.is_floating_point() and type(parameter) is nn.Parameter
            parameter.requires_grad_(plain)
        return model
    names = [f"mlp.experts.{name}" for name in EXPERTS]
    linears = ATTENTION if family in MIXTURES else (*ATTENTION, *MLP)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=list(linears) if adapters != "experts" else [],
        target_parameters=names if adapters != "Linears" else None,
        init_lora_weights=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config)


def models_of(family, base, adapters, dtype, seed=1):
    """The model, and the unpatched one it is compared with.

    peft alone cannot train adapters of packed experts (model/packed_adapters.py): there the
    unpatched model has the decoded weights."""
    seed_torch(seed)
    model = zoo.build(family, dtype, seed)
    if family in MIXTURES:
        model.set_experts_implementation("eager" if dtype == torch.float64 else "grouped_mm")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3:
                parameter.normal_(0, 0.2)
    if BASES[base].linears is not None:
        BASES[base].linears(model)
    seed_torch(seed + 1)  # Linears of some libraries draw numbers
    model = adapted(model, family, adapters).to(dtype).train()
    decoded = copy.deepcopy(model)
    for experts, wide in zip(experts_of(model), experts_of(decoded), strict=True):
        for name in EXPERTS if BASES[base].packed else ():
            pack_parameter(experts, name)
            with torch.no_grad():
                getattr(wide, name).copy_(getattr(experts, name)).requires_grad_(False)
    peft_is_wrong = BASES[base].packed and adapters in ("experts", "both")
    return model, (decoded if peft_is_wrong else model)


def refusal_of(base, settings):
    """What the error of a cell that is refused says."""
    if base in OF_TORCHAO and settings == "weights on the host":
        return f"{OF_TORCHAO[base]} on cpu, which weights='cpu' cannot keep on the host"
    return None


def assert_near(computed, expected, bar):
    """Equal but for the order of sums."""
    assert computed[1].keys() == expected[1].keys() != set()
    assert abs(computed[0] - expected[0]) <= bar * abs(expected[0])
    assert worst_error(computed[1], expected[1]) <= bar


def assert_within_own_error(computed, expected, truth):
    """At most a twentieth of the unpatched model's own error lies between the two. So our error is
    at most 1.05 times its own."""
    own_error = relative_l2(expected[1], truth[1])
    assert own_error > 1e-3
    assert relative_l2(computed[1], expected[1]) <= (MAX_ERROR_RATIO - 1) * own_error
    assert abs(computed[0] - expected[0]) <= 1e-3 * abs(expected[0])


def check(family, base, adapters, settings):
    """Two steps; the second runs without trials."""
    dtype = dtype_of(base)
    stock, reference = models_of(family, base, adapters, dtype)
    refusal = refusal_of(base, settings)
    if refusal is not None:
        with pytest.raises(UnsupportedModelError, match=re.escape(refusal)):
            gradients(streamed(stock, **SETTINGS[settings]), **batch_of())
        return
    expected = gradients(reference, **batch_of())
    ours = streamed(stock, **SETTINGS[settings])
    for _ in range(2):
        computed = gradients(ours, **batch_of())
        if base == "float8":
            plain, _ = models_of(family, "plain", adapters, dtype)
            assert_within_own_error(computed, expected, gradients(plain, **batch_of()))
        else:
            assert_near(computed, expected, 1e-10 if dtype == torch.float64 else 1e-4)
    text = str(streambp.describe(ours))
    assert "streams: 2 x" in text
    assert ("weights of experts are added to their adapters once" in text) == (
        adapters in ("experts", "both")
    )


def dtype_of(base):
    return torch.float64 if base == "plain" else torch.float32


FAST_CELLS = (
    ("qwen3_moe", "plain", "both", "chunks"),
    ("qwen3_moe", "4-bit experts", "Linears", "default"),
    ("mixtral", "plain", "none", "offload"),
    ("mixtral", "4-bit experts", "both", "weights on the host"),
    ("gpt_oss", "4-bit experts", "experts", "offload"),
    ("qwen3", "plain", "Linears", "weights on the host"),
    ("qwen3", "float8", "Linears", "chunks"),
    ("qwen3", "int8", "Linears", "weights on the host"),
)


@pytest.mark.fast(7)
@pytest.mark.parametrize(
    ("family", "base", "adapters", "settings"), thinned(CELLS, lambda *cell: cell in FAST_CELLS)
)
def test_cells(family, base, adapters, settings, request):
    if dtype_of(base) == torch.float64:
        request.getfixturevalue("float64_oracle")
    check(family, base, adapters, settings)


def decoded_once_for_a_shape(monkeypatch):
    """A weight that was decoded for another layer is kept."""
    cache = {}

    def stale(self):
        value = cache.get(self.module.original.shape)
        return cache.setdefault(
            self.module.original.shape,
            type(self.module).forward(self.module) if value is None else value,
        )

    monkeypatch.setattr(packed_experts.DecodedOnce, "__call__", stale)


def sums_of_an_earlier_pass(monkeypatch):
    """The sum of weight and adapters is that of an earlier weight of its shape."""
    cache, real = {}, expert_adapters.folded_weight

    def stale(module, base, *args):
        value = cache.get(base.shape)
        return cache.setdefault(base.shape, real(module, base, *args) if value is None else value)

    monkeypatch.setattr(expert_adapters, "folded_weight", stale)


def without_the_adapters_of_experts(monkeypatch):
    monkeypatch.setattr(expert_adapters, "folded_weight", lambda module, base, *_: base.clone())


def linears_decoded_once_for_a_shape(monkeypatch):
    cache, real = {}, Adaptation._base

    def stale(self, *args):
        weights = real(self, *args)
        return cache.setdefault(weights[0].shape, weights)

    monkeypatch.setattr(Adaptation, "_base", stale)


MUTANTS = (
    (decoded_once_for_a_shape, ("mixtral", "4-bit experts", "Linears", "chunks")),
    (sums_of_an_earlier_pass, ("gpt_oss", "4-bit experts", "both", "chunks")),
    (without_the_adapters_of_experts, ("mixtral", "plain", "experts", "chunks")),
    (linears_decoded_once_for_a_shape, ("qwen3", "4-bit Linears", "Linears", "chunks")),
)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("mutant", "cell"),
    thinned(MUTANTS, lambda mutant, cell: cell[0] == "mixtral"),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mutants(mutant, cell, monkeypatch, request):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_cells(*cell, request)


def test_mutant_that_keeps_any_weight_on_the_host(monkeypatch):
    """The refusal of torchao's weights goes."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    monkeypatch.setattr(HostRanges, "streamed_tensors", lambda self, index: {})
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check("qwen3", "int8", "Linears", "weights on the host")
