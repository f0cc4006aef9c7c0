"""What adapters cost by the planner: the bytes of skinny products, and of one operation instead of
peft's.

covers: planner/work.py, planner/survey.py, planner/profile_cache.py
"""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import Qwen3Config

from streambp.layer import adapted_linear as operation
from streambp.layer import adapters
from streambp.planner import work as work_module
from streambp.planner.profile import work
from streambp.planner.profile_cache import CountRequest
from streambp.planner.seconds import kernels
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import CHECKPOINTING_HEAD_RECIPE, Counter, streamed_recipe, survey
from streambp.planner.work import MAX_SKINNY_SIZE, Work, aten, work_of
from streambp.rates import DEVICES
from tests.planner.test_estimates import QWEN3_8B

pytest.importorskip("peft", reason="adapters need peft")

TOKENS, RANK = 2048, 8
# As wide, to their ranks, as those of models that are trained so: what adapters cost of the size of
# x and y must show.
SIZES = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
ALL_SAVES = streamed_recipe(("attn_out", "kv", "*"))
MAX_PEFT_SHARE = 0.25  # of the bytes that peft's adapters add under checkpointing


def frozen(kernels="auto"):
    skeleton = CountRequest(Qwen3Config(**SIZES), kernels=kernels).skeleton()
    skeleton.model.requires_grad_(False)
    skeleton.model.enable_input_require_grads()
    return skeleton


def with_lora(kernels="auto", bits=16):
    skeleton = CountRequest(Qwen3Config(**SIZES), lora=RANK, bits=bits, kernels=kernels).skeleton()
    skeleton.language_model.enable_input_require_grads()
    return skeleton


def spent(skeleton, recipe, chunk=TOKENS):
    """The work of the middle layer, forward and backward."""
    counter = Counter(skeleton, skeleton.reduce(), 1, "cudnn")
    (spans,) = counter.count(recipe, (TOKENS, chunk), accumulate=False)
    works_by_name = {
        name: [span.work for span in spans if span.name == name and span.layer == 1]
        for name in ("forward", "backward")
    }
    return {
        name: functools.reduce(lambda total, work: total.plus(work), works)
        for name, works in works_by_name.items()
    }


def added(recipe, kernels):
    """What adapters add to the middle layer, beside its frozen Linears."""
    bare, adapted = spent(frozen(kernels), recipe), spent(with_lora(kernels), recipe)
    return {name: adapted[name].plus(bare[name], -1) for name in adapted}


@pytest.fixture
def elementwise(monkeypatch):
    """Within the test, products move nothing but the sums that they add to."""
    monkeypatch.setattr(work_module, "MAX_SKINNY_SIZE", 0)


def test_elementwise_traffic(elementwise):
    ours, pefts = added(ALL_SAVES, "auto"), added(CHECKPOINTING_HEAD_RECIPE, "liger")
    total, theirs = (sum(work.traffic for work in works.values()) for works in (ours, pefts))
    print(f"{total / theirs:.3f} of peft's {theirs / TOKENS / 1024:.0f} KB a token of a layer")
    assert 0 < total <= MAX_PEFT_SHARE * theirs


