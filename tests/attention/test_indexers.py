"""Sparse attention with an indexer: scored a few queries at a time, picked once, masked one block
at a time.

covers: attention/indexers.py, attention/picked_keys.py, attention/interface.py,
    layer/saved_tensors.py,
planner/survey.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import streambp
from streambp.admission import entry
from streambp.admission.own_run import StreamingMismatchError
from streambp.admission.probe import Verdict
from streambp.admission.stacks import kind_of
from streambp.attention import indexers, interface, picked_keys
from streambp.attention.interface import InterfaceAttention
from streambp.attention.kinds import SparseAttention
from streambp.attention.prefix import Prefix, PrefixChunkAttention, Stage
from streambp.attention.spans import Spans
from streambp.chunks import Chunk
from streambp.errors import BackwardError, UnsupportedModelError
from streambp.layer.layer_state import LayerState
from streambp.layer.saved_tensors import SavedForBackward
from streambp.planner.laws import features
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import streamed_recipe, survey
from tests import zoo
from tests.families import make_batch
from tests.oracle import gradients, worst_error
from tests.recurrent.test_states import patched
from tests.tiers import thinned
from tests.versions import needs_indexers

pytestmark = needs_indexers

TOPK, LENGTH, CHUNK = 4, 23, 5
QUERIES_AT_A_TIME = 3  # queries of the last chunk that are scored at a time
SPARSE_FAMILIES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text")


@pytest.fixture(autouse=True)
def float64_everywhere(float64_oracle):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(name="deepseek_v32", **changes):
    return zoo.build(name, index_topk=TOPK, **changes)


def scores_for(model, monkeypatch, queries=QUERIES_AT_A_TIME, length=LENGTH):
    """The scores of so many queries against all keys may exist."""
    heads = next(m for m in model.modules() if type(m).__name__.endswith("Indexer")).n_heads
    monkeypatch.setattr(indexers, "MAX_SCORE_BYTES", 4 * heads * length * queries)
    return heads * length * queries


def check(stock, batch, chunk_size=CHUNK, **settings):
    """The patched model, where its loss and gradients are the unpatched model's."""
    expected_loss, expected = gradients(copy.deepcopy(stock), **batch)
    ours = patched(stock, chunk_size=chunk_size, **settings)
    loss, our_gradients = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10
    return ours


