"""Adapters of experts' weights: W + s B A is made once for each pass, no gradient of it is made,
and gradients are peft's.

covers: layer/expert_adapters.py, layer/adapters.py, model/adapters.py
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import streambp
from streambp.errors import BackwardError
from streambp.layer import expert_adapters
from streambp.layer.adapters import fuse_adapters, lora_modules_of
from tests import zoo
from tests.offload.weights_runs import invert
from tests.oracle import gradients, relative_l2, worst_error
from tests.seeds import seed_torch
from tests.tiers import thinned

peft = pytest.importorskip("peft", reason="adapters need peft")
layers = pytest.importorskip("peft.tuners.lora.layer", reason="adapters need peft")
pytestmark = [
    pytest.mark.skipif(
        not hasattr(getattr(layers, "ParamWrapper", None), "get_delta_factors"),
        reason="this version of peft has no factors of parameters",
    ),
    pytest.mark.filterwarnings("ignore:Move the model to an accelerator"),
]

# grouped_mm has no float64. Float32 sums in another order differ by about 1e-6.
BARS = {"eager": 1e-10, "batched_mm": 1e-10, "grouped_mm": 1e-4}
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
SETTINGS = {
    "chunks": {"chunk_size": 8},
    "default": {"saves": "auto"},
    "offload": {"chunk_size": 8, "offload": "cpu", "saves": ("attn_out", "kv")},
    "weights on the host": {"chunk_size": 8, "weights": "cpu"},
}
ROWS = tuple(itertools.product(FAMILIES, BARS, SETTINGS))
FAST_CASES = (
    ("qwen3_moe", "grouped_mm", "weights on the host"),
    ("mixtral", "eager", "offload"),
    ("mixtral", "batched_mm", "default"),
    ("gpt_oss", "grouped_mm", "chunks"),
    ("gpt_oss", "eager", "chunks"),
)
EXPERTS = ("gate_up_proj", "down_proj")
ADDED_ONCE_TEXT = "weights of experts are added to their adapters once"
PEFT_CODE_TEXT = "weights of experts get their adapters by peft's code"
STACKS = 4  # two layers of two weights
CHUNKS = 4  # of a batch of 25 tokens


class WholeWeights(TorchDispatchMode):
    """Counts new tensors of the shape of an experts' weight or of its transpose, and the bytes
    that all operations but products of two matrices read and write."""

    def __init__(self, model):
        super().__init__()
        stacks = [p for p in model.parameters() if p.dim() == 3]
        self.shapes = {p.shape for p in stacks} | {p.mT.shape for p in stacks}
        self.count = 0
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [a for a in args if isinstance(a, torch.Tensor)]
        if not isinstance(out, torch.Tensor) or func.is_view:
            return out
        storages = {a.untyped_storage()._cdata for a in inputs}
        is_new = out.untyped_storage()._cdata not in storages
        self.count += is_new and out.shape in self.shapes
        if func.overloadpacket.__name__ not in ("mm", "addmm", "bmm", "_grouped_mm"):
            self.bytes += out.nbytes + sum(a.nbytes for a in inputs)
        return out


def adapted_experts(family, dtype, implementation, rank=4, experts=EXPERTS, linears=("q_proj",)):
    seed_torch(1)
    model = zoo.build(family)
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3:
                parameter.normal_(0, 0.2)
    return peft.get_peft_model(model, config_of(rank, experts, linears)).to(dtype).train()


def config_of(rank=4, experts=EXPERTS, linears=("q_proj",)):
    return peft.LoraConfig(
        r=rank,
        lora_alpha=3 * rank,
        target_modules=list(linears),
        target_parameters=[f"mlp.experts.{name}" for name in experts],
        init_lora_weights=False,
    )


def streamed(stock, **settings):
    settings = settings or SETTINGS["chunks"]
    config = streambp.StreamConfig(unpatched_runs=False, rows="as_given", **settings)
    model = streambp.patch(copy.deepcopy(stock), config)
    if "weights" in settings:
        invert(model)
    return model


def batch_of(length=25):
    seed_torch(2)
    ids = torch.randint(30, (1, length))
    return {"input_ids": ids, "labels": ids}


def dtype_of(implementation):
    return torch.float32 if implementation == "grouped_mm" else torch.float64


def assert_near(computed, expected, bar):
    assert abs(computed[0] - expected[0]) <= bar * abs(expected[0])
    assert worst_error(computed[1], expected[1]) <= bar


def assert_left(model):
    for module in model.modules():
        assert not isinstance(vars(module).get("forward"), expert_adapters.FactoredExperts)
        assert not any(isinstance(v, expert_adapters.FactoredWeight) for v in vars(module).values())


def check(family, implementation, settings="chunks", rank=4):
    """Two steps; the second runs without trials. Return the operations of the second."""
    stock = adapted_experts(family, dtype_of(implementation), implementation, rank)
    ours = streamed(stock, **SETTINGS[settings])
    batch = batch_of()
    gradients(ours, **batch)
    with WholeWeights(ours) as full_weights:
        computed = gradients(ours, **batch)
    assert_near(computed, gradients(stock, **batch), BARS[implementation])
    assert ADDED_ONCE_TEXT in str(streambp.describe(ours))
    assert_left(ours)
    return full_weights


@pytest.fixture
def exact(request):
    """Lifts casts to float32 where the model is float64."""

    def lift(implementation):
        if dtype_of(implementation) == torch.float64:
            request.getfixturevalue("float64_oracle")

    return lift


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("family", "implementation", "settings"), thinned(ROWS, lambda *row: row in FAST_CASES)
)
def test_cover(family, implementation, settings, exact):
    exact(implementation)
    check(family, implementation, settings)


@pytest.mark.parametrize(
    "implementation", thinned(BARS, lambda implementation: implementation == "eager")
)
def test_training_begins_with_zeros(implementation, exact):
    """peft's own start: B is zero, and a test of the layer replaces it by random numbers. Each step
    counts, the first one too."""
    exact(implementation)
    stock = adapted_experts("qwen3_moe", dtype_of(implementation), implementation)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    ours = streamed(stock)
    trained = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (ours, stock)]
    for step in range(3):
        batch = batch_of(25 + step)
        computed, expected = (gradients(model, **batch) for model in (ours, stock))
        assert_near(computed, expected, BARS[implementation])
        for optimizer in trained:
            optimizer.step()
            optimizer.zero_grad()


def test_mutant_a_sum_of_a_tests_weights(monkeypatch, exact):
    monkeypatch.setattr(expert_adapters.FactoredExperts, "_is_made_of", lambda *_: True)
    with pytest.raises((AssertionError, BackwardError)):
        test_training_begins_with_zeros("eager", exact)


@pytest.mark.parametrize("rank", thinned([2, 3, 8], lambda rank: rank == 3))
def test_ranks(rank):
    check("gpt_oss", "grouped_mm", rank=rank)


def test_one_sum_for_each_pass():
    """Forward and backward make one sum of each weight, whatever the chunks."""
    full_weights = check("qwen3_moe", "grouped_mm")
    assert full_weights.count == 2 * STACKS


def both_active(model):
    model.add_adapter("other", config_of(rank=2))
    model.base_model.set_adapter(["default", "other"])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3 or parameter.requires_grad:
                parameter.mul_(0.7)


@pytest.mark.parametrize(
    "implementation", thinned(BARS, lambda implementation: implementation == "batched_mm")
)
def test_two_active_adapters(implementation, exact):
    exact(implementation)
    stock = adapted_experts("gpt_oss", dtype_of(implementation), implementation)
    both_active(stock)
    stock.to(dtype_of(implementation))
    ours = streamed(stock)
    batch = batch_of()
    for _ in range(2):
        computed = gradients(ours, **batch)
        assert_near(computed, gradients(stock, **batch), BARS[implementation])
    assert any("other" in name and "experts" in name for name in computed[1])
    assert ADDED_ONCE_TEXT in str(streambp.describe(ours))


def test_disabled_merged_and_unpatched(float64_oracle):
    """peft switches and merges adapters between steps; outside of a step nothing is replaced."""
    stock = adapted_experts("mixtral", torch.float64, "eager", linears=("q_proj", "embed_tokens"))
    ours = streamed(stock)
    batch = batch_of()

    def agree():
        our_result = gradients(ours, **batch)
        assert_near(our_result, gradients(stock, **batch), BARS["eager"])
        assert_left(ours)
        return our_result

    first = agree()
    with ours.disable_adapter(), stock.disable_adapter(), torch.no_grad():
        expected = stock(**batch).loss
        assert abs(ours(**batch).loss - expected) <= 1e-10 * expected
        assert abs(first[0] - expected) > 1e-3
    agree()
    for model in (ours, stock):
        model.merge_adapter()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    agree()
    assert ADDED_ONCE_TEXT not in str(streambp.describe(ours))
    for model in (ours, stock):
        model.unmerge_adapter()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    agree()
    streambp.unpatch(ours)
    our_result, expected = gradients(ours, **batch), gradients(stock, **batch)
    assert torch.equal(our_result[0], expected[0])
    assert all(torch.equal(our_result[1][name], value) for name, value in expected[1].items())
    assert_left(ours)


def test_an_error_in_a_step_leaves_the_model_usable(float64_oracle, monkeypatch):
    stock = adapted_experts("gpt_oss", torch.float64, "eager")
    ours = streamed(stock)
    batch = batch_of()
    first_step = gradients(ours, **batch)
    real, calls = expert_adapters.ExpertProduct.backward, []

    def failing(ctx, grad):
        calls.append(grad)
        if len(calls) == 7:
            raise ArithmeticError("seventh product")
        return real(ctx, grad)

    with monkeypatch.context() as patch:
        patch.setattr(expert_adapters.ExpertProduct, "backward", staticmethod(failing))
        with pytest.raises(ArithmeticError, match="seventh product"):
            gradients(ours, **batch)
    assert_left(ours)
    later_step = gradients(ours, **batch)
    assert torch.equal(later_step[0], first_step[0])
    assert all(torch.equal(later_step[1][name], value) for name, value in first_step[1].items())


def test_float16_is_left_to_peft():
    stock = adapted_experts("mixtral", torch.float32, "eager")
    results = []
    for kernels in ("auto", "own"):
        ours = streamed(stock, chunk_size=8, kernels=kernels)
        with torch.autocast("cpu", torch.float16):
            results.append(gradients(ours, **batch_of()))
        if kernels == "auto":
            text = str(streambp.describe(ours))
    (loss, by_name), (own_loss, own_gradients) = results
    assert torch.equal(loss, own_loss)
    assert all(torch.equal(by_name[name], value) for name, value in own_gradients.items())
    note = next(line for line in text.splitlines() if PEFT_CODE_TEXT in line)
    assert "it is computed in float16" in note


def described_after_exact_steps():
    """What `describe` says of Mixtral's adapted experts after two steps, which are exact."""
    stock = adapted_experts("mixtral", torch.float64, "eager")
    ours = streamed(stock)
    batch = batch_of()
    for _ in range(2):
        assert_near(gradients(ours, **batch), gradients(stock, **batch), BARS["eager"])
    return str(streambp.describe(ours))


