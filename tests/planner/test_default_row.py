"""The plan's row for `streambp.patch(model)` alone is the choice that a patched model takes.

covers: planner/default_step.py, planner/layer_costs.py, planner/measure.py
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import streambp
from scripts.plan_time import configs
from streambp.model import unpatched
from streambp.model.record import OUTCOME_KEPT_GRAPH, OUTCOME_UNPATCHED
from streambp.model.record import OUTCOME_STREAMED as STREAMED_WAY
from streambp.offload import costs, free_memory
from streambp.offload.costs import GRAPH, SavesChoice
from streambp.planner import default_step
from streambp.planner.layer_costs import PLAN_DEVICE
from streambp.planner.measure import compare_default
from streambp.planner.plan import Memory, plan_profile
from streambp.planner.profile import Setting, bytes_between_steps, from_json, to_json
from streambp.planner.profile_cache import CountRequest, count_profile
from streambp.planner.report import default_table, plan_table
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import STREAMED_RECIPES, UNPATCHED_RECIPE
from streambp.rates import DEFAULT_DEVICE, DEVICES
from tests.families import build
from tests.tiers import thinned

GIB = 2**30
RATES = DEVICES[DEFAULT_DEVICE]


def small():
    """Ten layers, 0.27 GiB of weights: a GPU of a few GiB has to choose."""
    config = configs()["Qwen3-8B"]()
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size = (
        10,
        1024,
        3072,
        8192,
    )
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 16, 8, 64
    config.layer_types = config.layer_types[:10]
    return config


def large():
    return configs()["Qwen3-8B"]()


@functools.cache
def profile_of(lora=None, rows=1, config=small):
    return count_profile(
        CountRequest(config(), lora=lora, batch_size=rows), (UNPATCHED_RECIPE, STREAMED_RECIPES[0])
    )


def planned(tokens, memory, lora=None, rows=1, accumulate=False, config=small):
    """A model's plan without optimizer states."""
    setting = Setting(optimizer=0, accumulate=accumulate)
    return plan_profile(profile_of(lora, rows, config), tokens, Memory(memory), setting, RATES)


@functools.cache
def of_a_patched_model(lora):
    """The policy of a patched model of which so much is known, and its parameters."""
    model = Skeleton(small(), torch.bfloat16, lora, 16, "cuda").model
    streambp.patch(model)
    chooser = model._streambp.saves_policy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(free_memory, "free_memory", lambda device: 1.0)
        chooser.begin_forward(PLAN_DEVICE)
    for index, cost in chooser.figures.costs.items():  # a skeleton's layers are nowhere
        chooser.figures.costs[index] = cost._replace(device=PLAN_DEVICE)
    return chooser, list(model.parameters())


@pytest.mark.full
@pytest.mark.parametrize("present", [0.0, 1.0])
@pytest.mark.parametrize("lora", thinned([None, 16], lambda lora: lora is None))
def test_the_row_is_what_a_patched_model_chooses(lora, present):
    ways = set()
    chooser, parameters = of_a_patched_model(lora)
    gradients = sum(p.nbytes for p in parameters if p.requires_grad)
    for memory, tokens in ((4 * GIB, 4096), (4 * GIB, 16384), (6 * GIB, 32768), (3 * GIB, 32768)):
        usable = min(0.95 * memory, memory - free_memory.RESERVED_BYTES)
        free = usable - sum(p.nbytes for p in parameters) - present * gradients
        row = planned(tokens, memory, lora, accumulate=bool(present)).by_default
        chooser.free, chooser.present = lambda device, free=free: free, present
        size = chooser.size(1, tokens, PLAN_DEVICE)
        fits, tensors_by_layer, _ = chooser.predict({PLAN_DEVICE: free}, tokens, size, tokens)
        choice = SavesChoice(tokens, tokens, size, free, tensors_by_layer)
        ways.add(row.way)
        assert (row.chunk_size, row.fits) == (size, fits)
        assert {saved.name: (saved.layers, saved.bytes) for saved in row.saved} == {
            name: (choice.layers[name], pytest.approx(choice.bytes[name])) for name in choice.bytes
        }
        assert row.peak <= usable * (1 + 1e-9)
    assert STREAMED_WAY in ways


def test_a_kept_graph_spares_what_the_tensors_in_its_place_would():
    """8B at 4,096 tokens on 80 GiB: one chunk that keeps its graph, not two that compute half of it
    again."""
    row = planned(4096, 80 * GIB, config=large).by_default
    assert (row.way, row.chunk_size) == (OUTCOME_KEPT_GRAPH, 4096)
    assert [(saved.name, saved.layers) for saved in row.saved] == [(GRAPH, 36)]


