"""Calls of CUDA's kernels over the packed row of a group of completions, on meta tensors.

covers: attention/spans.py, prefixes/tree.py
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch

from streambp.attention import spans
from streambp.prefixes.tree import Tree, find_tree
from tests.attention.meta_runs import run

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
    assert isinstance(tree, Tree)
    assert tree.length == PROMPT + TOKENS
    return tree


def calls(monkeypatch, branches):
    """Of each operator, how many; each is checked for what cuDNN takes, and for how its blocks are cut."""
    recorder, counted = run(monkeypatch, group(branches).spans(), CHUNK)
    assert counted.syncs == 0
    assert all(len(layouts) == 1 for layouts in recorder.graphs.values())
    for operator, queries, keys, _ in recorder.calls:
        if operator.startswith("cudnn"):
            for length in (queries, keys):
                assert length % spans.GRID == 0 or (length >= 256 and length & (length - 1) == 0)
    return Counter(operator for operator, *_ in recorder.calls)


def check_counts(monkeypatch):
    """As many for 64 branches as for 16: none is a block of its own."""
    few = calls(monkeypatch, 16)
    assert few == calls(monkeypatch, 64)
    chunks = -(-(PROMPT + TOKENS) // CHUNK)
    assert few["varlen"] == few["varlen backward"] == chunks - PROMPT // CHUNK  # one in each chunk that has branches


def test_branches_of_a_chunk_are_one_call(monkeypatch):
    check_counts(monkeypatch)


def test_a_block_for_each_branch_is_found(monkeypatch):
    monkeypatch.setattr(spans, "_is_packed", lambda runs: False)
    with pytest.raises(AssertionError):
        check_counts(monkeypatch)