class OtherLinear(torch.autograd.Function):
    """The function that DeepSpeed puts in the place of torch's under ZeRO-3."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.matmul(weight.t())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad.matmul(weight), grad.flatten(0, -2).t().matmul(x.flatten(0, -2))


def with_another_linear(monkeypatch):
    """A step whose Linears are computed by another function than torch's."""
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, weight, bias=None: OtherLinear.apply(x, weight)
    )
    return described_after_exact_steps()


def test_another_function_for_linears(float64_oracle, monkeypatch):
    assert "torch's function for Linears is replaced" in with_another_linear(monkeypatch)


def test_mutant_that_takes_another_function(float64_oracle, monkeypatch):
    """The layer then runs whole, because an autograd function would lose its gradient."""
    monkeypatch.setattr(expert_adapters, "_why_not_in_call", lambda *_: None)
    with pytest.raises((AssertionError, RuntimeError, streambp.errors.StreamBPError)):
        test_another_function_for_linears(None, monkeypatch)


@pytest.mark.full
def test_an_operation_on_the_whole_weight(float64_oracle, monkeypatch):
    """It gets peft's weight, and its gradient goes to the factors."""
    from transformers.models.mixtral import modeling_mixtral

    real = modeling_mixtral.MixtralExperts.forward

    def clamping(self, *args, **kwargs):
        out = real(self, *args, **kwargs)
        return out + torch.clamp(self.down_proj, -0.2, 0.3).sum() / 100

    monkeypatch.setattr(modeling_mixtral.MixtralExperts, "forward", clamping)
    stock = adapted_experts("mixtral", torch.float64, "eager")
    ours = streamed(stock)
    batch = batch_of()
    assert_near(gradients(ours, **batch), gradients(stock, **batch), BARS["eager"])
    assert "clamp needs the weight's whole gradient" in str(streambp.describe(ours))


