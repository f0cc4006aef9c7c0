"""A count runs plain attention once for each shape of its blocks, and finds the bytes, FLOPs and
dispatches of running all blocks.

covers: planner/count.py, planner/kernels.py
"""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import Gemma2Config, Qwen3Config

from streambp.planner import kernels
from streambp.planner.count import ShapeCache, StepCount
from streambp.planner.kernels import CountedCalls
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import STREAMED_RECIPES, survey

SHAPE = {
    "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 2, "vocab_size": 500,
}  # fmt: skip
QUERY_STARTS = (1700, 800)  # blocks of 512 queries, and of fewer at the ends of chunks


def configs():
    return {
        "qwen3": Qwen3Config(**SHAPE),
        "gemma2": Gemma2Config(**SHAPE, sliding_window=300),
    }


@pytest.fixture
def runs(monkeypatch):
    """Pairs of a function and True if its call was run."""
    recorded_calls = []
    real, first = CountedCalls.run, CountedCalls._count_first

    def run(self, function, key, *args):
        recorded_calls.append([function, False])
        return real(self, function, key, *args)

    def run_first(self, *args):
        recorded_calls[-1][1] = True
        return first(self, *args)

    monkeypatch.setattr(CountedCalls, "run", run)
    monkeypatch.setattr(CountedCalls, "_count_first", run_first)
    return recorded_calls


def profile_of(family):
    """The count of a step whose attention is plain products."""
    skeleton = Skeleton(configs()[family], torch.float32, None, 16, "cuda")
    return survey(skeleton, [STREAMED_RECIPES[0]], at=QUERY_STARTS, tree=False, timed=False)


@functools.cache
def of_each_block(family):
    """The count that runs every call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountedCalls, "run", lambda self, function, key, *args: function(*args))
        return profile_of(family)


@pytest.mark.fast("qwen3")
@pytest.mark.parametrize("family", configs())
def test_numbers_are_those_of_running_every_block(family, runs):
    expected = of_each_block(family)
    profile = profile_of(family)
    assert len({function for function, _ in runs}) == 3  # forward, backward, merges
    first = sum(was_run for _, was_run in runs)
    assert 3 <= first < len(runs) / 4
    assert profile == expected


def no_peak(patch):
    real = CountedCalls._count_first

    def first(self, count, key, call):
        result = real(self, count, key, call)
        counted_call = self._counted_calls[key]
        self._counted_calls[key] = kernels.dataclasses.replace(counted_call, peak=0)
        return result

    patch.setattr(CountedCalls, "_count_first", first)


def no_kind(patch):
    real = CountedCalls.run
    patch.setattr(
        CountedCalls,
        "run",
        lambda self, function, key, *args: real(self, function, key[1:], *args),
    )


def no_work(patch):
    patch.setattr(StepCount, "add", lambda self, work: None)


@pytest.mark.parametrize("mutant", [no_peak, no_kind, no_work])
def test_mutant_turns_a_test_red(mutant, monkeypatch):
    expected = of_each_block("qwen3")
    mutant(monkeypatch)
    assert profile_of("qwen3") != expected


def counted(calls, function, *args):
    """The count of one call, and its results."""
    with StepCount(None, calls._shapes) as count, torch.no_grad():
        live_tensor = torch.empty(3, device="meta")
        result = calls.run(function, (), *args)
        numbers = (count.peak, count.live, count.largest, count.work)
        del live_tensor, result
        return (*numbers, count.live)


def meta(*shape):
    return torch.empty(shape, device="meta")


def products(x):
    """Two results, and a larger tensor on the way."""
    wide = (x @ meta(8, 100)).exp()
    return wide[:, :8] * 2, (wide.mT @ x).sum(0)


def test_a_call_of_known_shapes_counts_as_much():
    calls = CountedCalls(ShapeCache())
    first = counted(calls, products, meta(5, 8))
    assert first[0] > first[1] > first[4] == 0
    assert counted(calls, products, meta(5, 8)) == first
    assert len(calls._counted_calls) == 1
    assert counted(calls, products, meta(6, 8)) != first
    with StepCount(None, calls._shapes), torch.no_grad():
        outputs = calls.run(products, (), meta(5, 8))
        expected = products(meta(5, 8))
    for ours, theirs in zip(outputs, expected, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
        )


live_outputs = []


def leaves_something(x):
    live_outputs.append(x + 1)
    return x + 2


def shares_memory(x):
    y = x + 1
    return y, y[:2]


def part_of_larger(x):
    return (x @ meta(8, 100))[:, :4]


@pytest.mark.parametrize("function", [leaves_something, shares_memory, part_of_larger])
def test_a_call_whose_results_are_not_all_runs_each_time(function):
    calls, times = CountedCalls(ShapeCache()), []
    live_outputs.clear()

    def noted(x):
        times.append(1)
        return function(x)

    for _ in range(3):
        counted(calls, noted, meta(5, 8))
        live_outputs.clear()
    assert len(times) == 3


def test_calls_with_a_graph_or_without_a_count_run():
    calls, times = CountedCalls(ShapeCache()), []

    def noted(x):
        times.append(1)
        return x * 2

    with torch.no_grad():
        for _ in range(2):
            assert calls.run(noted, (), meta(5)).shape == (5,)
    with StepCount(None, calls._shapes):
        for _ in range(2):
            assert calls.run(noted, (), meta(5).requires_grad_()).requires_grad
    assert len(times) == 4