@pytest.mark.full
def test_dispatches_of_a_forward():
    """Of a chunk behind the first one, which makes the factors: no more than peft's, views
    included."""
    dispatches = []
    for own_adapters in (False, True):
        skeletons = [with_lora("own" if own_adapters else "auto") for _ in range(2)]
        for skeleton in skeletons:
            skeleton.own_adapters = own_adapters
        one_chunk, two_chunks = (
            spent(skeleton, streamed_recipe(("attn_out", "kv")), chunk)["forward"].dispatches
            for skeleton, chunk in zip(skeletons, (TOKENS, TOKENS // 2), strict=True)
        )
        dispatches.append(two_chunks - one_chunk)
    print(f"{dispatches[0]:.0f} dispatches of a layer, {dispatches[1]:.0f} with peft's code")
    assert 0 < dispatches[0] <= dispatches[1]


def moved_and_products(bits, kernels="auto"):
    total = functools.reduce(Work.plus, spent(with_lora(kernels, bits), ALL_SAVES).values())
    return total.traffic, total.products


def check_four_bits():
    """Of 4-bit bases, too: their decoding apart, which is not counted, they cost what others do."""
    assert moved_and_products(4) == moved_and_products(16)


@pytest.mark.full
def test_four_bit_bases_are_one_operation():
    check_four_bits()
    assert moved_and_products(4)[0] < 0.6 * moved_and_products(4, "own")[0]


def test_eight_bit_bases_are_left_to_peft():
    assert moved_and_products(8) == moved_and_products(8, "own")


def test_mutant_of_four_bits(monkeypatch):
    monkeypatch.setattr(adapters, "has_packed_weight", lambda module: False)
    with pytest.raises(AssertionError):
        check_four_bits()


def test_skinny_products_count_their_bytes():
    with torch.device("meta"):
        x, a, out = torch.empty(TOKENS, 512), torch.empty(512, RANK), torch.empty(TOKENS, RANK)
        wide = torch.empty(512, MAX_SKINNY_SIZE + 1)
    skinny = work_of(aten.mm.default, (x, a), {}, out)
    assert (skinny.products, skinny.traffic) == (
        2 * x.numel() * RANK,
        4 * (x.numel() + a.numel() + out.numel()),
    )
    assert (
        work_of(aten.mm.default, (x, wide), {}, x.new_empty(TOKENS, MAX_SKINNY_SIZE + 1)).traffic
        == 0
    )
    cost = work_of(aten.addmm_.default, (out, x, a), {}, out)
    assert cost.traffic == 4 * (x.numel() + a.numel() + 2 * out.numel())


def passes_over_y(monkeypatch):
    real = operation._product
    monkeypatch.setattr(operation, "_product", lambda *args: (real(*args).float() * 1.0).bfloat16())


@pytest.mark.full
def test_mutant(elementwise, monkeypatch):
    passes_over_y(monkeypatch)
    with pytest.raises(AssertionError):
        test_elementwise_traffic(elementwise)


# Forward and backward of LoRA of rank 8 of an 8B model on one H100 of 80 GB, by this package's
# scripts, with peft's code: method, T, chunk, seconds, and how much of attention's forward backward
# computes again; None: as the method says.
LINEARS = ("self_attn.[qkvo]_proj", "mlp.gate_proj", "mlp.up_proj")
MEASURED_H100 = [
    (CHECKPOINTING_HEAD_RECIPE, 16_384, 16_384, 2.803, 0.0),
    (streamed_recipe(("attn_out", "kv", *LINEARS)), 16_384, 16_384, 2.577, None),
    (streamed_recipe(), 131_072, 8_192, 56.106, 21 / 36),
]
# What streamed steps are to take in one operation a Linear: method, T, chunk, seconds at most.
TARGET_CASES = [
    (streamed_recipe(("attn_out", "kv", *LINEARS)), 16_384, 16_384, 1.75),
    (streamed_recipe(("attn_out", "kv")), 65_536, 16_384, 14.2),
    (streamed_recipe(("attn_out",), "cpu"), 131_072, 16_384, 47.0),
]


def predicted(rows, own_adapters, fused=False):
    """Seconds of rows of an H100, and the rows.

    fused: adapted Linears are one operation also where the model is not streamed."""
    skeleton = Skeleton(QWEN3_8B, torch.bfloat16, RANK, 16, "cuda", None, "liger")
    skeleton.own_adapters = own_adapters
    recipes = list({recipe.name: recipe for recipe, *_ in rows}.values())
    with adapters.fuse_adapters(adapters.lora_modules_of(skeleton.model) if fused else {}):
        profile = survey(skeleton, recipes, accumulating=False, tree=False)
    for recipe, length, chunk, *measurements in rows:
        parts = work(profile.method(recipe.name), length, chunk)
        repeats = measurements[1] if len(measurements) > 1 else None
        if repeats is not None:
            parts["backward"] = parts["backward"]._replace(
                forward=repeats * parts["backward"].forward
            )
        total = functools.reduce(Work.plus, parts.values())
        spent_seconds = sum(kernels(total, DEVICES["H100"]))
        print(f"{recipe.name:70} {length:7,} predicted {spent_seconds:6.2f} s, {measurements[0]}")
        yield spent_seconds, measurements[0]


@pytest.mark.full
def test_measured_steps_with_pefts_code_within_three_percent():
    for estimate, measured in predicted(MEASURED_H100, own_adapters=True):
        assert abs(estimate / measured - 1) <= 0.03


# The same lengths under checkpointing that keeps attention's outputs, with peft's code: what TRL does.
MAX_BYTES_RATIO = 1.01
LENGTHS = (16_384, 65_536, 131_072)
TRL_CASES = [
    (CHECKPOINTING_HEAD_RECIPE, length, length, seconds, 0.0)
    for length, seconds in zip(LENGTHS, (2.86, 17.4, 50.8), strict=True)
]


@pytest.mark.full
def test_steps_in_one_operation():
    """They take less than with peft's code under checkpointing, and at most as long as one operation
    a Linear under checkpointing, which stands for packages that have one. At 131,072 tokens nearly
    all of it is attention, and both take the same time."""
    ours = [
        estimate
        for estimate, limit in predicted(TARGET_CASES, own_adapters=False)
        if estimate <= limit
    ]
    trl = [estimate for estimate, _ in predicted(TRL_CASES, own_adapters=True)]
    fused = [estimate for estimate, _ in predicted(TRL_CASES, own_adapters=True, fused=True)]
    assert len(ours) == len(LENGTHS)
    assert all(mine < theirs for mine, theirs in zip(ours, trl, strict=True))
    assert all(mine <= MAX_BYTES_RATIO * theirs for mine, theirs in zip(ours, fused, strict=True))
    assert all(
        fused_seconds < trl_seconds for fused_seconds, trl_seconds in zip(fused, trl, strict=True)
    )
    assert trl == pytest.approx([seconds for *_, seconds, _ in TRL_CASES], rel=0.02)