class Multiplied(torch.autograd.Function):
    """x @ weight, by a function that a library could bring."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad


def with_an_autograd_function(monkeypatch):
    """What `describe` says of a model whose experts call an autograd function on their weight."""
    from transformers.models.mixtral import modeling_mixtral

    real = modeling_mixtral.MixtralExperts.forward

    def multiplying(self, hidden_states, *args, **kwargs):
        out = real(self, hidden_states, *args, **kwargs)
        return out + Multiplied.apply(hidden_states, self.down_proj[0]).sum(-1, keepdim=True) / 100

    monkeypatch.setattr(modeling_mixtral.MixtralExperts, "forward", multiplying)
    return described_after_exact_steps()


def test_an_autograd_function_on_a_weight(float64_oracle, monkeypatch):
    """Its gradient of the weight would be lost, so the layer runs whole, by peft's code."""
    assert "as inside an autograd function" in with_an_autograd_function(monkeypatch)


@pytest.mark.full
def test_mutant_that_loses_a_functions_gradient(float64_oracle, monkeypatch):
    monkeypatch.setattr(expert_adapters, "_refuse_without_graph", lambda *_: None)
    with pytest.raises(AssertionError):
        with_an_autograd_function(monkeypatch)


@contextlib.contextmanager
def experts_alone(model):
    """Only the experts' adapters are computed as in a streamed layer, so that nothing else of a
    step differs from peft."""
    with contextlib.ExitStack() as stack:
        for layer in model.base_model.model.model.layers:
            by_name = lora_modules_of(layer)
            for name in list(by_name):
                if not isinstance(by_name[name], expert_adapters.LoraParameter):
                    del by_name[name]
            stack.enter_context(fuse_adapters(by_name))
        yield


