"""Estimates against measured allocator peaks, against another estimator's figures, and against
themselves.

covers: planner/compose.py, planner/count.py, planner/estimate.py, planner/measure.py,
  planner/profile.py, planner/skeleton.py, planner/survey.py, planner/tree.py
"""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import streambp
from streambp.errors import ConfigError
from streambp.planner import Setting, estimate, peak
from streambp.planner import profile as module
from streambp.planner.compose import unroll
from streambp.planner.configuration import read_config
from streambp.planner.count import StepCount, aten
from streambp.planner.estimate import BASELINES
from streambp.planner.laws import Law, fit_bytes
from streambp.planner.profile import (
    Method,
    Node,
    ParameterGroup,
    Phase,
    Profile,
    from_json,
    to_json,
    work,
)
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import (
    CHECKPOINTING_RECIPE,
    STREAMED_RECIPES,
    Counter,
    parameter_groups,
    streamed_recipe,
    survey,
)
from tests import zoo
from tests.families import build
from tests.model import test_families
from tests.planner.laws import made_work
from tests.planner.megatron import Parallelism, static_bytes
from tests.versions import ROUTING_VERSIONS

GIB = 2**30
QWEN3_8B = Qwen3Config(
    hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    num_hidden_layers=36, vocab_size=151936,
)  # fmt: skip
SMALL_CONFIG = Qwen3Config(
    hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=3,
    vocab_size=1000,
)  # fmt: skip
DEEP_CONFIG = Qwen3Config(**{**SMALL_CONFIG.to_dict(), "num_hidden_layers": 7, "layer_types": None})
# Allocator peaks of forward and backward on one H200, bf16, batch 1, gradients None at the start
# (DESIGN.md section 6).
MEASURED = {
    ("checkpointing", 16384): 48.15,
    ("checkpointing, fused head", 16384): 33.44,
    ("checkpointing, fused head", 65536): 51.25,
}  # fmt: skip
WEIGHTS = 15.3
NOT_IN_HALF = ("xlstm",)  # transformers' own mixes float32 with it, unpatched as well
# Static GiB of Qwen3-30B-A3B on 32 GPUs, as a Megatron estimator prints them (seed 001).
MEGATRON = [
    ("none", Parallelism(32), 181.2),
    ("TP4", Parallelism(32, tensor=4, expert_tensor=4), 53.29),
    ("PP4", Parallelism(32, pipeline=4), 54.38),
    ("EP8", Parallelism(32, expert=8), 39.45),
    ("EP32", Parallelism(32, expert=32), 24.26),
    ("TP2 EP8", Parallelism(32, tensor=2, expert=8), 35.18),
]


def test_peaks_on_an_h200_within_five_percent():
    skeleton = Skeleton(QWEN3_8B, torch.bfloat16, None, 16, "cuda")
    profile = survey(skeleton, BASELINES[1:], tree=False)
    for (name, length), measured in MEASURED.items():
        predicted = peak(profile, profile.method(name), length, 0, Setting(optimizer=0)).total / GIB
        ratio = (predicted - WEIGHTS) / (measured - WEIGHTS)
        print(
            f"{name}, T = {length:,}: {predicted:.2f} GiB, measured {measured}; beyond the weights "
            f"{100 * (ratio - 1):+.2f} %"
        )
        assert abs(ratio - 1) <= 0.05


def test_static_memory_equals_megatrons_estimates():
    config = Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, vocab_size=151936, tie_word_embeddings=False,
    )  # fmt: skip
    skeleton = Skeleton(config, torch.bfloat16, None, 16, "cuda")
    dense, expert = (group.parameters for group in parameter_groups(skeleton.model))
    print(f"dense {dense / 1e9:.3f}B, expert {expert / 1e9:.3f}B parameters")
    for name, parallelism, theirs in MEGATRON:
        predicted = static_bytes(dense, expert, 151936 * 2048, parallelism) / GIB
        print(f"{name:8} {predicted:7.2f} GiB, seed {theirs}")
        assert predicted == pytest.approx(theirs, rel=4e-3)


