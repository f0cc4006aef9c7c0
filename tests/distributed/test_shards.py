"""The exchange of tokens for heads, all ranks simulated in this process; and what is read off the
shards' tokens.

covers: attention/spans.py, model/split.py, sharded/shards.py
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import streambp
from streambp.attention.spans import QueryRun, Spans
from streambp.distributed.ulysses import SplitGroup
from streambp.errors import StreamBPError, UnsupportedModelError
from streambp.model import split, wrappers
from streambp.sharded.shards import Shards, gather_shards
from tests.families import build
from tests.seeds import seed_torch


class SentError(Exception):  # ends a rank's first run
    pass


def on_all_ranks(shards, method, tensors, *args):
    """What `method` returns on every rank: run once to see what each sends, and again to hand
    everybody's parts around."""
    sent = []

    def capture(received, parts, group=None):
        sent.append(parts.clone())
        raise SentError

    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", capture)
        for tensor in tensors:
            with pytest.raises(SentError):
                getattr(shards, method)(tensor, *args)
        for rank, tensor in enumerate(tensors):
            received = torch.stack([parts[rank] for parts in sent])
            patch.setattr(
                dist,
                "all_to_all_single",
                lambda out, parts, group=None, chunks=received: out.copy_(chunks),
            )
            results.append(getattr(shards, method)(tensor, *args))
    return results


def check_exchange(ranks, heads):
    """Rank r gets heads [r H / P, (r + 1) H / P) of all tokens, and its own tokens back."""
    seed_torch(0)
    length = 3
    full = torch.randn(2, heads, ranks * length, 5)
    shards = Shards(None, ranks, length, Spans.causal(2, ranks * length))
    at_heads = on_all_ranks(shards, "queries", list(full.split(length, 2)))
    repeats = max(1, ranks // heads)
    expected = full.repeat_interleave(repeats, 1).chunk(ranks, 1)
    assert all(torch.equal(shard, part) for shard, part in zip(at_heads, expected, strict=True))
    returned_shards = on_all_ranks(shards, "tokens", at_heads, heads)
    for shard, part in zip(returned_shards, full.split(length, 2), strict=True):
        torch.testing.assert_close(shard, repeats * part)  # the sum over a head's copies


@pytest.mark.parametrize(("ranks", "heads"), [(1, 4), (2, 4), (4, 4), (2, 1), (4, 2), (3, 6)])
def test_exchange(ranks, heads):
    check_exchange(ranks, heads)


def test_copies_of_a_head_are_summed_in_float32():
    shards = Shards(None, 4, 1, Spans.causal(1, 4))
    parts = [
        torch.full((1, 1, 4, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)
    ]
    shard_sums = on_all_ranks(shards, "tokens", parts, 1)
    assert all(total.item() == 260.0 for total in shard_sums)  # 256 if every sum were rounded


def test_heads_that_cannot_be_split():
    with pytest.raises(
        UnsupportedModelError, match="6 attention heads cannot be split over 4 ranks"
    ):
        Shards(None, 4, 2, Spans.causal(1, 8)).queries(torch.randn(1, 6, 2, 3))


def gather(patch, rank, batch, agreed=(0, 0)):
    """What two ranks with these halves of a batch agree on, as `rank` sees it."""
    halves = [{name: tensor.chunk(2, 1)[r] for name, tensor in batch.items()} for r in range(2)]
    headers = [
        torch.tensor([2, 4, 2 * len(batch["position_ids"]) + len(batch) - 1, agreed[r], 0])
        for r in range(2)
    ]
    queue = [headers, [half_batch["position_ids"] for half_batch in halves]]
    if "attention_mask" in batch:
        queue.append([half_batch["attention_mask"].to(torch.uint8) for half_batch in halves])

    def all_gather(parts, tensor, group=None):
        all_parts = queue.pop(0)
        assert torch.equal(tensor, all_parts[rank])
        for part, tensor_of_rank in zip(parts, all_parts, strict=True):
            part.copy_(tensor_of_rank)

    patch.setattr(dist, "get_world_size", lambda group=None: 2)
    patch.setattr(dist, "get_rank", lambda group=None: rank)
    patch.setattr(dist, "all_gather", all_gather)
    mine, tokens = halves[rank], torch.zeros(2, 4)
    return gather_shards(
        Shards, None, tokens, mine["position_ids"], mine.get("attention_mask"), agreed[rank]
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_documents_and_padding_reach_over_shards(rank, monkeypatch):
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
    packed = gather(monkeypatch, rank, {"position_ids": positions})
    assert (packed.size, packed.length, packed.full_length) == (2, 4, 8)
    assert packed.spans == Spans(
        8, ((QueryRun(0, 3, 0), QueryRun(3, 7, 3), QueryRun(7, 8, 7)), (QueryRun(0, 8, 0),))
    )
    mask = torch.tensor([[0] * 5 + [1] * 3, [1] * 6 + [0] * 2])
    padded = gather(monkeypatch, rank, {"position_ids": positions[1:], "attention_mask": mask})
    assert padded.spans == Spans(
        8, ((QueryRun(5, 8, 5),), (QueryRun(0, 6, 0), QueryRun(6, 8, 0, 6)))
    )


def test_a_hole_between_two_shards_is_refused(monkeypatch):
    """Each shard alone looks like padding."""
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1], [1] * 8])
    with pytest.raises(streambp.StreamBPError, match="masks tokens in the middle of a row"):
        gather(monkeypatch, 0, {"position_ids": torch.arange(8)[None], "attention_mask": mask})


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_would_exchange_differently_raise_on_all_of_them(rank, monkeypatch):
    with pytest.raises(StreamBPError, match="chunk_size excepted"):
        gather(monkeypatch, rank, {"position_ids": torch.arange(8)[None]}, agreed=(0, 1))


def test_a_rank_that_does_not_split_its_batch_leaves_the_others_waiting(monkeypatch):
    def all_gather(parts, tensor, group=None):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    with pytest.raises(StreamBPError, match="did not all begin this forward"):
        gather_shards(Shards, None, torch.zeros(2, 4), torch.arange(4)[None], None)


@pytest.mark.parametrize("after_a_step", [False, True])
def test_a_layer_that_no_model_has_told_of_its_shard_is_refused(monkeypatch, after_a_step):
    """Called by itself it would attend within this rank's tokens, and train another model without a
    word."""
    model = streambp.patch(build("qwen3"), streambp.StreamConfig(chunk_size=5))
    hidden_states = torch.randn(1, 11, model.config.hidden_size)  # [B, T, h]
    positions = model.model.rotary_emb(hidden_states, torch.arange(11)[None])
    if after_a_step:
        model(torch.arange(11)[None], use_cache=False)  # an ordinary step before it
    monkeypatch.setattr(wrappers, "is_initialized", lambda: True)
    monkeypatch.setattr(split, "find_context_parallel", lambda: SplitGroup(None, True))
    with pytest.raises(
        UnsupportedModelError, match="called directly while sequences are split over ranks"
    ):
        model.model.layers[0](hidden_states, position_embeddings=positions)
