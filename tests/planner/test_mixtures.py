"""Plans of mixtures of experts: any dtype of grouped products, and bytes of packed weights.

covers: planner/count.py, planner/packed_weights.py, planner/skeleton.py, planner/survey.py
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from streambp.errors import StreamBPError
from streambp.offload import mxfp4
from streambp.planner import count, packed_weights
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import parameter_groups
from tests import zoo
from tests.layer.test_packed_experts import Decoding, pack
from tests.planner.measured import RECIPES, measure, predict
from tests.seeds import seed_torch
from tests.tiers import thinned

LAYERS = 3


def mixture(family, dtype=torch.float32, layers=LAYERS):
    pattern = zoo.tiny_config(family).to_dict().get("layer_types")
    changes = {"num_hidden_layers": layers}
    if pattern:
        changes["layer_types"] = (list(pattern) * layers)[:layers]
    model = zoo.build(family, dtype, **changes)
    model.set_experts_implementation("grouped_mm")
    return model


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "recipe"),
    thinned(
        [(family, recipe) for family in ("qwen3_moe", "gpt_oss", "mixtral") for recipe in RECIPES],
        lambda *row: row == ("qwen3_moe", "saves"),
    ),
)
def test_float32_is_predicted_within_one_percent(family, recipe):
    seed_torch(1)
    phases, *_ = predict(mixture(family), RECIPES[recipe], 129, 32)
    predicted = max(phase.peak - phase.gradients for phase in phases)
    spans = measure(mixture(family), RECIPES[recipe], 129, 32)
    gradients_before = [0, *(span.gradients for span in spans[:-1])]
    measured = max(span.peak - old for span, old in zip(spans, gradients_before, strict=True))
    print(f"{family}, {recipe}: {100 * (predicted / measured - 1):+.3f} %")
    assert abs(predicted / measured - 1) <= 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_of_a_gpu(dtype):
    """A step on meta tensors, whose products and routed pairs are those of bfloat16."""
    config = zoo.tiny_config("gpt_oss")
    config._experts_implementation = "grouped_mm"
    counts = []
    for weights_dtype in (dtype, torch.bfloat16):
        skeleton = Skeleton(config, weights_dtype, None, 16, "cuda")
        with skeleton.running(), count.StepCount(None) as counted:
            skeleton.loss(torch.empty(1, 33, dtype=torch.long)).backward()
        counts.append((counted.work.products, counted.routed))
    assert counts[0] == counts[1]


def meta_multiplies_groups_in(dtype):
    """True if torch's grouped product takes this dtype without data, as from torch 2.15 on."""
    rows = torch.empty(16, 16, dtype=dtype, device="meta")
    weights = torch.empty(2, 16, 16, dtype=dtype, device="meta")
    ends = torch.empty(2, dtype=torch.int32, device="meta")
    try:
        torch._grouped_mm(rows, weights, offs=ends)
    except RuntimeError:
        return False
    return True


def test_mutant_without_the_rule(monkeypatch):
    monkeypatch.setattr(count, "GROUPED_DTYPES", ())
    if meta_multiplies_groups_in(torch.float32):
        test_dtypes_of_a_gpu(torch.float32)  # the rule is for older releases
    else:
        with pytest.raises((AssertionError, StreamBPError, RuntimeError)):
            test_dtypes_of_a_gpu(torch.float32)


