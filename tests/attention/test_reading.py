"""Chunk ends and empty queries of masks without a rule, against brute force over every place and
every pair.

covers: attention/mask_scan.py, chunks.py
"""

from __future__ import annotations

import random

import pytest
import torch

from streambp.attention import mask_scan as reading
from streambp.attention.mask_scan import find_barriers, find_empty, move_ends
from streambp.chunks import Barrier, ChunkPlan
from streambp.errors import UnsupportedMaskError
from tests.families import LENGTH

CPU = torch.device("cpu")


def random_mask(seed):
    """[2, 2, T, T], True is read: causal, with blocks that read all of themselves, some queries
    without a key."""
    draw = random.Random(seed)
    mask = torch.ones(2, 2, LENGTH, LENGTH, dtype=torch.bool).tril()
    for row in range(2):
        for _ in range(draw.randrange(3)):
            first = draw.randrange(LENGTH)
            block = slice(first, first + draw.randrange(1, 9))
            mask[row, draw.choice([slice(None), slice(1)]), block, block] = True
        padding = draw.choice([0, 0, 3])
        mask[row, :, :, :padding] = False
        mask[row, :, :padding] = False
    return mask


def tiles_of(mask):
    return lambda q0, q1, k0, k1: mask[:, :, q0:q1, k0:k1]


def legal_ends(mask):
    return [end for end in range(1, LENGTH) if not mask[:, :, :end, end:].any()]


@pytest.fixture(params=[4, 1024])
def scan(request, monkeypatch):
    monkeypatch.setattr(reading, "SCAN_TILE_SIZE", request.param)


@pytest.mark.usefixtures("scan")
@pytest.mark.parametrize("seed", range(12))
def test_barriers_and_moved_ends(seed):
    mask = random_mask(seed)
    legal = legal_ends(mask)
    barriers = find_barriers(tiles_of(mask), LENGTH, CPU)
    assert [
        end for end in range(1, LENGTH) if not any(b.first <= end <= b.last for b in barriers)
    ] == legal
    for size in range(1, LENGTH):
        plan = move_ends(ChunkPlan(LENGTH, size), barriers)
        assert plan.ends[-1] == LENGTH
        assert set(plan.ends[:-1]) <= set(legal)
        for chunk in plan:
            sooner = [end for end in legal if chunk.start < end < chunk.stop]
            # longer only where nothing else can be done
            assert chunk.stop - chunk.start <= size or not sooner
            later = [end for end in [*legal, LENGTH] if chunk.stop < end <= chunk.start + size]
            assert not later  # and no shorter than it must be
            assert {plan.chunk_index(position) for position in range(chunk.start, chunk.stop)} == {
                chunk.index
            }
        assert plan.longest == max(chunk.stop - chunk.start for chunk in plan)
        assert list(plan.backward) == list(plan)[::-1]


def test_even_chunks_stay_as_they_are():
    plan = ChunkPlan(LENGTH, 5)
    assert plan.ends == (5, 10, 15, 20, 23)
    assert move_ends(plan, ()) is plan
    assert ChunkPlan(LENGTH, 22).ends == (22, 23)


def test_no_end_at_all():
    barriers = (Barrier(1, LENGTH - 1),)
    with pytest.raises(UnsupportedMaskError, match=f"not causal.*chunk_size of at least {LENGTH}"):
        move_ends(ChunkPlan(LENGTH, 5), barriers)
    assert move_ends(ChunkPlan(LENGTH, LENGTH), barriers).ends == (LENGTH,)
    assert move_ends(ChunkPlan(LENGTH, 5), (Barrier(1, LENGTH - 2),)).ends == (LENGTH - 1, LENGTH)


@pytest.mark.usefixtures("scan")
@pytest.mark.parametrize("seed", range(12))
def test_empty_queries(seed):
    mask = random_mask(seed)
    expected = ~mask.any(-1).any(1)
    empty, harmless = find_empty(tiles_of(mask), LENGTH, CPU)
    assert harmless
    assert torch.equal(torch.zeros_like(expected) if empty is None else empty, expected)
    mask[0, :, 9] = False
    _, harmless = find_empty(tiles_of(mask), LENGTH, CPU)
    assert not harmless  # others read its key
    mask[0, :, :, 9] = False
    assert find_empty(tiles_of(mask), LENGTH, CPU)[1]
    mask[0, 0, 9, 9] = True
    assert not find_empty(tiles_of(mask), LENGTH, CPU)[1]  # one head reads
