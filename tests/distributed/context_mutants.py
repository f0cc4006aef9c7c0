"""What context parallelism may get wrong, for tests that must see it."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from streambp.attention import masks
from streambp.chunks import Chunk
from streambp.sharded import call as sharded_call
from streambp.sharded.gathered_keys import GatheredShards
from streambp.sharded.shards import Shards

real_pieces = GatheredShards.chunk_shards


def pieces_in_rank_order(self, batch_size, size):
    """Queries where they would be if rank r held the tokens [r T / P, (r + 1) T / P)."""
    return real_pieces(dataclasses.replace(self, balanced=False), batch_size, size)


def pieces_at_local_positions(self, batch_size, size):
    """Queries at their places in the shard."""
    return [
        queries._replace(full_chunk=Chunk(*dataclasses.astuple(queries.local_chunk)))
        for queries in real_pieces(self, batch_size, size)
    ]


def keys_in_rank_order(self, x, real=GatheredShards.to_sequence_order):
    """Of positions and masks, [P, B, T / P], the order is right: it is checked."""
    return real(self, x) if x.dim() == 3 else Shards.to_sequence_order(self, x)


def own_part_alone(self, sums, dtype, heads):
    """dK and dV from this rank's queries, without other ranks'."""
    return [self.to_rank_parts(x)[self.rank].to(dtype).transpose(1, 2) for x in sums]


def read_off_the_shard(mask, full_spans, length, position_ids, device, all_parts):
    """Documents as the shard's own positions show them: where parts meet there is none, and others'
    are not known."""
    shard_spans = masks.resolve(mask, len(full_spans.rows), length, position_ids, None, device)
    rows = tuple(tuple(dataclasses.replace(run) for run in runs) for runs in shard_spans.rows)
    last = rows[0][-1].q0
    last_run = masks.QueryRun(length, full_spans.length, last)
    return masks.Spans(
        full_spans.length, tuple((*runs, last_run) for runs in rows), shard_spans.window
    )


MUTANTS = {
    "shards in rank order": (GatheredShards, "chunk_shards", pieces_in_rank_order),
    "keys in rank order": (GatheredShards, "to_sequence_order", keys_in_rank_order),
    "own shard's dK and dV only": (GatheredShards, "own_gradients", own_part_alone),
    "local positions": (GatheredShards, "chunk_shards", pieces_at_local_positions),
    "a mask read off the shard's own positions": (
        sharded_call,
        "resolve_full_mask",
        read_off_the_shard,
    ),
}


@contextlib.contextmanager
def applied(name):
    """Within, that mutant; None: none."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setattr(*MUTANTS[name])
        yield