@functools.cache
def quick_small(lora=None, bits=16):
    """Once for all tests that ask for nothing else."""
    return quick(SMALL_CONFIG, lora, bits)


def quick(source, lora=None, bits=16):
    """The profile of a streamed step."""
    skeleton = Skeleton(source, torch.bfloat16, lora, bits, "cuda")
    return survey(skeleton, [streamed_recipe()], at=(512, 256), accumulating=False, tree=False)


def made_up(**changes):
    """A profile with round numbers."""
    phases = (Phase("forward 0", Law(0, 10, 1)), Phase("backward 0", Law(1000, 8, 5), 400))
    method = Method(
        "streambp", (), "none", False, True, phases, phases[:1], Law(7, 2), made_work(3, 0.5)
    )
    groups = (
        ParameterGroup("dense", 100, 200, 100, 200),
        ParameterGroup("expert", 400, 800, 400, 800),
    )
    profile = Profile(
        "made up", "bfloat16", 1, 1, groups, 50, (method,), Node("", "M", 1, 500, 0.0)
    )
    return dataclasses.replace(profile, **changes)


def check_peak_by_hand():
    profile = made_up()
    method = profile.methods[0]
    predicted = peak(profile, method, 100, 10, Setting())
    # weights 1,000, optimizer 12 x 500, forward 100 x 10 + 10, backward 1,000 + 800 + 50
    assert (predicted.total, predicted.phase) == (1000 + 6000 + 1850, "backward 0")
    assert (predicted.gradients, predicted.activations, predicted.host) == (400, 1450, 207)
    accumulating = peak(profile, method, 100, 10, Setting(accumulate=True))
    assert (accumulating.total, accumulating.phase) == (1000 + 6000 + 1000 + 1010, "forward 0")
    phases = (Phase("backward 0", Law(1000, 8, 5, 30), 400),)
    states = dataclasses.replace(method, first=phases, host=Law(7, 2, chunks=20))
    predicted = peak(profile, states, 105, 10, Setting())  # 11 chunks
    assert (predicted.total, predicted.host) == (1000 + 6000 + 1000 + 840 + 50 + 330, 7 + 210 + 220)
    # one chunk, of all tokens
    assert peak(profile, states, 5, 10, Setting()).total == 1000 + 6000 + 1000 + 40 + 25 + 30


def check_static_by_hand():
    profile = made_up()
    static = module.bytes_between_steps
    assert static(profile, Setting(gpus=4)).optimizer == 6000
    assert static(profile, Setting(gpus=4, zero=1)).optimizer == 1500
    assert static(profile, Setting(gpus=4, zero=2)).gradients == 250
    assert static(profile, Setting(gpus=4, zero=3)).weights == 300  # a fourth, and what is gathered
    expert = static(profile, Setting(gpus=4, zero=1, expert_parallel=2))
    assert expert.weights == 200 + 400
    assert expert.optimizer == 12 * (100 / 4 + 400 / 2 / 2)  # each group with its own R
    assert static(profile, Setting(optimizer_on_host=True)).host == 6000
    assert static(profile, Setting(gradient_bytes=4)).gradients == 2000


def test_peak_by_hand():
    check_peak_by_hand()


def test_static_by_hand():
    check_static_by_hand()


def test_zero_shares_gradients_that_are_born():
    profile = made_up()
    predicted = peak(profile, profile.methods[0], 100, 10, Setting(gpus=4, zero=2, optimizer=0))
    assert predicted.gradients == 100
    assert predicted.total == 1000 + 100 + 1450


def test_sequence_parallelism_divides_the_tokens():
    profile = made_up()
    predicted = peak(profile, profile.methods[0], 200, 10, Setting(gpus=2, ulysses=2))
    assert predicted == peak(profile, profile.methods[0], 100, 10, Setting())


