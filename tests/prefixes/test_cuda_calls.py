"""Calls of CUDA's kernels over the packed row of a group of completions, or of rows without
padding, on meta tensors.

covers: attention/spans.py, prefixes/tree.py
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter

import pytest
import torch

from streambp.attention import spans
from streambp.attention.kernels import FLASH
from streambp.attention.spans import QueryRun, Spans
from streambp.prefixes.tree import PrefixTree, find_tree
from tests.attention.meta_runs import run
from tests.seeds import seed_of

CHUNK = 8192
PROMPT = 33_000
TOKENS = 16_000  # of all completions


@functools.cache
def group(branches):
    """So many completions of one prompt, as long as each other."""
    length = TOKENS // branches
    ids = torch.arange(PROMPT + length).repeat(branches, 1)
    ids[:, PROMPT:] += PROMPT * torch.arange(1, branches + 1)[:, None]
    tree = find_tree(ids)
    assert isinstance(tree, PrefixTree)
    assert tree.length == PROMPT + TOKENS
    return tree


def calls(monkeypatch, branches):
    """Of each operator, how many; each is checked for what cuDNN takes, and for how its blocks are
    cut."""
    recorder, counted = run(monkeypatch, group(branches).spans(), CHUNK)
    assert counted.syncs == 0
    assert all(len(layouts) == 1 for layouts in recorder.graphs.values())
    for operator, queries, keys, _ in recorder.calls:
        if operator.startswith("cudnn"):
            for length in (queries, keys):
                assert length % spans.BLOCK_LENGTH_MULTIPLE == 0 or (
                    length >= 256 and length & (length - 1) == 0
                )
    return Counter(operator for operator, *_ in recorder.calls)


def check_counts(monkeypatch):
    """As many for 64 branches as for 16: none is a block of its own."""
    few_calls = calls(monkeypatch, 16)
    assert few_calls == calls(monkeypatch, 64)
    chunks = -(-(PROMPT + TOKENS) // CHUNK)
    # one in each chunk that has branches
    assert few_calls["varlen"] == few_calls["varlen backward"] == chunks - PROMPT // CHUNK


def test_branches_of_a_chunk_are_one_call(monkeypatch):
    check_counts(monkeypatch)


def test_a_block_for_each_branch_is_found(monkeypatch):
    monkeypatch.setattr(FLASH, "tiling", dataclasses.replace(FLASH.tiling, native_varlen=False))
    with pytest.raises(AssertionError):
        check_counts(monkeypatch)


@functools.cache
def padded(rows, mean):
    """The packed row of a padded batch, whose rows have nothing in common."""
    draw = random.Random(seed_of(0))
    differences = [draw.randint(-mean // 2, mean // 2) for _ in range(rows // 2)]
    lengths = [mean + sign * difference for difference in differences for sign in (1, -1)]
    starts = torch.tensor([sum(lengths[:row]) for row in range(rows)])[:, None]
    column = torch.arange(max(lengths))
    tree = find_tree(starts + column, (column < torch.tensor(lengths)[:, None]).long())
    assert isinstance(tree, PrefixTree)
    assert tree.length == rows * mean
    return tree


def launches(monkeypatch, layout, chunk_size):
    """(attention kernels, operators and all) of forward and backward of one layer's attention."""
    recorder, counted = run(monkeypatch, layout, chunk_size)
    assert counted.syncs == 0
    return len(recorder.calls), counted.calls


def check_launches(monkeypatch, chunk_size, window):
    """64 rows of 500 tokens beside one of 32,000: one call for all rows in a chunk, forward and
    backward."""
    of_many_rows = launches(monkeypatch, padded(64, 500).spans(window), chunk_size)
    of_one_row = launches(monkeypatch, Spans.causal(1, 32_000, window), chunk_size)
    print(
        f"chunks of {chunk_size}, window {window}: attention {of_many_rows[0]} and {of_one_row[0]} "
        f"calls, with merges, copies and views {of_many_rows[1]} and {of_one_row[1]}"
    )
    assert of_many_rows[0] == 2 * -(-32_000 // chunk_size)
    assert of_many_rows[0] <= 1.1 * of_one_row[0]


@pytest.mark.parametrize("window", [None, 128, 1024])
@pytest.mark.parametrize("chunk_size", [4096, 8192, 16384])
def test_many_short_rows_launch_no_more_than_a_long_one(monkeypatch, chunk_size, window):
    check_launches(monkeypatch, chunk_size, window)


MUTANTS = {
    "a call for each row": (
        FLASH,
        "tiling",
        dataclasses.replace(FLASH.tiling, native_varlen=False),
        128,
    ),
    "one for the row before the chunk": (spans, "MAX_JOINED_KEYS", 0, None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_more_calls_are_found(mutant, monkeypatch):
    *wrong, window = MUTANTS[mutant]
    monkeypatch.setattr(*wrong)
    with pytest.raises(AssertionError):
        check_launches(monkeypatch, 8192, window)


def test_a_long_document_before_the_chunk_goes_to_the_faster_kernel(monkeypatch):
    """Its keys are many: cuDNN reads them in half of the time."""
    packed = Spans(
        20_000,
        (
            (
                QueryRun(0, 15_000, 0),
                QueryRun(15_000, 17_000, 15_000),
                QueryRun(17_000, 20_000, 17_000),
            ),
        ),
    )
    recorder, _ = run(monkeypatch, packed, 8192)
    calls_by_kernel = Counter(operator for operator, *_ in recorder.calls)
    assert calls_by_kernel["varlen"] == 2  # of the second chunk and the third
    assert calls_by_kernel["cudnn"] > 2
