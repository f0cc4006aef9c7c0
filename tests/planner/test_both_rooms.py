"""The plan's line for offload="auto": what a real step chooses, and its seconds.

covers: planner/auto_offload.py, planner/plan.py, planner/report.py, offload/placement.py
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from types import SimpleNamespace

import pytest

from streambp.offload import host_choice
from streambp.offload.costs import ForwardMeasurement, StepFigures
from streambp.offload.link import USABLE_FREE_FRACTION
from streambp.offload.policy import HEADROOM_STEPS_PER_INPUT, SavesPolicy
from streambp.planner.auto_offload import predict_auto_offload
from streambp.planner.layer_costs import costs_from_json
from streambp.planner.plan import AUTO_OFFLOAD_CHUNK_TOKENS, Memory, plan_profile
from streambp.planner.profile import Setting, peak, work
from streambp.planner.profile_cache import CountRequest, count_profile
from streambp.planner.report import plan_table
from streambp.planner.seconds import kernels, seconds
from streambp.planner.survey import STREAMED_RECIPES, streamed_recipe
from streambp.rates import DEVICES
from tests.planner.released import RELEASED_CONFIGS
from tests.planner.test_default_row import small

GIB = 2**30
RATES = DEVICES["H100"]
TOKENS = 32768
HOST = streamed_recipe((), "cpu").name


@functools.cache
def profile():
    return count_profile(CountRequest(small()), (STREAMED_RECIPES[0], streamed_recipe((), "cpu")))


def predicted(device, host, tokens=TOKENS, setting=None, sizes=(8192,)):
    setting = Setting(optimizer=0) if setting is None else setting
    return predict_auto_offload(profile(), tokens, sizes, (device, host), setting, RATES)


def at_length(costs):
    """As a step of so many tokens has seen them."""
    costs_at_length = {}
    for index, layer_cost in costs.items():
        cost = layer_cost.scaled_to(TOKENS)
        flops = cost.attention_flops * TOKENS / layer_cost.length
        cost = dataclasses.replace(cost, attention_flops=flops)
        costs_at_length[index] = layer_cost._replace(cost=cost, tokens=TOKENS, length=TOKENS)
    return costs_at_length


@pytest.mark.full
def test_it_is_the_choice_of_a_step():
    """The policy of a patched model, with the plan's numbers as the measured ones."""
    method = profile().method(HOST)
    setting = Setting(optimizer=0)
    host = 9 * GIB
    at = peak(profile(), method, TOKENS, 8192, setting).total
    inputs = sum(cost.scaled_to(TOKENS).x for cost in costs_from_json(profile().saves).values())
    unit = inputs / HEADROOM_STEPS_PER_INPUT  # a step's room is rounded to it
    usable = at + 100.0001 * unit / USABLE_FREE_FRACTION
    step = predicted(usable, host)
    forward = sum(kernels(work(method, TOKENS, 8192, setting)["forward"], RATES))
    measured = ForwardMeasurement(TOKENS, TOKENS, forward, RATES.link, RATES.forward, host)
    link = SimpleNamespace(
        begin=lambda length: measured,
        room_on_device=lambda tokens: USABLE_FREE_FRACTION * (usable - at),
        is_measured=True,
        manager=SimpleNamespace(staying=None),
    )
    figures = StepFigures(costs=at_length(costs_from_json(profile().saves)))
    layers = profile().layers
    policy = SavesPolicy(layers, lambda _: None, lambda _: (figures, 0.0), False, True, link)
    policy.figures = figures
    policy._begin_on_host(link, TOKENS, TOKENS, 8192)
    choice = policy.latest
    assert {saved.name: saved.layers for saved in step.saved} == choice.layers
    assert step.leaving == pytest.approx(choice.leaving)
    assert step.on_device == pytest.approx(choice.on_device)
    assert step.leaving > 0
    assert step.on_device > 0


