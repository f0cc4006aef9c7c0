"""A plan is the fastest of all settings that it knows, and names each option that is faster.

covers: planner/plan.py, planner/suggestions.py, planner/report.py
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import sys
from collections import Counter
from pathlib import Path

import pytest

from streambp.cli import commands
from streambp.planner import Memory, Setting
from streambp.planner.default_step import DefaultStep
from streambp.planner.laws import Law
from streambp.planner.plan import plan_profile
from streambp.planner.profile import Method, ParameterGroup, Phase
from streambp.planner.profile_cache import CountRequest
from streambp.planner.report import plan_table, remedies_table
from streambp.planner.suggestions import (
    MAX_GPUS,
    Training,
    faster_changes,
    remedies,
    replace_options,
    seconds_of,
    settings_of,
)
from streambp.planner.survey import STREAMED_RECIPES, survey
from streambp.rates import DEVICES
from tests.planner.laws import made_work
from tests.planner.released import COLUMNS, MOST_SECONDS, RELEASED_CONFIGS
from tests.planner.test_estimates import made_up
from tests.planner.test_weights_on_host import SIZE, SIZES, small_profile

GIB = 2**30
MILLION = 10**6
CARDS = (24, 48, 80)
LENGTHS = (2**14, 2**16, 2**18)
LORA = Training(16)
ROWS = Path(__file__).parents[2] / "paper_repro/results/released_plans.csv"
planning = sys.modules["streambp.planner.plan"]
suggesting = sys.modules["streambp.planner.suggestions"]


def method(name, tokens, work):
    """A streamed step with `tokens` bytes for each token."""
    work = (*made_work(work, 0.0, "forward"), *made_work(work, 0.0))
    born = Phase("backward 0", Law(200_000, tokens, 5), 100_000)
    return Method(name, (), "none", False, True, (born,), (born,), Law(), work)


def two_speeds():
    """Eleven million bytes of weights; a fast step of 8 bytes a token, and a slow one of 1."""
    methods = (method("large and fast", 8000, 3e9), method("small and slow", 1000, 9e9))
    return dataclasses.replace(small_profile(), methods=methods)


def check_weights_move_for_speed():
    """The slow method fits with all weights on the device, the fast one with some on the host."""
    memory = Memory(14 * MILLION, None, 0.0)
    on_device = plan_profile(two_speeds(), 1000, memory, Setting(weights="device"))
    plan = plan_profile(two_speeds(), 1000, memory, Setting())
    assert on_device.choice.method == "small and slow"
    assert plan.choice.method == "large and fast"
    assert 0 < plan.choice.on_host.layers < plan.choice.on_host.of
    assert plan.choice.peak.total <= memory.usable
    assert plan.choice.seconds.total < 0.5 * on_device.choice.seconds.total
    times = {timed.method: timed for timed in plan.times}
    assert times["large and fast"].seconds == plan.choice.seconds.total
    assert times["small and slow"].fits
    return plan


def test_weights_move_to_the_host_where_that_is_faster():
    plan = check_weights_move_for_speed()
    assert not list(faster_changes(plan, LORA, lambda how: two_speeds()))
    longer = {row.method: row.seq_len for row in plan.longest}
    assert plan.seq_len <= longer["large and fast"] < longer["small and slow"]


def test_weights_that_stay_are_seen(monkeypatch):
    monkeypatch.setattr(planning, "put_weights_on_host", lambda profile, setting: None)
    with pytest.raises(AssertionError):
        check_weights_move_for_speed()


def test_the_longest_sequence_has_weights_on_the_host():
    memory = Memory(14 * MILLION, None, 0.0)
    plan = plan_profile(two_speeds(), "max", memory, Setting())
    device = plan_profile(two_speeds(), "max", memory, Setting(weights="device"))
    assert plan.choice.on_host.layers == plan.choice.on_host.of
    assert plan.seq_len > device.seq_len
    too_long = plan_profile(two_speeds(), plan.seq_len + 1, memory, Setting())
    assert too_long.choice is None
    # Host memory for a part of the weights: as few layers as possible are there.
    narrow = dataclasses.replace(memory, host=6 * SIZE)
    some = plan_profile(two_speeds(), "max", narrow, Setting())
    assert device.seq_len < some.seq_len < plan.seq_len
    assert some.choice.peak.host <= 6 * SIZE
    assert plan_profile(two_speeds(), some.seq_len + 1, narrow, Setting()).choice is None


def with_default(share):
    """A plan, and a default step that takes `share` of the choice's seconds."""
    plan = plan_profile(two_speeds(), 1000, Memory(90 * MILLION, None, 0.0), Setting())
    spent = share * plan.choice.seconds.total
    default = DefaultStep("streamed", 512, True, (), 3.0 * GIB, spent)
    return dataclasses.replace(plan, by_default=default)