def test_mutant_of_half_the_rows(monkeypatch):
    real = count.StepCount._grouped

    def narrow(self, a, *args, **kwargs):
        return real(self, a[..., : a.shape[-2] // 2, :], *args, **kwargs)

    monkeypatch.setattr(count.StepCount, "_grouped", narrow)
    with pytest.raises((AssertionError, StreamBPError, RuntimeError)):
        test_float32_is_predicted_within_one_percent("qwen3_moe", "saves")


def gpt_oss_20b():
    return GptOssConfig(num_hidden_layers=24, num_local_experts=32)


def bytes_in_plan(source, **options):
    settings = {"dtype": torch.bfloat16, "lora": None, "bits": 16, "device": "cuda", **options}
    return sum(group.bytes for group in parameter_groups(Skeleton(source, **settings).model))


def test_weights_of_gpt_oss_20b_in_4_bits():
    pytest.importorskip("peft", reason="peft is not installed")
    skeleton = Skeleton(gpt_oss_20b(), torch.bfloat16, 16, 4, "cuda")
    groups = parameter_groups(skeleton.model)
    total = sum(group.bytes for group in groups) / 2**30
    print(f"{total:.2f} GiB")
    assert 12 <= total <= 13
    assert sum(group.parameters for group in groups) > 20.9e9
    assert sum(skeleton.on_host()["frozen"]) <= 11 * 2**30


def adapted_experts():
    """Qwen3-MoE with LoRA, whose experts get adapters, and in 4 bits: the sums of the packed
    weights of two unpatched steps."""
    pytest.importorskip("peft", reason="peft is not installed")
    config = zoo.tiny_config("qwen3_moe")
    config._experts_implementation = "grouped_mm"
    skeleton = Skeleton(config, torch.bfloat16, 4, 4, "cuda")
    trained = [n for n, p in skeleton.model.named_parameters() if p.requires_grad]
    assert any("experts" in name for name in trained)
    with skeleton.running(), count.StepCount(None):
        for _ in range(2):
            skeleton.loss(torch.empty(1, 33, dtype=torch.long)).backward()
    experts = [m for m in skeleton.model.modules() if isinstance(m, packed_weights.CountedExperts)]
    assert len(experts) == 2 * config.num_hidden_layers


def test_experts_with_adapters_are_packed():
    adapted_experts()


def test_mutant_by_pefts_activation(monkeypatch):
    monkeypatch.setattr("streambp.planner.skeleton.activate_packed", lambda model, stays: None)
    with pytest.raises((AssertionError, RuntimeError)):
        adapted_experts()


def small_mixture():
    return zoo.tiny_config(
        "gpt_oss", hidden_size=64, intermediate_size=128, num_local_experts=8, vocab_size=64
    )


def test_plan_of_4_bits_against_a_quantised_model():
    """The sum of all tensors of a model that bitsandbytes has quantised, within 3 %."""
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    packing = pytest.importorskip("bitsandbytes.nn.parametrize", reason="an old bitsandbytes")
    predicted = bytes_in_plan(small_mixture(), lora=4, bits=4)
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_config(small_mixture(), dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            frozen = type(child) is torch.nn.Linear and not child.weight.requires_grad
            if frozen and "lora" not in name and "head" not in name:
                linear = library.nn.Linear4bit(
                    child.in_features, child.out_features, child.bias is not None, quant_type="nf4"
                )
                linear.load_state_dict(child.state_dict())
                setattr(module, name, linear.to("cpu"))
        if type(module).__name__ == "GptOssExperts":
            for name in ("gate_up_proj", "down_proj"):
                packing.replace_parameter_4bit(module, name)
    tensors = {id(p): p for p in model.parameters()}
    for holder in [*model.modules(), *model.parameters()]:
        state = getattr(holder, "quant_state", None)
        for value in vars(state).values() if state is not None else ():
            if isinstance(value, torch.Tensor):
                tensors[id(value)] = value
    measured = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{100 * (predicted / measured - 1):+.2f} %")
    assert abs(predicted / measured - 1) <= 0.03


def test_a_model_with_parametrised_experts():
    """Packed bytes and statistics count; so do the parameters that they stand for."""
    model = zoo.build("gpt_oss", torch.bfloat16)
    plain = parameter_groups(model)
    calls = []
    for module in list(model.modules()):
        if type(module).__name__ == "GptOssExperts":
            for name in ("gate_up_proj", "down_proj"):
                pack(module, name, calls)
    experts = [p for n, p in model.named_parameters() if ".experts." in n]
    scales = [m.scale for m in model.modules() if isinstance(m, Decoding)]
    (_, group) = parameter_groups(Skeleton(model, torch.bfloat16, None, 16, "cuda").model)
    assert group.bytes == sum(t.nbytes for t in [*experts, *scales])
    assert group.parameters == plain[1].parameters
    assert group.bytes < plain[1].bytes


class Halved(torch.Tensor):
    """A weight of [out, in] that stores a byte for each number and a scale for each row, as
    torchao's classes do."""

    @staticmethod
    def __new__(cls, packed, scale):
        return torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.bfloat16)

    def __init__(self, packed, scale):
        self.packed = packed
        self.scale = scale

    def __tensor_flatten__(self):
        return ["packed", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].packed, args[0].scale)
        raise NotImplementedError(func)


def test_weights_with_inner_tensors():
    model = zoo.build("llama", torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    bytes_before = bytes_in_plan(model)
    saved = 0
    for layer in model.model.layers:
        weight = layer.mlp.up_proj.weight
        packed = Halved(torch.zeros(weight.shape, dtype=torch.int8), torch.ones(len(weight)))
        layer.mlp.up_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
        saved += weight.nbytes - packed.packed.nbytes - packed.scale.nbytes
    skeleton = Skeleton(model, torch.bfloat16, None, 16, "cuda")
    assert (
        bytes_before - sum(group.bytes for group in parameter_groups(skeleton.model)) == saved > 0
    )
    assert skeleton.on_host() == {}  # weights="cpu" refuses such weights


def test_torchao():
    quantize = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = zoo.build("llama", torch.bfloat16)
    plain = bytes_in_plan(model)
    quantize.quantize_(model.model.layers, quantize.Int8WeightOnlyConfig())
    packed = bytes_in_plan(model)
    linears = sum(
        module.weight.numel() for module in model.model.layers.modules() if hasattr(module, "bias")
    )
    assert 0.5 * linears < plain - packed < linears


@pytest.mark.full
def test_decoded_experts_are_in_the_peak():
    """A streamed step with experts in 4 bits has one layer's decoded weights beside the plain
    step's tensors, from a real step."""
    calls = []

    def built():
        seed_torch(1)
        model = mixture("qwen3_moe", torch.float32)
        for module in list(model.modules()):
            if type(module).__name__ == "Qwen3MoeExperts":
                for name in ("gate_up_proj", "down_proj"):
                    pack(module, name, calls)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("proj.weight" in name)
        return model

    phases, *_ = predict(built(), RECIPES["saves"], 257, 64)
    predicted = max(phase.peak - phase.gradients for phase in phases)
    spans = measure(built(), RECIPES["saves"], 257, 64)
    gradients_before = [0, *(span.gradients for span in spans[:-1])]
    measured = max(span.peak - old for span, old in zip(spans, gradients_before, strict=True))
    print(f"{100 * (predicted / measured - 1):+.3f} %")
    assert abs(predicted / measured - 1) <= 0.01


def test_mutants_of_bytes(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights, "statistics_of", lambda weights: [])
        patch.setattr("streambp.planner.skeleton.statistics_of", lambda weights: [])
        with pytest.raises(AssertionError):
            test_a_model_with_parametrised_experts()
    with monkeypatch.context() as patch:
        patch.setattr("streambp.planner.skeleton.inner_bytes", lambda tensor: None)
        with pytest.raises(AssertionError):
            test_weights_with_inner_tensors()
    with monkeypatch.context() as patch:
        patch.setattr("streambp.planner.skeleton.pack_experts", lambda layer: 0)
        with pytest.raises(AssertionError):
            test_weights_of_gpt_oss_20b_in_4_bits()


def in_mxfp4(config, device):
    """A model in bfloat16 whose experts' bytes are not set."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in list(model.modules()):
        if type(module).__name__ == "GptOssExperts":
            for name in ("gate_up_proj", "down_proj"):
                experts, inputs, outputs = getattr(module, name).shape
                shape = (experts, outputs, inputs // mxfp4.BLOCK_SIZE)
                blocks = torch.zeros(*shape, 16, dtype=torch.uint8, device=device)
                scales = torch.full(shape, 127, dtype=torch.uint8, device=device)
                mxfp4.keep_in_mxfp4(module, name, blocks, scales)
    return model


def test_weights_of_gpt_oss_20b_in_mxfp4():
    """Experts in 4.25 bits and all else in bfloat16."""
    model = in_mxfp4(gpt_oss_20b(), "meta")
    groups = parameter_groups(Skeleton(model, torch.bfloat16, None, 16, "cuda").model)
    total = sum(group.bytes for group in groups) / 2**30
    print(f"{total:.2f} GiB")
    assert 12 <= total <= 13
    parameters = sum(group.parameters for group in groups)
    config = gpt_oss_20b()
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    assert parameters == plain.num_parameters() > 20.9e9


def test_plan_of_mxfp4():
    """The sum of all tensors of a real model, within 3 %; a plan's step runs."""
    model = in_mxfp4(small_mixture(), "cpu")
    model.set_experts_implementation("grouped_mm")
    measured = sum(tensor.nbytes for tensor in model.parameters())
    skeleton = Skeleton(model, torch.bfloat16, None, 16, "cuda")
    predicted = sum(group.bytes for group in parameter_groups(skeleton.model))
    assert abs(predicted / measured - 1) <= 0.03
    with skeleton.running(), count.StepCount(None):
        skeleton.loss(torch.empty(1, 33, dtype=torch.long)).backward()


def test_mutant_that_counts_scales_as_parameters(monkeypatch):
    monkeypatch.setattr("streambp.planner.skeleton.Mxfp4Weight", ())
    with pytest.raises(AssertionError):
        test_weights_of_gpt_oss_20b_in_mxfp4()