@pytest.mark.parametrize("mode", ["plain", "left-padded", "right-padded", "packed"])
@pytest.mark.parametrize(
    "name",
    [
        n if n == "deepseek_v32" else pytest.param(n, marks=pytest.mark.full)
        for n in SPARSE_FAMILIES
    ],
)
def test_a_few_queries_at_a_time(name, mode, monkeypatch):
    stock = build(name)
    scores_for(stock, monkeypatch)
    ours = check(stock, make_batch(mode))
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator makes."""

    def __init__(self):
        super().__init__()
        self.max_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, torch.Tensor):
                self.max_elements = max(self.max_elements, part.numel())
        return result


def largest_of_a_step(monkeypatch, length=96):
    """In units of T * T, and what the scores of two queries have."""
    ours = patched(build(), chunk_size=12)
    scores = scores_for(ours, monkeypatch, 2, length)
    batch = {**make_batch("plain", length=length)}
    batch = {name: value[:1] for name, value in batch.items()}
    gradients(ours, **batch)  # what is tried before the first step is small
    with Largest() as largest:
        ours(**batch, use_cache=False).loss.backward()
    return largest.max_elements / length**2, scores / length**2


def test_nothing_is_as_large_as_a_mask_of_the_sequence(monkeypatch):
    max_share, scores = largest_of_a_step(monkeypatch)
    assert scores < 0.7
    assert max_share < 1.0


def test_the_mutant_that_scores_a_chunk_at_once(monkeypatch):
    step = indexers._pick_in_parts

    def at_once(*args):
        with monkeypatch.context() as patch:
            patch.setattr(indexers, "MAX_SCORE_BYTES", 2**40)
            return step(*args)

    monkeypatch.setattr(indexers, "_pick_in_parts", at_once)
    assert largest_of_a_step(monkeypatch)[0] > 1.0


def loss_then_other_picks(monkeypatch, **settings):
    """The error of gradients where an indexer that is asked in backward would pick other keys; and
    how often it was."""
    stock, batch = build(), make_batch("plain")
    _, expected = gradients(copy.deepcopy(stock), **batch)
    ours = patched(stock, chunk_size=CHUNK, **settings)
    gradients(ours, **batch)
    calls = 0
    loss = ours(**batch, use_cache=False).loss
    ours.zero_grad()
    real = indexers._pick_in_parts

    def pick_key_zero(*args):
        nonlocal calls
        calls += 1
        return torch.zeros_like(real(*args))

    monkeypatch.setattr(indexers, "_pick_in_parts", pick_key_zero)
    loss.backward()
    our_gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    return worst_error(our_gradients, expected), calls


SETTINGS = (
    {},
    {"saves": ("attn_out",)},
    {"offload": "cpu"},
    {"saves": ("kv", "attn_out"), "offload": "cpu"},
)


@pytest.mark.parametrize(
    "settings", thinned(SETTINGS, lambda s: s in ({}, {"offload": "cpu"})), ids=str
)
def test_backward_reads_what_forward_picked(settings, monkeypatch):
    error, calls = loss_then_other_picks(monkeypatch, **settings)
    assert calls == 0
    assert error <= 1e-10


def test_the_mutant_that_picks_again(monkeypatch):
    monkeypatch.setattr(SavedForBackward, "picks", lambda self: None)
    with pytest.raises(BackwardError, match="not in backward what it was in forward"):
        loss_then_other_picks(monkeypatch)
    monkeypatch.setattr(LayerState, "witness", lambda self, x, autocast: None)
    error, calls = loss_then_other_picks(monkeypatch)
    assert calls > 0
    assert error > 1e-6


def test_picks_are_kept_until_their_chunk_is_differentiated(monkeypatch):
    """8 KB a token at 2,048 picks: 4 bytes each."""
    saved_calls = []
    real = SavedForBackward.keep
    monkeypatch.setattr(
        SavedForBackward,
        "keep",
        lambda self, chunk, *args: (real(self, chunk, *args), saved_calls.append(self))[0],
    )
    ours = patched(build(), chunk_size=CHUNK, saves=())
    loss = ours(**make_batch("plain"), use_cache=False).loss
    stores = {id(call): call.store for call in saved_calls}.values()
    sizes = [
        store.peek("picks.0", number).shape[-1]
        for store in stores
        for number in range(-(-LENGTH // CHUNK))
    ]
    assert set(sizes) == {TOPK}
    assert all(store.peek("picks.0", 0).dtype == torch.int32 for store in stores)
    assert not any(prefix.indexed.keys for prefix in (call.carried.prefix for call in saved_calls))
    loss.backward()
    assert not any(store.has("picks.0", 0) for store in stores)


def test_layers_that_have_all_keys_picked_attend_without_a_mask():
    batch = make_batch("plain")
    some_picked, all_picked = (
        check(zoo.build("deepseek_v32", v_head_dim=16, index_topk=k), batch) for k in (TOPK, LENGTH)
    )
    assert "masks" not in streambp.describe(all_picked).attention
    assert "masks" in streambp.describe(some_picked).attention


def test_what_describe_says():
    layers = streambp.describe(
        check(build("glm_moe_dsa", indexer_types=["full", "shared"]), make_batch("plain"))
    ).layers
    assert "its indexer's picks are kept, 16 bytes a token" in layers[0].reason
    assert "not picked" in layers[1].reason
    assert "kept" not in layers[1].reason


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_layer_that_runs_whole(implementation, monkeypatch):
    stock = build("glm_moe_dsa", indexer_types=["full", "shared"])
    stock.config._attn_implementation = implementation
    monkeypatch.setattr(entry, "can_stream", lambda call: Verdict(False, "a trial"))
    ours = check(stock, make_batch("right-padded"))
    assert {layer.reason for layer in streambp.describe(ours).layers} == {"a trial"}


def test_the_mutant_whose_unpatched_run_reads_all_keys(monkeypatch):
    """Routed, the layer leaves it to the attention function to mask what was not picked."""
    monkeypatch.setattr(interface, "_keep_picks", lambda mask, *_: mask)
    with pytest.raises(StreamingMismatchError, match="computes other values unpatched"):
        check(build(), make_batch("plain"))


def test_the_mutant_that_masks_nothing(monkeypatch):
    monkeypatch.setattr(entry, "can_stream", lambda call: Verdict(True))
    monkeypatch.setattr(picked_keys.PickedMask, "from_picks", lambda layer_mask, *_: layer_mask)
    with pytest.raises(AssertionError):
        check(build(), make_batch("plain"))


def host_bytes(picks, length=1024, chunk_size=256):
    """What a planned step keeps on the host."""
    with torch.device("meta"):
        config = zoo.tiny_config("deepseek_v32", index_topk=picks)
    skeleton, recipe = (
        Skeleton(config, torch.bfloat16, None, 16, "cuda"),
        streamed_recipe((), "cpu"),
    )
    counted = {"accumulating": False, "tree": False, "timed": False}
    profile = survey(skeleton, (recipe,), at=(length, chunk_size), **counted)
    method = next(m for m in profile.methods if m.name == recipe.name)
    return method.host.at(features(length, chunk_size))


@pytest.mark.full
def test_a_plan_counts_the_picks():
    layers, length = 2, 1024
    assert host_bytes(128) - host_bytes(64) == pytest.approx(4 * 64 * layers * length, rel=0.05)


@pytest.mark.parametrize("name", thinned(SPARSE_FAMILIES, lambda name: name == "deepseek_v32"))
def test_what_a_layer_is(name):
    """dots3: its sliding layers have no indexer."""
    kinds = {type(kind_of(layer).attention) for layer in zoo.build(name).model.layers}
    other_kinds = {"dots3_note_text": {SparseAttention, InterfaceAttention}}
    assert kinds == other_kinds.get(name, {SparseAttention})


def test_a_mask_of_picks():
    """Padding below, rows of one chunk, and picks outside of a block."""
    layout = Spans.causal(2, 9, window=4)
    picks = torch.tensor([[[0, 3], [4, 2], [7, 7]], [[1, 5], [3, 0], [5, 6]]])  # [B, C, k]
    mask = picked_keys.PickedMask.from_picks(layout, 9, Chunk(0, 5, 8), picks)
    visible_pairs = picked_keys.visible_keys(layout, 5, 8, 1, 7, torch.device("cpu"))
    tile = mask.tile(5, 8, 1, 7, torch.device("cpu"))
    assert tile.shape == (2, 1, 3, 6)
    for row, query, key in torch.cartesian_prod(
        torch.arange(2), torch.arange(3), torch.arange(6)
    ).tolist():
        read = key + 1 in picks[row, query] and query + 5 - 4 < key + 1 <= query + 5
        assert bool(tile[row, 0, query, key]) == read
        assert bool(visible_pairs[row, 0, query, key]) == (query + 5 - 4 < key + 1 <= query + 5)


def test_a_layer_without_an_indexer_cannot_read_its_mask():
    chunk_attention = PrefixChunkAttention(
        Prefix(Spans.causal(1, 4), 4, "auto"), Chunk(0, 0, 4), Stage.FORWARD
    )
    for read in (
        lambda: chunk_attention[:, 0],
        lambda: 0.0 in chunk_attention,
        lambda: list(chunk_attention),
    ):
        with pytest.raises(TypeError):
            read()
    chunk_attention.takes_picks = True
    assert chunk_attention[:, 0] is chunk_attention


def test_picks_of_a_layer_that_has_no_indexer():
    q = torch.randn(1, 2, 4, 8)
    layer = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedModelError, match="indices"):
        interface.stream_attention(
            layer, q, q, q, None, indices=torch.zeros(1, 4, 2, dtype=torch.int32)
        )


@pytest.mark.full
def test_ranks_that_have_a_shard_each():
    assert "all keys of the sequence" in SparseAttention.why_not_split