@pytest.mark.parametrize(("share", "wins"), [(0.9, True), (0.998, False), (1.1, False)])
def test_the_default_is_printed_first_where_it_is_faster(share, wins):
    plan = with_default(share)
    text = plan_table(plan, modules=False)
    assert plan.default_wins == wins
    assert ("1,000 tokens: streambp.patch(model)\n" in text) == wins
    assert ("streambp launch -- PROGRAM" in text) == wins
    assert ("StreamSFTConfig()" in text) == wins
    assert "streambp.StreamConfig(chunk_size=" in text
    spent = plan.by_default.seconds if wins else plan.choice.seconds.total
    assert seconds_of(plan) == spent


def test_the_default_does_not_win_against_a_request():
    """It keeps weights on the device; and it has to fit."""
    plan = with_default(0.5)
    elsewhere = dataclasses.replace(plan, setting=Setting(weights="cpu"))
    assert not elsewhere.default_wins
    misfit = dataclasses.replace(plan.by_default, fits=False)
    assert not dataclasses.replace(plan, by_default=misfit).default_wins


def four_bits(how):
    """Two speeds, with a quarter of the weights' bytes."""
    profile = two_speeds()
    assert how.bits == 4
    group = dataclasses.replace(profile.groups[0], bytes=11 * SIZE // 4)
    return dataclasses.replace(profile, groups=(group,), frozen=(SIZE // 4,) * len(SIZES))


def slow_link():
    """Rates with which no weights can come from the host."""
    return dataclasses.replace(DEVICES["H200"], link=1.0)


def check_four_bits_are_named():
    """Where memory binds, and a quarter of the weights' bytes makes room for the fast method."""
    memory = Memory(14 * MILLION, None, 0.0)
    plan = plan_profile(two_speeds(), 1000, memory, Setting(optimizer=0), slow_link())
    suggestions = list(faster_changes(plan, LORA, four_bits))
    assert [remedy.options for remedy in suggestions] == [("--lora", "16", "--bits", "4")]
    table = "\n".join(remedies_table(plan, suggestions, ["streambp plan again"]))
    assert "Faster:\n  LoRA of rank 16 on 4-bit weights: 1,000 tokens" in table


def test_four_bits_are_named_where_memory_binds():
    check_four_bits_are_named()
    plenty = Memory(900 * MILLION, None, 0.0)
    plan = plan_profile(two_speeds(), 1000, plenty, Setting(), slow_link())
    assert not list(faster_changes(plan, LORA, pytest.fail))


def test_an_option_that_is_not_named_is_seen(monkeypatch):
    monkeypatch.setattr(suggesting, "ALLOWED_SLOWDOWN", 0.9)
    with pytest.raises(AssertionError):
        check_four_bits_are_named()


def test_changes_are_judged_without_what_a_report_shows(monkeypatch):
    """Longest sequences and levers cost most of a plan's time, and no comparison reads them."""
    fitting, lacking = Memory(14 * MILLION, None, 0.0), Memory(8 * MILLION, None, 0.0)
    plans = []
    for memory in (fitting, lacking):
        plans.append(plan_profile(two_speeds(), 1000, memory, Setting(optimizer=0), slow_link()))
    for name in ("longest_sequence", "_levers", "_timed", "predict_auto_offload"):
        monkeypatch.setattr(planning, name, pytest.fail)
    assert [remedy.options for remedy in faster_changes(plans[0], LORA, four_bits)]
    settings = (Setting(), Setting(weights="cpu"), Setting(weights="device"))
    for setting, plan in itertools.product(settings, plans):
        planning.plan_step(two_speeds(), 1000, plan.memory, setting, slow_link())


@pytest.mark.parametrize("length", [1, 1000, 3001, "max"])
@pytest.mark.parametrize("size", [3, 8, 14, 900])
@pytest.mark.parametrize("host", [None, 20 * MILLION])
def test_a_step_is_the_plans(length, size, host):
    memory = Memory(size * MILLION, host, 0.0)
    for setting in (Setting(), Setting(weights="cpu"), Setting(gpus=2, zero=3)):
        for profile in (two_speeds(), trained_layers()):
            plan = plan_profile(profile, length, memory, setting, slow_link())
            step = planning.plan_step(profile, length, memory, setting, slow_link())
            names = ("binds", "levers", "longest", "times", "both_rooms")
            left_out = {name: getattr(step, name) for name in names}
            assert dataclasses.replace(plan, **left_out) == step
            assert seconds_of(plan) == seconds_of(step)


def check_four_bits_where_plenty_is_slow(monkeypatch):
    """On a device with memory for everything, the default runs unpatched and is slower."""
    real = suggesting.plan_step
    plan = plan_profile(
        two_speeds(), 1000, Memory(14 * MILLION, None, 0.0), Setting(optimizer=0), slow_link()
    )

    def planned(profile, length, memory, *arguments):
        if memory.gpu == suggesting.UNLIMITED_BYTES:
            return plan
        return real(profile, length, memory, *arguments)

    monkeypatch.setattr(suggesting, "plan_step", planned)
    suggestions = list(faster_changes(plan, LORA, four_bits))
    assert [remedy.options for remedy in suggestions] == [("--lora", "16", "--bits", "4")]


def test_more_memory_may_help_less_than_some(monkeypatch):
    check_four_bits_where_plenty_is_slow(monkeypatch)


def test_a_bound_from_plenty_alone_is_seen(monkeypatch):
    def min_seconds(plan):
        plenty = dataclasses.replace(plan.memory, gpu=suggesting.UNLIMITED_BYTES, host=None)
        return seconds_of(suggesting.plan_step(plan.profile, 1000, plenty, plan.setting))

    monkeypatch.setattr(suggesting, "_min_seconds", min_seconds)
    with pytest.raises(AssertionError):
        check_four_bits_where_plenty_is_slow(monkeypatch)


def trained_layers():
    """Ten layers of a million bytes each, all of them trained."""
    group = ParameterGroup("dense", 5_500_000, 11 * SIZE, 5_500_000, 11 * SIZE)
    return made_up(groups=(group,), methods=(method("streamed", 8, 3e9),), trained=SIZES,
                   frozen=(0,) * len(SIZES))  # fmt: skip


def test_full_training_is_told_of_weights_on_the_host():
    """The weights alone have 11 MB, and the card has 8."""
    plan = plan_profile(trained_layers(), 1000, Memory(8 * MILLION, None, 0.0), Setting())
    assert plan.choice is None
    first = next(iter(remedies(plan, 1000, Training(), pytest.fail)))
    assert "--weights" in first.options
    assert first.plan.setting.weights == "cpu"
    assert first.plan.choice.peak.total <= 8 * MILLION
    assert "the layers' weights on the host" in first.change


def test_no_remedy_has_more_gpus_than_a_node():
    plan = plan_profile(trained_layers(), 1000, Memory(3 * MILLION, None, 0.0), Setting())
    for remedy in remedies(plan, 1000, Training(), lambda how: trained_layers()):
        assert remedy.plan.setting.gpus <= MAX_GPUS
    roomy = plan_profile(trained_layers(), 1000, Memory(30 * MILLION, None, 0.0), Setting())
    suggestions = remedies(roomy, 1000, Training(), lambda how: trained_layers())
    wider = [
        suggestion.plan.setting for suggestion in suggestions if "--gpus" in suggestion.options
    ]
    assert [(setting.gpus, setting.zero) for setting in wider] == [(2, 3)]


def test_a_model_that_takes_no_adapters_has_other_remedies():
    def refuse(how):
        raise ValueError("Module 'out_proj' is incompatible")

    plan = plan_profile(trained_layers(), 1000, Memory(20 * MILLION, None, 0.0), Setting())
    suggestions = list(remedies(plan, 1000, Training(), refuse))
    assert suggestions
    assert not any("--lora" in remedy.options for remedy in suggestions)


@functools.cache
def counted_profile(name, training):
    request = CountRequest(RELEASED_CONFIGS[name](), lora=training.lora, bits=training.bits)
    return survey(request.skeleton(), STREAMED_RECIPES, accumulating=False, tree=False)


def replanned(remedy, memory, training, length, count):
    """The plan of the printed command, read by the command line's own parser."""
    arguments = ["plan", "MODEL", "--seq-len", str(length), "--gpu-memory", str(memory.gpu)]
    arguments += ["--host-memory", str(memory.host)]
    read = commands.parse(replace_options([*arguments, *training.options], remedy.options))
    setting = Setting(
        gpus=read.gpus or 1, zero=read.zero, weights=read.weights,
        optimizer_on_host=read.optimizer_on_host,
    )  # fmt: skip
    host = dataclasses.replace(memory, host=memory.host // setting.gpus)
    profile = count(Training(read.lora, read.bits))
    return plan_profile(profile, read.seq_len, host, setting)


def check_cell(name, memory, training, length, count=None):
    """One plan: it fits, nothing that it knows is 2 % faster and not named, and its remedies
    fit."""
    count = count or functools.partial(counted_profile, name)
    plan = plan_profile(count(training), length, memory, Setting())
    if plan.choice is None:
        suggestions = list(remedies(plan, length, training, count))
        assert suggestions, (name, memory, training, length)
        for remedy in suggestions:
            assert replanned(remedy, memory, training, length, count).choice == remedy.plan.choice
        return False
    assert plan.choice.peak.total <= memory.usable, (name, memory, training, length)
    assert plan.choice.peak.host <= memory.host, (name, memory, training, length)
    if plan.default_wins:
        assert plan.by_default.peak <= memory.usable, (name, memory, training, length)
        assert plan.by_default.leaving <= memory.host, (name, memory, training, length)
    suggestions = list(faster_changes(plan, training, count))
    best = min(map(seconds_of, (plan, *(remedy.plan for remedy in suggestions))))
    trainings = [training, *(how for how in training.smaller() if training.lora is not None)]
    for how in trainings:
        for _, setting in settings_of(Setting()):
            changed_plan = plan_profile(count(how), length, memory, setting)
            assert seconds_of(changed_plan) > 0.98 * best, (
                name,
                memory,
                training,
                length,
                how,
                setting,
            )
    for remedy in suggestions:
        assert replanned(remedy, memory, training, length, count).choice == remedy.plan.choice
    return True


@pytest.mark.full
@pytest.mark.parametrize("name", RELEASED_CONFIGS)
def test_plans_of_released_models(name):
    """27 plans of each: three cards, three trainings and three lengths."""
    fitting = 0
    for training in (Training(), LORA, Training(16, 4)):
        for size in CARDS:
            for length in LENGTHS:
                memory = Memory(size * GIB, 256 * GIB)
                fitting += check_cell(name, memory, training, length)
    print(f"\n{name}: {fitting} of 27 plans fit")
    assert fitting


def check_rows(rows):
    """Nine plans of each training, all of which pass and fit, and a first count of 40 seconds at
    most."""
    trainings = Counter((row["model"], row["training"]) for row in rows)
    assert set(trainings.values()) == {len(CARDS) * len(LENGTHS)}
    for row in rows:
        assert row["model"] in RELEASED_CONFIGS
        assert row["check"] == "passes", row
        assert float(row["first_count_s"]) <= MOST_SECONDS, row
        card = int(row["card_gib"])
        assert float(row["peak_gib"] or 0) <= Memory(card).usable + 0.05, row  # one decimal


def test_committed_plans_of_released_models_passed():
    with ROWS.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == list(COLUMNS)
    check_rows(rows)
    for wrong in ({"check": "AssertionError"}, {"first_count_s": "40.1"}, {"peak_gib": "23.0"}):
        with pytest.raises(AssertionError):
            check_rows([rows[0] | wrong, *rows[1:]])
    with pytest.raises(AssertionError):
        check_rows([rows[0] | {"model": "GPT-2"}, *rows[1:]])
    with pytest.raises(AssertionError):
        check_rows(rows[1:])