def ratio_in_bfloat16(family, implementation, draw):
    """Our error against float64's gradients by peft's own error. The loss is peft's to the bit."""
    stock = adapted_experts(family, torch.bfloat16, implementation, rank=8)
    seed_torch(100 + draw)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    ids = torch.randint(30, (1, 25))
    batch = {"input_ids": ids, "labels": ids}
    wide = copy.deepcopy(stock).float()
    wide.base_model.model.set_experts_implementation("eager")
    truth = gradients(wide, **batch)[1]
    expected = gradients(stock, **batch)
    with experts_alone(stock):
        stock_result = gradients(stock, **batch)
    assert torch.equal(stock_result[0], expected[0])
    return relative_l2(stock_result[1], truth) / relative_l2(expected[1], truth)


@pytest.fixture
def fixed_routes(monkeypatch):
    """Routers that read the same numbers in each precision: a flipped expert is a larger error than
    any rounding."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    for router in (GptOssTopKRouter, MixtralTopKRouter, Qwen3MoeTopKRouter):

        def forward(self, hidden_states, *args, real=router.forward, **kwargs):
            numbers = torch.arange(hidden_states.shape[-1]).sin()
            shape = (*hidden_states.shape[:-1], 1)
            fixed_input = (numbers + torch.arange(shape[-2])[:, None].cos()).expand(
                hidden_states.shape
            )
            return real(self, fixed_input.to(hidden_states.dtype), *args, **kwargs)

        monkeypatch.setattr(router, "forward", forward)


@pytest.mark.parametrize(
    ("family", "implementation"),
    thinned(itertools.product(FAMILIES, BARS), lambda *row: row == ("gpt_oss", "grouped_mm")),
)
def test_bfloat16(family, implementation, fixed_routes):
    ratios = [ratio_in_bfloat16(family, implementation, draw) for draw in range(8)]
    print(family, implementation, [round(ratio, 3) for ratio in ratios])
    assert statistics.mean(ratios) <= 1.05


@pytest.mark.parametrize("implementation", thinned(("grouped_mm", "eager"), "grouped_mm".__eq__))
def test_traffic(implementation):
    """Beside products of matrices, a step with adapters of experts reads and writes at most 1.2
    times the bytes of a step with frozen experts, sums W + s B A included."""
    batch = batch_of(257)
    bytes_of = {}
    for name, experts in (("frozen", ()), ("adapted", EXPERTS)):
        stock = adapted_experts(
            "gpt_oss", torch.float32, implementation, experts=experts, linears=("q_proj", "o_proj")
        )
        ours = streamed(stock, chunk_size=32)
        gradients(ours, **batch)
        with WholeWeights(ours) as full_weights:
            gradients(ours, **batch)
        bytes_of[name] = full_weights.bytes
    ratio = bytes_of["adapted"] / bytes_of["frozen"]
    print(f"{implementation}: {ratio:.3f}")
    assert ratio <= 1.2


def without_scale(monkeypatch):
    monkeypatch.setattr(
        expert_adapters.ProductRule,
        "scale_gradients",
        lambda self, left_factor, right_factor: (left_factor, right_factor),
    )


def without_adapter(monkeypatch):
    monkeypatch.setattr(expert_adapters, "folded_weight", lambda module, base, *_: base.clone())


def swapped(monkeypatch):
    real = expert_adapters.FactoredWeight.expert
    monkeypatch.setattr(
        expert_adapters.FactoredWeight, "expert", lambda self, index: real(self, (index + 1) % 4)
    )


@pytest.mark.parametrize("mutant", [without_scale, without_adapter, swapped])
def test_mutants(mutant, monkeypatch, float64_oracle):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        check("mixtral", "eager")


def test_mutant_that_adds_in_each_chunk(monkeypatch):
    forgets = property(lambda self: None, lambda self, value: None)
    monkeypatch.setattr(expert_adapters.FactoredExperts, "folded", forgets)
    assert check("qwen3_moe", "grouped_mm").count == 2 * STACKS * CHUNKS