@pytest.mark.full
def test_json_gives_the_same_peaks():
    profile = survey(
        Skeleton(SMALL_CONFIG, torch.bfloat16, None, 16, "cuda"),
        [streamed_recipe(("attn_out",), "cpu")],
        at=(512, 256),
    )
    restored = from_json(json.loads(json.dumps(to_json(profile))))
    assert restored == profile
    for setting in (Setting(), Setting(gpus=8, zero=3, accumulate=True)):
        assert peak(restored, restored.methods[0], 10**6, 4096, setting) == peak(
            profile, profile.methods[0], 10**6, 4096, setting
        )


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    [STREAMED_RECIPES[4], pytest.param(STREAMED_RECIPES[0], marks=pytest.mark.full)],
    ids=lambda recipe: recipe.name,
)
def test_lines_hold_at_other_lengths(recipe):
    """Lines are counted at 32k and 40k tokens; here they meet a count at 96k in other chunks."""
    point = (98304, 6144)
    skeleton = Skeleton(DEEP_CONFIG, torch.bfloat16, None, 16, "cuda")
    profile = survey(skeleton, [recipe], tree=False, accumulating=False)
    counter = Counter(skeleton, skeleton.reduce(), 1, "cudnn")
    counter.shrunk_model = Skeleton(DEEP_CONFIG, torch.bfloat16, None, 16, "cuda").reduce()
    counter.uses_fused_kernel(recipe)  # the layers' trials, which a later step has behind it
    (spans,) = counter.count(recipe, point, accumulate=False)
    counted, host, counted_works, _ = unroll(spans, counter.shrunk_model)
    method = profile.methods[0]
    predicted = peak(profile, method, *point, Setting(optimizer=0)).phases
    weights = profile.groups[0].bytes
    for name, total in predicted.items():
        exact = next(c.peak for c in counted if c.name == name)
        print(f"{name}: {(total - weights) / exact - 1:+.4%}")
        assert total - weights == pytest.approx(exact, rel=0.01)
    assert method.host.tokens * point[0] + method.host.constant == pytest.approx(
        host, rel=0.01, abs=1
    )
    for name in ("forward", "head", "backward"):
        predicted_work, counted_work = work(method, *point)[name], counted_works[name]
        for field, exact, law in zip(
            predicted_work._fields, counted_work, predicted_work, strict=True
        ):
            assert law == pytest.approx(exact, rel=0.02, abs=1e-3), (name, field)


@pytest.mark.full
def test_flops_are_those_of_the_formula():
    """A Linear does 2 x parameters FLOPs a token forward and twice that backward; without
    checkpointing nothing twice."""
    counted = estimate(SMALL_CONFIG, 512)
    method = counted.profile.method("plain")
    layers = 3 * (128 * (4 + 2 + 2) * 32 + 4 * 32 * 128 + 3 * 128 * 384)
    parts = work(method, 512, 0).values()
    assert sum(part.products for part in parts) == pytest.approx(
        512 * 6 * (layers + 1000 * 128), rel=1e-3
    )
    pairs = 512**2 / 2
    assert sum(part.forward for part in parts) == pytest.approx(3 * 4 * 4 * 32 * pairs, rel=1e-3)
    assert sum(part.backward for part in parts) == pytest.approx(3 * 10 * 4 * 32 * pairs, rel=1e-3)
    for source in (counted, counted.profile):
        with pytest.raises(ConfigError, match=r"method is 'plainer'.*'plain'"):
            source.method("plainer")


@pytest.mark.full
def test_every_source_gives_the_same_numbers(tmp_path):
    SMALL_CONFIG.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SMALL_CONFIG, dtype=torch.bfloat16)
    assert all(quick(source) == quick_small() for source in (str(tmp_path), model))
    for source in (str(tmp_path / "config.json"), AutoConfig.from_pretrained(tmp_path)):
        fields = read_config(source).to_dict()
        assert {
            name for name, value in SMALL_CONFIG.to_dict().items() if fields[name] != value
        } <= {
            "_name_or_path",
            "architectures",
            "dtype",
        }


