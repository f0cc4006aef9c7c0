"""Streamed layers whose Linears have LoRA adapters: gradients are those of the unpatched model,
whatever is saved, and the adapters cost nothing of the size of what the Linears read and write.

covers: layer/adapters.py, layer/adapted_linear.py, layer/products.py, layer/layer_state.py,
    model/adapters.py
"""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import streambp
from scripts import lora_precision
from streambp.admission import trials
from streambp.distributed.engines import EngineOwnership
from streambp.layer import adapted_linear as operation
from streambp.layer import adapters, call, saved_tensors
from streambp.layer import layer_state as site_module
from streambp.layer.adapters import Adaptation
from tests.families import build, make_batch
from tests.oracle import MAX_ERROR_RATIO as PRECISE
from tests.oracle import assert_as_precise, gradients, relative_l2, worst_error
from tests.seeds import seed_torch
from tests.tiers import thinned

peft = pytest.importorskip("peft", reason="adapters need peft")

MAX_RELATIVE_ERROR = 1e-12
HALF_DTYPE = torch.bfloat16
SAVES = ((), ("attn_out",), ("attn_out", "kv", "*"), ("mlp.gate_proj", "self_attn.q_proj"), "auto")
CHUNKS = (5, 8, 64)
MODES = ("left-padded", "packed")


def with_adapters(model, dtype=torch.float64, **settings):
    """The model with adapters that have grown, on all its Linears."""
    seed_torch(1)
    config = peft.LoraConfig(
        **{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **settings}
    )
    model = peft.get_peft_model(model, config)
    return model.to(dtype) if dtype == torch.float64 else model


def streamed(model, **settings):
    """A patched copy that never runs a call as unpatched."""
    config = streambp.StreamConfig(**{"chunk_size": 5, "unpatched_runs": False, **settings})
    return streambp.patch(copy.deepcopy(model), config)


def check(stock, calls, mode="left-padded", ours=None, **settings):
    """The second step, which knows what backward leaves unread."""
    batch = make_batch(mode)
    ours = streamed(stock, **settings) if ours is None else ours
    gradients(ours, **batch)
    calls.clear()
    seed_torch(3)
    (loss, our_gradients), served = gradients(ours, **batch), len(calls)
    seed_torch(3)
    expected_loss, expected = gradients(stock, **batch)
    assert abs(loss - expected_loss) <= MAX_RELATIVE_ERROR * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_RELATIVE_ERROR
    return served


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("saves", "offload", "chunk", "mode"),
    thinned(
        itertools.product(SAVES, ("none", "cpu"), CHUNKS, MODES),
        lambda saves, offload, chunk, mode: (
            (saves, offload, chunk, mode)
            in {
                ((), "none", 5, "left-padded"),
                (("attn_out", "kv", "*"), "cpu", 8, "packed"),
                ("auto", "none", 5, "packed"),
                (SAVES[3], "none", 64, "left-padded"),
            }
        ),
    ),
)
def test_float64(saves, offload, chunk, mode, calls, float64_oracle):
    family = "qwen2" if chunk == 8 else "qwen3"
    stock = with_adapters(build(family, torch.float64), lora_bias=family == "qwen2")
    assert check(stock, calls, mode, saves=saves, offload=offload, chunk_size=chunk) > 0


def adapters_of(model):
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def everything_trained(model):
    model.requires_grad_(True)


def two_active(model):
    seed_torch(9)
    model.add_adapter(
        "second", peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    )
    model.base_model.set_adapter(["default", "second"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    model.double()


# Settings of the adapters, and what is done to the model: all in one operation.
COVERED_ADAPTERS = {
    "dropout": ({"lora_dropout": 0.3}, None),
    "two active": ({}, two_active),
    "patterns, rslora": (
        {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"up_proj": 5}, "use_rslora": True},
        None,
    ),
    "biases": ({"bias": "all", "lora_bias": True}, None),
    "base weights trained": ({}, everything_trained),
    "other modules beside": (
        {"target_modules": ["q_proj", "embed_tokens", "gate_proj"], "modules_to_save": ["lm_head"]},
        None,
    ),
}


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "name", thinned(COVERED_ADAPTERS, lambda name: name in ("two active", "base weights trained"))
)
def test_the_served_list(name, calls, float64_oracle):
    settings, change = COVERED_ADAPTERS[name]
    stock = with_adapters(build("qwen2", torch.float64, tie_word_embeddings=False), **settings)
    if change is not None:
        change(stock)
    if name != "dropout":
        check(stock, calls, saves="auto")
        assert calls
        return
    # Chunks draw their own masks: with one chunk they are those of the whole sequence.
    assert (
        check(stock, calls, "plain", saves=("attn_out", "kv", "*"), chunk_size=64, rows="as_given")
        > 0
    )
    both_gradients = []
    for kernels in ("auto", "own"):
        ours = streamed(stock, kernels=kernels)
        seed_torch(3)
        both_gradients.append(gradients(ours, **make_batch("left-padded"))[1])
    assert worst_error(*both_gradients) <= MAX_RELATIVE_ERROR