def test_more_of_either_room_is_never_slower():
    min_bytes = peak(profile(), profile().method(HOST), TOKENS, 8192, Setting(optimizer=0)).total
    times = [
        [predicted(min_bytes + device * GIB, host * GIB).seconds for device in (0, 0.1, 0.3, 1, 4)]
        for host in (0.5, 0.7, 1, 2, 9)
    ]
    for row in (*times, *zip(*times, strict=True)):
        for seconds_before, seconds_after in itertools.pairwise(row):
            assert seconds_after <= seconds_before * 1.01
    assert times[-1][-1] < 0.9 * times[0][0]


def test_without_room_it_is_the_step_that_moves_inputs_alone():
    method = profile().method(HOST)
    setting = Setting(optimizer=0)
    min_bytes = peak(profile(), method, TOKENS, 8192, setting).total
    inputs = sum(cost.scaled_to(TOKENS).x for cost in costs_from_json(profile().saves).values())
    step = predicted(min_bytes, inputs)
    assert step.fits
    assert step.saved == ()
    assert step.leaving == inputs
    assert step.seconds == pytest.approx(seconds(method, TOKENS, 8192, RATES, setting).total)
    assert not predicted(min_bytes - 1, inputs).fits
    assert not predicted(min_bytes, inputs / 2).fits or predicted(min_bytes, inputs / 2).on_device


def test_what_it_is_not_known_for():
    assert predicted(8 * GIB, None, setting=Setting(gpus=2, zero=3)) is None
    unseen = dataclasses.replace(profile(), saves=None)
    assert predict_auto_offload(unseen, TOKENS, (8192,), (8 * GIB, None), Setting(), RATES) is None


def test_a_plan_prints_it_where_it_is_faster():
    """The default uses both rooms, too, and is as fast. Without it the plan prints the setting."""
    plan = plan_profile(profile(), TOKENS, Memory(4 * GIB, 8 * GIB), Setting(optimizer=0), RATES)
    assert not plan.both_rooms_win
    assert 'offload="auto")' not in plan_table(plan, modules=False)
    without_default = dataclasses.replace(plan, by_default=None)
    assert without_default.both_rooms_win
    printed = plan_table(without_default, modules=False)
    assert 'offload="auto"): saves ' in printed
    assert "leave for the host" in printed
    slower = dataclasses.replace(without_default.both_rooms, seconds=plan.choice.seconds.total)
    slower_plan = dataclasses.replace(without_default, both_rooms=slower)
    assert 'offload="auto")' not in plan_table(slower_plan, modules=False)
    assert not dataclasses.replace(without_default, both_rooms=None).both_rooms_win


# Qwen3-8B, GiB of an H100 and of the host, tokens, LoRA's rank, bits: at most so many seconds.
LIMITS = [
    (79, 115, 65_536, None, 16, 13.95),
    (48, 115, 65_536, None, 16, 14.2),
    (79, 115, 131_072, 16, 16, 51.5),
]


@pytest.mark.full
def test_qwen3_8b_on_one_h100():
    @functools.cache
    def of(lora, bits):
        request = CountRequest(
            RELEASED_CONFIGS["Qwen3-8B"](), lora=lora, bits=bits, kernels="liger"
        )
        return count_profile(request, (STREAMED_RECIPES[0], streamed_recipe((), "cpu")))

    for gpu, host, tokens, lora, bits, limit in LIMITS:
        usable = 0.95 * gpu * GIB
        step = predict_auto_offload(
            of(lora, bits), tokens, AUTO_OFFLOAD_CHUNK_TOKENS, (usable, 0.9 * host * GIB),
            Setting(optimizer=0), RATES,
        )  # fmt: skip
        print(f"{gpu} GiB, {tokens:,} tokens, LoRA {lora}: {step.seconds:.2f} s, {limit} allowed")
        assert step.fits
        assert step.seconds <= limit


def without_the_device(patch):
    patch.setattr(host_choice, "USABLE_FREE_FRACTION", 0.0)


def without_the_link(patch):
    choose = host_choice.choose_placement
    patch.setattr(
        host_choice,
        "choose_placement",
        lambda inputs, candidates, headroom: choose(
            inputs, candidates, dataclasses.replace(headroom, link=math.inf)
        ),
    )


@pytest.mark.parametrize("mutant", [without_the_device, without_the_link])
def test_mutant_turns_a_test_red(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_it_is_the_choice_of_a_step()
