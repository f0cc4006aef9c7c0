"""Lines from few chunks are those from many, and from a second step at each point: the memory that
the planner says.

The MLPs are three times as wide as the model, as most are: where they are thin, attention makes the
peak of chunks of 2,048 tokens and not of larger ones, and lines from 4,096 and 8,192 are some
percent below a count there.

covers: planner/compose.py, planner/count.py, planner/sample_points.py, planner/survey.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, Qwen3Config, Qwen3MoeConfig

import streambp.planner.survey as module
from streambp.planner.compose import fit, unroll
from streambp.planner.laws import features, fit_bytes
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import CHECKPOINTING_RECIPE, STREAMED_RECIPES, Counter, survey

SHAPE = {
    "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 4, "vocab_size": 500,
}  # fmt: skip
# Sixteen chunks where there is no count for any length: a quarter of the length beyond the kernels'
# block, and of a chunk.
LENGTH, CHUNK, SMALL_CHUNK = 32_768, 8192, 2048
TILED_LENGTH, TILED_CHUNK = 8192, 2048


def configs():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    windows = {"sliding_window": 512, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    return {
        "qwen3": Qwen3Config(**SHAPE),
        "qwen3_moe": Qwen3MoeConfig(**SHAPE, **experts),
        "gemma3": Gemma3TextConfig(**SHAPE, **windows),
        "gemma2": Gemma2Config(**SHAPE, sliding_window=512),
    }


def with_many_chunks(config, recipe):
    """Lines through counts in four, five and sixteen chunks, with a first and a second step at each
    point."""
    skeleton = Skeleton(config, torch.bfloat16, None, 16, "cuda")
    counter = Counter(skeleton, skeleton.reduce(), 1, "cudnn")
    length, chunk, small = (LENGTH, CHUNK, SMALL_CHUNK)
    if not counter.uses_fused_kernel(recipe):
        length, chunk, small = TILED_LENGTH, TILED_CHUNK, TILED_CHUNK // 2
    points = [(length, 0), (length + chunk, 0)]
    if recipe.config is not None:
        points = [(length, chunk), (length, small), (length + chunk, chunk)]
    steps = [counter.count(recipe, point) for point in points]
    regimes = []
    for number in range(2):
        phases, hosts, _, _ = zip(
            *(unroll(step[number], counter.shrunk_model) for step in steps), strict=True
        )
        regimes.append(fit(points, phases, counter.shrunk_model))
    return regimes, fit_bytes(points, [[host] for host in hosts])[0]


def check(name, recipes):
    config, numbers = configs()[name], 0
    profile = survey(
        Skeleton(config, torch.bfloat16, None, 16, "cuda"), recipes, tree=False, timed=False
    )
    for method, recipe in zip(profile.methods, recipes, strict=True):
        (first, accumulating), host = with_many_chunks(config, recipe)
        for ours, theirs in ((method.first, first), (method.accumulating, accumulating)):
            if len(ours) == 2 * len(theirs):
                ours = ours[len(theirs) :]  # those of rows with a chunk more come second
            assert [phase.name for phase in ours] == [phase.name for phase in theirs]
            for counted_phase, expected in zip(ours, theirs, strict=True):
                numbers += 4
                assert counted_phase.law == pytest.approx(expected.law, abs=0.05), (
                    method.name,
                    counted_phase.name,
                )
        assert method.host[:2] == pytest.approx(host[:2], abs=0.05)
    print(f"{name}: {numbers} numbers")
    assert numbers > 60


QUICK, ALL = (STREAMED_RECIPES[0], STREAMED_RECIPES[4]), (CHECKPOINTING_RECIPE, *STREAMED_RECIPES)


@pytest.mark.full
def test_lines_of_few_chunks_are_those_of_many():
    check("qwen3", QUICK)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma3", "gemma2"])
def test_lines_of_few_chunks_are_those_of_many_in_every_kind_of_model(name):
    check(name, ALL)


@pytest.mark.full
def test_three_chunks_are_too_few_where_attention_outputs_leave(monkeypatch):
    """The comparison sees lines through fewer chunks than it takes."""
    monkeypatch.setattr(module, "points_of_more_chunks", lambda *_: ())
    with pytest.raises(AssertionError):
        check("qwen3", QUICK)


@pytest.mark.parametrize(
    "recipe", [STREAMED_RECIPES[1], STREAMED_RECIPES[5]], ids=lambda recipe: recipe.name
)
def test_a_step_is_counted_without_the_trials_that_the_first_one_makes(recipe):
    skeleton = Skeleton(configs()["qwen3"], torch.bfloat16, None, 16, "cuda")
    counter = Counter(skeleton, skeleton.reduce(), 1, "cudnn")
    assert counter.uses_fused_kernel(recipe)
    first, second = counter.count(recipe, (2048, 512))
    for first_span, second_span in zip(first, second, strict=True):
        if first_span.layer is not None:
            assert (first_span.work.products, first_span.work.forward) == (
                second_span.work.products,
                second_span.work.forward,
            ), first_span


@pytest.mark.fast(3)
@pytest.mark.parametrize("number", [0, 1, 2], ids=lambda number: STREAMED_RECIPES[number].name)
def test_what_leaves_for_the_host_moves_as_much_more_at_any_length(number):
    recipes = STREAMED_RECIPES[number], STREAMED_RECIPES[number + 3]
    assert recipes[0].config.saves == recipes[1].config.saves
    resident, offloaded = survey(
        Skeleton(configs()["qwen3"], torch.bfloat16, None, 16, "cuda"),
        recipes,
        accumulating=False,
        tree=False,
    ).methods
    skeleton = Skeleton(configs()["qwen3"], torch.bfloat16, None, 16, "cuda")
    counter = Counter(skeleton, skeleton.reduce(), 1, "cudnn")
    counter.uses_fused_kernel(recipes[0])
    point = 2 * LENGTH, CHUNK
    counted = [
        unroll(counter.count(recipe, point, accumulate=False)[0], counter.shrunk_model)[2]
        for recipe in recipes
    ]
    total_traffic = 0.0
    for resident_part, offloaded_part in zip(resident.work, offloaded.work, strict=True):
        resident_work, offloaded_work = (
            part.at(features(*point, k_block=part.k_block))
            for part in (resident_part, offloaded_part)
        )
        expected = counted[1][offloaded_part.name].traffic - counted[0][resident_part.name].traffic
        assert offloaded_work.traffic - resident_work.traffic == pytest.approx(
            expected, rel=1e-3, abs=1e3
        ), resident_part.name
        expected = (
            counted[1][offloaded_part.name].dispatches - counted[0][resident_part.name].dispatches
        )
        assert offloaded_work.dispatches - resident_work.dispatches == pytest.approx(
            expected, rel=0.15, abs=1
        ), resident_part.name
        total_traffic += (
            counted[1][offloaded_part.name].traffic - counted[0][resident_part.name].traffic
        )
    assert total_traffic > 0


def test_keys_on_the_host_take_no_less_work_than_keys_on_the_device():
    """Their functions are fitted through rows of many chunks. In rows of one chunk they said less
    than a step does whose keys stay on the device, so that plans chose them for short rows."""
    profile = survey(
        Skeleton(configs()["qwen3"], torch.bfloat16, None, 16, "cuda"),
        (STREAMED_RECIPES[3], STREAMED_RECIPES[6]),
        accumulating=False,
        tree=False,
    )
    on_device, on_host = profile.methods
    assert (on_device.prefix_on_host, on_host.prefix_on_host) == (False, True)
    lower = 0
    for length, chunk in ((256, 1024), (1024, 1024), (8192, 8192), (16_384, 8192), (65_536, 2048)):
        for bound, part in zip(on_device.work, on_host.work, strict=True):
            step = features(length, min(chunk, length), k_block=part.k_block)
            floors, work = bound.at(step), part.at(step)
            assert all(value >= floor for value, floor in zip(work, floors, strict=True))
            without_floors = dataclasses.replace(part, floors=()).at(step)
            lower += any(a < b for a, b in zip(without_floors, floors, strict=True))
    assert lower > 0
