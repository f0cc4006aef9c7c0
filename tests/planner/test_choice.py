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
from streambp.planner.survey import STREAMED, survey
from streambp.rates import DEVICES
from tests.planner.test_estimates import DEEP
from tests.tiers import thinned

GIB = 2**30
RATES = DEVICES["H200"]
CLOSE = 1.005  # what is as fast to half a percent is told apart by what it moves to the host, and then by its chunks
# the package's attribute of that name is the function
planning = sys.modules["streambp.planner.plan"]


class Grid(NamedTuple):
    """Lengths and memories at which one setting after the other is the best, and the small ones fit
    nothing."""

    config: PreTrainedConfig
    lengths: tuple[int, ...]
    memories: tuple[Memory, ...]
    setting: Setting
    recipes: Any = STREAMED


LENGTHS = tuple(2**n for n in (12, 14, 16, 18, 20))
GPUS = tuple(Memory(size * GIB, 256 * GIB) for size in (24, 48, 80, 141))
SHARDED = Setting(gpus=8, zero=3)
SMALL_GPUS = tuple(Memory(size, 2**32, reserve=0.0) for size in (2**26, 2**28, 2**30, 2**33))
LLAMA = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, vocab_size=128256, tie_word_embeddings=True,
)  # fmt: skip
TINY = Grid(DEEP, LENGTHS, SMALL_GPUS, Setting(optimizer=0), STREAMED[:5])


def grids():
    rest = {name: make() for name, make in configs().items()} | {"Llama-3.2-1B": LLAMA}
    return {"tiny": TINY} | {
        name: Grid(config, LENGTHS, GPUS, SHARDED) for name, config in rest.items()
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
    chosen, slowest, largest, none = set(), 1.0, 0.0, 0
    for length in grid.lengths:
        every = []  # the memory does not change what a step takes
        for method in profile.methods:
            for chunk in CHUNK_TOKENS:
                at = peak(profile, method, length, chunk, grid.setting)
                every.append((at, seconds(method, length, chunk, RATES, grid.setting).total))
        for memory in grid.memories:
            possible = [
                took
                for at, took in every
                if at.total <= memory.gpu * (1 - memory.reserve) and at.host <= memory.host
            ]
            found = choose(profile, profile.methods, length, memory, grid.setting, RATES)
            if found is None:
                assert not possible
                none += 1
                continue
            assert found.seconds.total <= CLOSE * min(possible)
            again = peak(
                profile, profile.method(found.method), length, found.chunk_size, grid.setting
            )
            assert again.total == found.peak.total <= memory.usable
            assert again.host == found.peak.host <= memory.host
            slowest = max(slowest, found.seconds.total / min(possible))
            largest = max(largest, found.peak.total / memory.usable)
            chosen.add(found.method)
    print(
        f"{len(grid.lengths) * len(grid.memories)} cases, nothing fits in {none}; {len(chosen)} "
        f"methods chosen, at most {100 * (slowest - 1):.2f} % slower than the fastest, at most "
        f"{100 * largest:.1f} % of the memory"
    )
    return chosen


@pytest.fixture(scope="module")
def tiny():
    return profile_of(TINY)


@pytest.mark.parametrize("name", thinned(["tiny", "Qwen3-8B", "Qwen3-30B-A3B", "gemma3-27b", "Qwen3.5-9B", "Llama-3.2-1B"],
                                         lambda name: name == "tiny"))  # fmt: skip
def test_the_choice_is_the_fastest_that_fits(name, tiny):
    grid = grids()[name]
    assert len(check_choices(tiny if name == "tiny" else profile_of(grid), grid)) > 1


MUTANTS = {
    "by arithmetic": (
        "_fastest",
        lambda found: min(found, key=lambda choice: choice.flops, default=None),
    ),
    "whether it fits or not": ("fits", lambda at, memory: True),
    "the least on the host": (
        "_fastest",
        lambda found: min(found, key=lambda choice: choice.peak.host, default=None),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_another_choice_is_seen(name, tiny, monkeypatch):
    monkeypatch.setattr(planning, *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_choices(tiny, TINY)


@pytest.mark.full
def test_the_next_two_in_speed_are_named(tiny):
    memory, length = Memory(2**30, 2**32, reserve=0.0), 2**14
    plan = plan_profile(tiny, length, memory, TINY.setting)
    first, second = plan.next_fastest
    fitting = [one for one in plan.times if one.fits and one.method != plan.choice.method]
    assert [first.seconds, second.seconds] == sorted(one.seconds for one in fitting)[:2]
    assert plan.choice.method not in (first.method, second.method)
    assert f"next in speed: {first.method} in " in plan_table(plan)