@pytest.mark.full
def test_a_model_is_left_as_it_was():
    model = build("qwen3", torch.bfloat16)
    streambp.patch(model, streambp.StreamConfig(chunk_size=5))
    parameters_before = {name: p.clone() for name, p in model.named_parameters()}
    quick(model)
    assert "_streambp" in model.__dict__
    assert len(model.model.layers) == 2
    assert all(
        torch.equal(p, parameters_before[name]) and p.grad is None
        for name, p in model.named_parameters()
    )


@pytest.mark.full
def test_adapters_train_and_the_rest_is_frozen():
    pytest.importorskip("peft", reason="peft is not installed")
    full, lora = quick_small(), quick_small(8)
    (group,) = lora.groups
    assert group.trainable == 3 * 8 * sum(
        (128 + 128, 128 + 64, 128 + 64, 128 + 128, 2 * (128 + 384), 384 + 128)
    )
    at = [peak(profile, profile.methods[0], 512, 256, Setting()) for profile in (lora, full)]
    assert at[0].optimizer == 12 * group.trainable
    assert at[0].total < at[1].total
    assert 0 < max(phase.gradients for phase in lora.methods[0].first) <= group.trainable_bytes


@pytest.mark.full
@pytest.mark.parametrize(
    ("bits", "size"), [(4, 0.5 + 4 / 64), pytest.param(8, 1.0, marks=pytest.mark.full)]
)
def test_a_quantised_base_is_small(bits, size):
    pytest.importorskip("peft", reason="peft is not installed")
    wide, narrow = quick_small(8), quick_small(8, bits)
    linears = 3 * (128 * (4 + 2 + 2) * 32 + 4 * 32 * 128 + 3 * 128 * 384)
    saved = wide.groups[0].bytes - narrow.groups[0].bytes
    assert saved == pytest.approx(linears * (2 - size), rel=1e-6)
    assert {group.trainable for group in narrow.groups} == {
        group.trainable for group in wide.groups
    }


def test_tied_weights_count_once():
    tied = Qwen3Config(**{**SMALL_CONFIG.to_dict(), "tie_word_embeddings": True})
    untied = parameter_groups(Skeleton(SMALL_CONFIG, torch.bfloat16, None, 16, "cuda").model)[
        0
    ].parameters
    assert (
        parameter_groups(Skeleton(tied, torch.bfloat16, None, 16, "cuda").model)[0].parameters
        == untied - 128000
    )


def test_the_tree_adds_up():
    profile = estimate(DEEP_CONFIG, 512).profile
    assert profile.tree.parameters == sum(group.parameters for group in profile.groups)
    layers = next(node for node in profile.tree.children[0].children if node.name == "layers")
    assert [(node.count, node.kind) for node in layers.children] == [(7, "Qwen3DecoderLayer")]
    assert layers.children[0].activation > 128 * 2 * 8  # its input, q, k, v and more, in bf16


def check_workspaces():
    """dQ in float32 and, for FlashAttention with grouped queries, dK and dV of every head."""
    q, k, v = (
        torch.empty(1, heads, 64, 32, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2)
    )
    lse, empty = torch.empty(1, 4, 64, device="meta"), torch.empty(0, device="meta")
    peaks = {}
    for kernels in (None, "cudnn", "flash"):
        with StepCount(kernels) as count:
            aten._scaled_dot_product_flash_attention_backward(
                q, q, k, v, q, lse, None, None, 64, 64, 0.0, True, empty, empty, scale=1.0
            )
        peaks[kernels] = count.peak
    outputs = 64 * 32 * 2 * (4 + 2 + 2)
    assert peaks[None] == outputs
    assert max(peaks["cudnn"], outputs) == max(4 * 4 * 64 * 33, outputs)
    assert peaks["flash"] == max(4 * 4 * 64 * 33 + 2 * 4 * 64 * 64, outputs)


def test_workspaces_of_kernels_are_counted():
    check_workspaces()