def of_kernels(stock, mode="left-padded", steps=2, autocast=None, **settings):
    """Loss and gradients with peft's own code and with what "auto" makes of it."""
    results = []
    for kernels in ("own", "auto"):
        ours = streamed(stock, kernels=kernels, **settings)
        for number in range(steps):
            seed_torch(number)
            with torch.autocast("cpu", autocast or HALF_DTYPE, enabled=autocast is not None):
                result = gradients(ours, **make_batch(mode))
        results.append((ours, *result))
    return results


def assert_same_bits(stock, calls, **settings):
    (_, loss, expected), (ours, our_loss, our_gradients) = of_kernels(stock, **settings)
    assert not calls
    assert torch.equal(our_loss, loss)
    assert our_gradients.keys() == expected.keys()
    assert all(torch.equal(our_gradients[name], gradient) for name, gradient in expected.items())
    return str(streambp.describe(ours))


FALLBACK_ADAPTERS = {
    "DoRA": ({"use_dora": True}, None, torch.float32, "DoraLinearVariant"),
    "float16": ({}, None, torch.float16, "float16"),
    "hooks inside": ({}, "hooks", torch.float32, "hooks"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", thinned(FALLBACK_ADAPTERS, lambda name: name == "DoRA"))
def test_what_falls_back_is_peft_to_the_bit(name, calls):
    settings, change, dtype, why = FALLBACK_ADAPTERS[name]
    stock = with_adapters(build("qwen3", dtype), dtype, **settings)
    if change == "hooks":
        for module in adapters_of(stock):
            module.lora_A["default"].register_forward_hook(
                lambda module, args, output: output * 1.5
            )
    description = assert_same_bits(stock, calls, saves=("attn_out", "kv", "*"))
    assert "14 Linears with adapters are computed by peft's code" in description
    assert why in description


# The dtypes of adapters and autocast beside a float32 model; what `describe` says after the call.
FALLS_BACK_IN_A_CALL = {
    "autocast to float16": (torch.float32, torch.float16, "it is computed in float16"),
    "narrower adapters": (
        torch.bfloat16,
        None,
        "its adapter is bfloat16, and it is computed in float32",
    ),
}
SCALE = 2.0**16  # of a GradScaler


def with_adapters_in(dtype, seed=0):
    """With adapters of a few steps' size, so that their own rounding is not all of the error."""
    stock = with_adapters(build("qwen3", seed=seed, hidden_size=64), torch.float32)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.05)
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
    return stock


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", FALLS_BACK_IN_A_CALL)
def test_what_falls_back_in_a_call_is_named(name, calls):
    dtype, autocast, why = FALLS_BACK_IN_A_CALL[name]
    (_, loss, _), (ours, our_loss, _) = of_kernels(with_adapters_in(dtype), autocast=autocast)
    assert not calls
    assert torch.equal(our_loss, loss)
    description = str(streambp.describe(ours))
    assert "14 Linears with adapters are computed by peft's code" in description
    assert "as one operation" not in description
    assert why in description


def errors_of_a_call(name, calls):
    dtype, autocast, _ = FALLS_BACK_IN_A_CALL[name]
    for seed in itertools.count():
        stock, batch = with_adapters_in(dtype, seed), make_batch("plain", length=97, seed=seed)
        true = gradients(copy.deepcopy(stock).float(), **batch)[1]
        pair = []
        for model in (streamed(stock, chunk_size=11), stock):
            with torch.autocast("cpu", autocast or HALF_DTYPE, enabled=autocast is not None):
                scaled = gradients(model, SCALE, **batch)[1]
            pair.append({path: gradient.double() / SCALE for path, gradient in scaled.items()})
        assert not calls
        yield [relative_l2(unscaled, true) for unscaled in pair]


@pytest.mark.full
@pytest.mark.parametrize("name", FALLS_BACK_IN_A_CALL)
def test_what_falls_back_in_a_call_is_as_precise_as_peft(name, calls):
    """With the factor of a GradScaler, by which nothing underflows. The products of peft's inner
    Linears are summed over chunks in float32: each chunk's rounded alone, the error was 1.10 times
    peft's."""
    assert_as_precise(errors_of_a_call(name, calls))


def check_first_step(name, calls, saves=("attn_out", "kv", "*")):
    dtype, autocast, _ = FALLS_BACK_IN_A_CALL[name]
    ours = streamed(with_adapters_in(dtype), saves=saves, chunk_size=11)
    steps = []
    for _ in range(2):
        with torch.autocast("cpu", autocast or HALF_DTYPE, enabled=autocast is not None):
            steps.append(gradients(ours, SCALE, **make_batch("plain", length=34))[1])
    assert not calls
    first, later = steps
    assert later.keys() == first.keys()
    assert all(torch.equal(later[path], gradient) for path, gradient in first.items())


@pytest.mark.parametrize(
    ("name", "saves"),
    thinned(
        itertools.product(FALLS_BACK_IN_A_CALL, ((), ("attn_out", "kv", "*"), "auto")),
        lambda name, saves: (name, saves) == ("narrower adapters", ()),
    ),
)
def test_the_first_step_of_what_falls_back_in_a_call_is_as_later_ones(name, saves, calls):
    """Its backward sums in float32, too, though the first forward sets attributes of the layer, so
    that its Linears are read again before backward."""
    check_first_step(name, calls, saves)


def test_mutant_of_the_first_step(calls, monkeypatch):
    monkeypatch.setattr(site_module, "keep_reasons", lambda earlier_reasons, layer_states: None)
    with pytest.raises(AssertionError):
        check_first_step("narrower adapters", calls)


@pytest.mark.full
@pytest.mark.parametrize("saves", [(), ("attn_out", "kv", "*")])
def test_a_step_after_one_that_fell_back_is_as_ever(saves, calls):
    """What the step before ran in peft's code is known when the next one begins."""
    stock, batch = with_adapters_in(torch.float32), make_batch("plain", length=34)
    ours = streamed(stock, saves=saves, chunk_size=11)
    with torch.autocast("cpu", torch.float16):
        gradients(ours, SCALE, **batch)
    assert not calls
    our_gradients = gradients(ours, **batch)[1]
    assert calls
    expected = gradients(streamed(stock, saves=saves, chunk_size=11), **batch)[1]
    assert all(torch.equal(our_gradients[path], gradient) for path, gradient in expected.items())


def test_describe_speaks_of_the_last_call():
    ours = streamed(with_adapters(build("qwen3"), torch.float32), saves=())
    for autocast, expected in ((torch.float16, "by peft's code"), (None, "as one operation")):
        with torch.autocast("cpu", autocast or HALF_DTYPE, enabled=autocast is not None):
            gradients(ours, **make_batch("plain"))
        assert f"14 Linears with adapters are computed {expected}" in str(streambp.describe(ours))


@pytest.mark.full
def test_own_kernels_are_peft_to_the_bit(calls):
    """And `describe` says nothing of adapters."""
    stock = with_adapters(build("qwen3"), torch.float32)
    (ours, _, own_gradients), (auto_model, _, _) = of_kernels(stock)
    assert "with adapters" not in str(streambp.describe(ours))
    assert "14 Linears with adapters are computed as one operation" in str(
        streambp.describe(auto_model)
    )
    seed_torch(0)
    second_gradients = gradients(streamed(stock, kernels="own"), **make_batch("left-padded"))[1]
    assert all(
        torch.equal(second_gradients[name], gradient) for name, gradient in own_gradients.items()
    )


@pytest.mark.full
def test_adapters_that_change_between_steps(calls, float64_oracle):
    """Each step is that of the unpatched model as it is then, and `unpatch` leaves nothing
    behind."""
    stock = with_adapters(build("qwen3", torch.float64))
    ours = streamed(stock, saves="auto")
    batch = make_batch("left-padded")
    changes = {
        "as they are": lambda model: None,
        "scaled": lambda model: [module.scale_layer(3.0) for module in adapters_of(model)],
        "switched off": lambda model: [
            module.enable_adapters(False) for module in adapters_of(model)
        ],
        "on again": lambda model: [module.enable_adapters(True) for module in adapters_of(model)],
        "merged": lambda model: model.merge_adapter(),
        "unmerged": lambda model: model.unmerge_adapter(),
        "another added": two_active,
    }
    for name, change in changes.items():
        calls.clear()
        for model in (stock, ours):
            change(model)
            if name in ("switched off", "merged"):
                model.requires_grad_(True)
            else:
                for path, parameter in model.named_parameters():
                    parameter.requires_grad_("lora_" in path)
        (loss, our_gradients), (expected_loss, expected) = (
            gradients(ours, **batch),
            gradients(stock, **batch),
        )
        assert abs(loss - expected_loss) <= MAX_RELATIVE_ERROR * abs(expected_loss), name
        assert worst_error(our_gradients, expected) <= MAX_RELATIVE_ERROR, name
        assert bool(calls) == (name not in ("switched off", "merged")), name
    streambp.unpatch(ours)
    assert not any("forward" in vars(module) for module in adapters_of(ours))


class Fails(TorchDispatchMode):
    """Raises at the first activation of an MLP."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.silu.default:
            raise RuntimeError("a failure inside a layer")
        return func(*args, **(kwargs or {}))


def test_an_error_in_a_step_leaves_modules_as_they_were(calls):
    """In a step that makes no trial: a trial would put modules back by itself."""
    ours = streamed(with_adapters(build("qwen3"), torch.float32))
    gradients(ours, **make_batch("plain"))
    with Fails(), pytest.raises(RuntimeError, match="a failure inside"):
        gradients(ours, **make_batch("plain"))
    assert not any("forward" in vars(module) for module in adapters_of(ours))
    assert gradients(ours, **make_batch("plain"))[1]
    assert calls


@pytest.mark.full
def test_what_saves_name(calls):
    """A Linear's name stands for its output with the adapters'; the products of adapters are
    nobody's to save."""
    stock = with_adapters(build("qwen3"), torch.float32)
    ours = streamed(stock, saves=("*",))
    gradients(ours, **make_batch("plain"))
    layer_state = ours._streambp.steps.layer_states[0]
    assert set(layer_state.linears) == {f"self_attn.{name}_proj" for name in "qkvo"} | {
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    }
    (unread,) = layer_state.tests.unread.values()
    assert "mlp.down_proj" in unread.recompute


def test_a_wrong_trace_is_found(monkeypatch):
    """Of products with adapters, too: a trial leaves them out."""
    real = trials.trace

    def trace(linears, run):
        flow = real(linears, run)
        flow.read = frozenset()
        return flow

    monkeypatch.setattr(trials, "trace", trace)
    ours = streamed(with_adapters(build("qwen3"), torch.float32), saves=())
    gradients(ours, **make_batch("plain"))
    for layer_state in ours._streambp.steps.layer_states:
        assert {
            name for unread in layer_state.tests.unread.values() for name in unread.recompute
        } <= {"mlp.down_proj"}


def stacks_of_a_step(monkeypatch, engine_ownership=False, share=1e-9, ends=None, **settings):
    """Weak references to all factors that a step has made, its gradients, and its loss."""
    references, real = [], adapters.factor_of

    def factor_of(*args):
        factor = real(*args)
        references.append(weakref.ref(factor.stack))
        return factor

    ours = streamed(with_adapters(build("qwen3"), torch.float32), saves=("attn_out",), **settings)
    gradients(ours, **make_batch("left-padded"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "factor_of", factor_of)
        patch.setattr(call, "MIN_INPUT_FACTOR_RATIO", share)
        if engine_ownership:
            patch.setattr(call, "engine_ownership", lambda layer: EngineOwnership(True, True))
        if ends == "no backward":
            loss = ours(**make_batch("left-padded"), use_cache=False).loss.detach()
            return references, {}, loss
        if ends == "no grad":
            with torch.no_grad():
                return references, {}, ours(**make_batch("left-padded"), use_cache=False).loss
        loss = ours(**make_batch("left-padded"), use_cache=False).loss
        loss.backward(retain_graph=ends == "graph retained")
    return (
        references,
        {name: p.grad for name, p in ours.named_parameters() if p.grad is not None},
        loss,
    )


FACTORS_OF_A_STEP = 2 * 14  # A and B of each of two layers' seven Linears


def check_once(monkeypatch):
    references, our_gradients, loss = stacks_of_a_step(monkeypatch)
    assert len(references) == FACTORS_OF_A_STEP
    second_references, expected, second_loss = stacks_of_a_step(monkeypatch, share=1e9)
    assert len(second_references) == 2 * FACTORS_OF_A_STEP
    assert torch.equal(loss, second_loss)
    assert all(torch.equal(our_gradients[name], gradient) for name, gradient in expected.items())


@pytest.mark.full
def test_factors_are_made_once_a_step(monkeypatch):
    """For all chunks, forward and backward: to the bit as if each pass had made its own."""
    check_once(monkeypatch)


def check_engine(monkeypatch):
    references, *_ = stacks_of_a_step(monkeypatch, engine_ownership=True)
    assert len(references) == 2 * FACTORS_OF_A_STEP


def test_where_an_engine_gathers_parameters_each_pass_makes_its_own(monkeypatch):
    """Versions of what it gathers tell nothing, and its copies of parameters are not to stay."""
    check_engine(monkeypatch)


def check_freed(monkeypatch, ends=None, **settings):
    references, _, loss = stacks_of_a_step(monkeypatch, ends=ends, **settings)
    gc.collect()
    assert references
    assert loss is not None
    assert not any(reference() is not None for reference in references)


@pytest.mark.fast(4)
@pytest.mark.parametrize("ends", [None, "graph retained", "no backward", "no grad"])
def test_no_factor_stays_alive_after_a_step(ends, monkeypatch):
    """Though the program holds its loss."""
    check_freed(monkeypatch, ends)


def test_no_factor_of_a_kept_graph_stays_alive(monkeypatch):
    check_freed(monkeypatch, chunk_size=64)


def factors_that_stay(monkeypatch):
    factors, real = [], Adaptation._cached_factor

    def keep_factor(self, *args):
        factors.append(real(self, *args))
        return factors[-1]

    monkeypatch.setattr(Adaptation, "_cached_factor", keep_factor)


def factors_of_each_pass(monkeypatch):
    real = call.LayerCall.prepare_layer
    monkeypatch.setattr(
        call.LayerCall, "prepare_layer", lambda self, keeps_factors=False: real(self)
    )


def engines_are_overlooked(monkeypatch):
    monkeypatch.setattr(call.LayerCall, "_can_keep_factors", lambda self: True)


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("mutant", "failing_check"),
    [
        (factors_that_stay, check_freed),
        (factors_of_each_pass, check_once),
        (engines_are_overlooked, check_engine),
        (engines_are_overlooked, check_once),  # and so is the layer's input
    ],
)
def test_mutants_of_once_a_step(mutant, failing_check, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        failing_check(monkeypatch)


def in_pefts_way(monkeypatch):
    """Values that are known are computed all the same, and their adapters' gradients are lost."""
    real = operation._backward
    monkeypatch.setattr(
        operation,
        "_backward",
        lambda ctx, grad: (*real(ctx, grad)[:4], *[None] * (len(ctx.needs_input_grad) - 4)),
    )


def nothing_is_put_back(monkeypatch):
    contexts = []

    class Stays:
        def __init__(self, *args):
            self.context = adapters.fuse_adapters(*args)
            contexts.append(self.context)

        def __enter__(self):
            self.context.__enter__()

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(call, "fuse_adapters", Stays)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mutant", "failing_check"),
    [
        (
            in_pefts_way,
            lambda calls: test_float64(("attn_out", "kv", "*"), "none", 5, "packed", calls, None),
        ),
        (nothing_is_put_back, test_an_error_in_a_step_leaves_modules_as_they_were),
    ],
)
def test_mutants(mutant, failing_check, calls, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        failing_check(calls)


def error_of(computed, true):
    return (
        sum(float((computed[n].double() - g.double()).square().sum()) for n, g in true.items())
        ** 0.5
    )


def in_half(family, seed, std, autocast=False, wide=True):
    """Our error and peft's, of the whole gradient of a streamed model in bfloat16, against
    float32."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    base = build(family, torch.bfloat16, seed, **sizes)
    seed_torch(1000 + seed)
    config = peft.LoraConfig(r=8, target_modules="all-linear")
    stock = peft.get_peft_model(base, config, autocast_adapter_dtype=wide)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, std)
    batch = make_batch("plain", length=97, seed=2000 + seed)
    true = gradients(copy.deepcopy(stock).float(), **batch)[1]
    ours = streamed(stock, chunk_size=40, saves=("attn_out", "kv", "*"))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        both_gradients = [gradients(model, **batch)[1] for model in (ours, stock)]
    return [error_of(computed, true) for computed in both_gradients]


@pytest.mark.full
@pytest.mark.parametrize("std", [0.02, 0.2])
@pytest.mark.parametrize(
    ("family", "autocast", "wide"),
    [
        ("qwen3", False, True),
        ("qwen2", False, True),
        ("qwen3", True, True),
        ("qwen3", False, False),
        ("qwen2", True, False),
    ],
    ids=["qwen3", "qwen2", "autocast", "bfloat16 adapters", "qwen2, both"],
)
def test_bfloat16_is_as_precise_as_peft(family, autocast, wide, std):
    """Both are draws of one noise: the ratio of their means over models is known to its standard
    error."""
    pairs = [in_half(family, seed, std, autocast, wide) for seed in range(16)]
    ours, pefts = (statistics.fmean(column) for column in zip(*pairs, strict=True))
    ratio = ours / pefts
    off = [(our_error - ratio * peft_error) / pefts for our_error, peft_error in pairs]
    error = statistics.stdev(off) / len(off) ** 0.5
    print(f"{ratio:.3f} +- {error:.3f} of peft's own error over {len(pairs)} models")
    assert ratio <= PRECISE + error


def check_truth(monkeypatch):
    settings = []

    def of(model, **batch):
        settings.append((next(model.parameters()).dtype, torch.is_autocast_enabled("cpu")))
        return None, {"x": torch.full((1,), float(len(settings)))}

    monkeypatch.setattr(lora_precision, "gradients", of)
    lora_precision.measured(lora_precision.SetUp("qwen2", False, True, 0.02), 2, False)
    assert sorted(settings, key=str) == [(HALF_DTYPE, True)] * 4 + [(torch.float32, False)] * 2


def test_the_table_of_precision_compares_with_float32_outside_autocast(monkeypatch):
    """Of each model: the first one's autocast once stayed on for the truth of all others."""
    check_truth(monkeypatch)


def errors_one_by_one(monkeypatch):
    """They wait under autocast until the next one is asked for. Returns all that wait."""
    waiting = []

    def errors(set_up, seed, why):
        waiting.append(errors_of_model(set_up, seed, why))
        return waiting[-1]

    def errors_of_model(set_up, seed, why):
        stock = lora_precision.model_of(set_up, seed)
        true = lora_precision.gradients(copy.deepcopy(stock).float())[1]
        with torch.autocast("cpu", HALF_DTYPE, enabled=set_up.autocast):
            for _ in range(2):
                yield lora_precision.error(lora_precision.gradients(stock)[1], true)

    monkeypatch.setattr(lora_precision, "errors", errors)
    return waiting


def test_mutant_of_the_table(monkeypatch):
    waiting = errors_one_by_one(monkeypatch)
    with pytest.raises(AssertionError):
        check_truth(monkeypatch)
    for generator in waiting:
        generator.close()
    # Each has restored what it found, which another one's autocast may have been.
    torch.set_autocast_enabled("cpu", False)


@pytest.mark.parametrize("kernels", ["own", "auto"])
def test_no_memory_is_spent_on_the_products_of_adapters(kernels, monkeypatch):
    """They take as long to read as to compute again."""
    recorded, real = [], saved_tensors.Cost
    monkeypatch.setattr(
        saved_tensors,
        "Cost",
        lambda **costs: (recorded.append(costs["products"]), real(**costs))[1],
    )
    ours = streamed(with_adapters(build("qwen3"), torch.float32), saves="auto", kernels=kernels)
    gradients(ours, **make_batch("plain"))
    names = {name for products in recorded for name in products}
    assert {name.removesuffix(".base_layer") for name in names} >= {
        "mlp.gate_proj",
        "self_attn.q_proj",
    }
    assert not any("lora_" in name for name in names)