def test_where_everything_fits_a_step_runs_unpatched(monkeypatch):
    monkeypatch.setattr(unpatched, "MAX_SHARE_OF_FREE_MEMORY", 0.8)
    plan = planned(1024, 80 * GIB)
    assert plan.by_default.way == OUTCOME_UNPATCHED
    assert plan.by_default.peak < 80 * GIB / 4
    table = plan_table(plan, modules=False)
    assert "1,024 tokens: streambp.patch(model)\n  chunks of 1,024, runs unpatched; peak" in table


def test_where_nothing_fits_the_row_says_so():
    plan = planned(2**20, 3 * GIB)
    assert not plan.by_default.fits
    assert plan.by_default.peak > 3 * GIB
    assert "GiB: does not fit" in plan_table(plan, modules=False)


@pytest.mark.full
def test_rows_of_a_batch_are_tokens():
    one_row, four_rows = (planned(16384 // rows, 4 * GIB, rows=rows).by_default for rows in (1, 4))
    assert four_rows.chunk_size <= one_row.chunk_size
    assert sum(s.bytes for s in four_rows.saved) == pytest.approx(
        sum(s.bytes for s in one_row.saved), rel=0.05
    )
    assert four_rows.peak <= min(0.95 * 4 * GIB, 4 * GIB - free_memory.RESERVED_BYTES)


def test_other_rules_have_no_row():
    profile = profile_of()
    for setting in (Setting(gpus=2, zero=3), Setting(gpus=2, ulysses=2)):
        assert default_step.predict_default_step(profile, 4096, 3 * GIB, setting, RATES) is None
    unseen = dataclasses.replace(profile, saves=None)
    assert default_step.predict_default_step(unseen, 4096, 3 * GIB, Setting(), RATES) is None


@pytest.mark.full
def test_a_cpu_has_no_row():
    on_a_cpu = count_profile(
        CountRequest(small(), device="cpu"), (UNPATCHED_RECIPE, STREAMED_RECIPES[0])
    )
    assert plan_profile(on_a_cpu, 4096, Memory(4 * GIB), Setting(), RATES).by_default is None


def test_the_row_goes_through_json():
    profile = profile_of()
    assert profile.saves is not None
    restored = from_json(to_json(profile))
    rows = [
        default_step.predict_default_step(p, 16384, 3e9, Setting(optimizer=0), RATES)
        for p in (profile, restored)
    ]
    assert rows[0] == rows[1] is not None
    assert bytes_between_steps(restored, Setting()) == bytes_between_steps(profile, Setting())


@pytest.mark.fast(2)
@pytest.mark.parametrize("free_bytes", [3e8, 8e6])
def test_a_real_step_does_what_was_predicted(monkeypatch, free_bytes):
    """On a CPU that says what it has free, as a card does: chunk size, and what is saved, name by
    name and byte by byte."""
    model = build("qwen3", dtype=torch.bfloat16, num_hidden_layers=3)
    monkeypatch.setattr(free_memory, "free_memory", lambda device: free_bytes)
    monkeypatch.setattr(free_memory, "RESERVED_BYTES", 0)
    predicted, measured = compare_default(model, torch.randint(0, 50, (1, 2048)))
    assert (measured.way, measured.chunk_size, measured.fits) == (
        predicted.way,
        predicted.chunk_size,
        True,
    )
    saves = [
        {saved.name: (saved.layers, saved.bytes) for saved in some.saved}
        for some in (predicted, measured)
    ]
    assert saves[0] == saves[1]
    assert predicted.saved
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not hasattr(model, "_streambp")
    table = default_table(predicted, measured).splitlines()
    assert table[2].split() == ["predicted", "measured"]
    assert [line.split()[0] for line in table[3:5]] == ["step", "chunk_size"]
    assert "out of memory" in default_table(predicted, None)


def test_a_device_that_does_not_tell_has_nothing_to_compare(monkeypatch):
    monkeypatch.setattr(free_memory, "free_memory", lambda device: None)
    assert compare_default(build("llama"), torch.randint(0, 50, (1, 16))) is None


def test_a_graph_that_spares_nothing_is_seen(monkeypatch):
    real = costs.Candidate

    def worthless(index, name, size, flops_per_byte):
        return real(index, name, size, 0.0 if name == GRAPH else flops_per_byte)

    monkeypatch.setattr(costs, "Candidate", worthless)
    with pytest.raises(AssertionError):
        test_a_kept_graph_spares_what_the_tensors_in_its_place_would()