def test_a_plane_through_three_points():
    points = [(100, 10), (100, 20), (150, 10)]
    (plane,) = fit_bytes(points, [[3 + 2 * t + 5 * c] for t, c in points])
    assert plane == pytest.approx(Law(3, 2, 5))
    assert fit_bytes([(100, 0), (150, 0)], [[203], [303]])[0] == pytest.approx(Law(3, 2))


def test_a_fourth_point_tells_chunks_from_their_size():
    points = [(100, 20), (100, 5), (120, 20), (100, 10)]
    (plane,) = fit_bytes(points, [[3 + 2 * t + 5 * c + 7 * t // c] for t, c in points])
    assert plane == pytest.approx(Law(3, 2, 5, 7))


@pytest.mark.full
def test_a_method_that_cannot_be_counted_is_named(monkeypatch):
    """Unpatched methods are left out with the reason; a streamed step that cannot be counted
    raises."""
    skeleton = Skeleton(SMALL_CONFIG, torch.bfloat16, None, 16, "cuda")
    with monkeypatch.context() as patched:
        patched.setattr(
            type(skeleton.language_model), "gradient_checkpointing_enable", lambda *_, **__: 1 / 0
        )
        profile = survey(
            skeleton, [CHECKPOINTING_RECIPE, streamed_recipe()], at=(64, 32), accumulating=False
        )
    assert profile.left_out == ("checkpointing (ZeroDivisionError: division by zero)",)
    assert [method.name for method in profile.methods] == ["streambp"]
    skeleton = Skeleton(SMALL_CONFIG, torch.bfloat16, None, 16, "cuda")
    monkeypatch.setattr(
        type(skeleton.language_model.model.layers[0].mlp), "forward", lambda self, x: x.nonzero()
    )
    with pytest.raises(streambp.StreamBPError, match="could not be counted without data"):
        survey(skeleton, [streamed_recipe()], at=(64, 32))


@pytest.mark.fast("jetmoe")
@pytest.mark.parametrize(
    "family",
    [
        name if name in ("xlstm", "jetmoe") else pytest.param(name, marks=pytest.mark.full)
        for name in sorted(test_families.STREAMED_FAMILIES)
    ],
)
def test_every_family_that_streams_can_be_counted(family):
    dtype = torch.float32 if family in NOT_IN_HALF else torch.bfloat16
    skeleton = Skeleton(zoo.tiny_config(family), dtype, None, 16, "cuda")
    skeleton.language_model.config._experts_implementation = "grouped_mm"
    if family in ROUTING_VERSIONS:
        with pytest.raises(streambp.StreamBPError, match="could not be counted without data"):
            survey(skeleton, [streamed_recipe()], at=(64, 32), accumulating=False, tree=False)
        return
    profile = survey(skeleton, [streamed_recipe()], at=(64, 32), accumulating=False, tree=False)
    assert peak(profile, profile.methods[0], 64, 32, Setting()).activations > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((SMALL_CONFIG, 0), "seq_len is 0"),
        (("no/such/model/here", 64), "No model configuration"),
        ((torch.nn.Linear(2, 2), 64), "cannot be streamed"),
    ],
)
def test_what_cannot_be_estimated_is_named(arguments, words):
    with pytest.raises(streambp.StreamBPError, match=words):
        estimate(*arguments)


@pytest.mark.parametrize(
    "wrong", [{"gpus": 0}, {"zero": 4}, {"gpus": 4, "expert_parallel": 3}, {"optimizer": -1}]
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(streambp.StreamBPError, match=next(reversed(wrong))):
        Setting(**wrong)


@pytest.mark.full
def test_weights_that_zero_has_divided_are_counted_whole():
    model = build("qwen3", torch.bfloat16)
    full_methods = quick(model).methods
    for parameter in model.parameters():
        parameter.ds_id, parameter.ds_shape = 0, parameter.shape
        parameter.data = parameter.data.new_empty(0)
    assert quick(model).methods == full_methods


def test_wrong_bits_are_named():
    pytest.importorskip("peft", reason="peft is not installed")
    with pytest.raises(streambp.StreamBPError, match="bits is 3"):
        estimate(SMALL_CONFIG, 64, lora=8, bits=3)
