"""What a plan chooses is the fastest of everything that fits, by the planner's own prediction, and
is within the budget.

covers: planner/plan.py, planner/seconds.py
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

from scripts.plan_time import configs
from streambp.planner import Memory, Setting
from streambp.planner.plan import CHUNK_TOKENS, choose, plan_profile
from streambp.planner.profile import Profile, peak
from streambp.planner.report import plan_table
from streambp.planner.seconds import seconds
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import STREAMED_RECIPES, survey
from streambp.rates import DEVICES
from tests.planner.test_estimates import DEEP_CONFIG
from tests.tiers import thinned

GIB = 2**30
RATES = DEVICES["H200"]
# what is as fast to half a percent is told apart by what it moves to the host, and then by its
# chunks
MAX_TIME_RATIO = 1.005
# the package's attribute of that name is the function
planning = sys.modules["streambp.planner.plan"]


class Grid(NamedTuple):
    """Lengths and memories at which one setting after the other is the best, and the small ones fit
    nothing."""

    config: PreTrainedConfig
    lengths: tuple[int, ...]
    memories: tuple[Memory, ...]
    setting: Setting
    recipes: Any = STREAMED_RECIPES


LENGTHS = tuple(2**n for n in (12, 14, 16, 18, 20))
GPUS = tuple(Memory(size * GIB, 256 * GIB) for size in (24, 48, 80, 141))
SHARDED = Setting(gpus=8, zero=3)
SMALL_GPUS = tuple(Memory(size, 2**32, reserve=0.0) for size in (2**26, 2**28, 2**30, 2**33))
LLAMA = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, vocab_size=128256, tie_word_embeddings=True,
)  # fmt: skip
TINY_GRID = Grid(DEEP_CONFIG, LENGTHS, SMALL_GPUS, Setting(optimizer=0), STREAMED_RECIPES[:5])


def grids():
    configs_by_name = {name: make() for name, make in configs().items()} | {"Llama-3.2-1B": LLAMA}
    return {"tiny": TINY_GRID} | {
        name: Grid(config, LENGTHS, GPUS, SHARDED) for name, config in configs_by_name.items()
    }


def profile_of(grid: Grid) -> Profile:
    return survey(
        Skeleton(grid.config, torch.bfloat16, None, 16, "cuda"),
        grid.recipes,
        accumulating=False,
        tree=False,
    )


def check_choices(profile: Profile, grid: Grid) -> set[str]:
    """Every method in every chunk size, one by one."""
    methods, slowest, largest, none = set(), 1.0, 0.0, 0
    for length in grid.lengths:
        peaks_and_seconds = []  # the memory does not change what a step takes
        for method in profile.methods:
            for chunk in CHUNK_TOKENS:
                at = peak(profile, method, length, chunk, grid.setting)
                peaks_and_seconds.append(
                    (at, seconds(method, length, chunk, RATES, grid.setting).total)
                )
        for memory in grid.memories:
            possible = [
                spent
                for at, spent in peaks_and_seconds
                if at.total <= memory.gpu * (1 - memory.reserve) and at.host <= memory.host
            ]
            choice = choose(profile, profile.methods, length, memory, grid.setting, RATES)
            if choice is None:
                assert not possible
                none += 1
                continue
            assert choice.seconds.total <= MAX_TIME_RATIO * min(possible)
            at_choice = peak(
                profile, profile.method(choice.method), length, choice.chunk_size, grid.setting
            )
            assert at_choice.total == choice.peak.total <= memory.usable
            assert at_choice.host == choice.peak.host <= memory.host
            slowest = max(slowest, choice.seconds.total / min(possible))
            largest = max(largest, choice.peak.total / memory.usable)
            methods.add(choice.method)
    print(
        f"{len(grid.lengths) * len(grid.memories)} cases, nothing fits in {none}; {len(methods)} "
        f"methods chosen, at most {100 * (slowest - 1):.2f} % slower than the fastest, at most "
        f"{100 * largest:.1f} % of the memory"
    )
    return methods


@pytest.fixture(scope="module")
def tiny():
    return profile_of(TINY_GRID)


@pytest.mark.full
@pytest.mark.parametrize("name", thinned(["tiny", "Qwen3-8B", "Qwen3-30B-A3B", "gemma3-27b", "Qwen3.5-9B", "Llama-3.2-1B"],
                                         lambda name: name == "tiny"))  # fmt: skip
def test_the_choice_is_the_fastest_that_fits(name, tiny):
    grid = grids()[name]
    assert len(check_choices(tiny if name == "tiny" else profile_of(grid), grid)) > 1


MUTANTS = {
    "by arithmetic": (
        "_fastest",
        lambda choices: min(choices, key=lambda choice: choice.flops, default=None),
    ),
    "whether it fits or not": ("fits", lambda at, memory: True),
    "the least on the host": (
        "_fastest",
        lambda choices: min(choices, key=lambda choice: choice.peak.host, default=None),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_another_choice_is_seen(name, tiny, monkeypatch):
    monkeypatch.setattr(planning, *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_choices(tiny, TINY_GRID)


@pytest.mark.full
def test_the_next_two_in_speed_are_named(tiny):
    memory, length = Memory(2**30, 2**32, reserve=0.0), 2**14
    plan = plan_profile(tiny, length, memory, TINY_GRID.setting)
    first, second = plan.next_fastest
    fitting = [timed for timed in plan.times if timed.fits and timed.method != plan.choice.method]
    assert [first.seconds, second.seconds] == sorted(timed.seconds for timed in fitting)[:2]
    assert plan.choice.method not in (first.method, second.method)
    assert f"next in speed: {first.method} in " in plan_table(plan)
