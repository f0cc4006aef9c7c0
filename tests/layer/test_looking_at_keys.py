"""Attention that works out from all keys itself which are read, or how much: indexers, passed
picks, position biases.

covers: attention/interface.py, attention/self_attending.py, cache.py, recurrent/carriers.py
"""

from __future__ import annotations

import copy

import pytest
import torch

import streambp
from streambp.admission import entry
from streambp.admission.probe import Verdict
from streambp.attention import kinds as attention_carriers
from streambp.attention.self_attending import OwnMask
from streambp.cache import ChunkCache, LayerKeys
from streambp.known_names import DISTANCES
from streambp.recurrent import carriers as state_carriers
from tests import zoo
from tests.families import make_batch
from tests.oracle import gradients, worst_error
from tests.recurrent.test_states import check_exact, patched
from tests.tiers import thinned
from tests.versions import needs_deepseeks_picks, needs_indexers

KINDS = ("deepseek_v32", "glm_moe_dsa", "inkling_text", "inkling2_text", "inkling2_loop_text")
DEEPSEEK = pytest.param("deepseek_v32", marks=needs_deepseeks_picks)


pytestmark = pytest.mark.usefixtures("float64_everywhere")


@pytest.mark.parametrize("sizes", [[2, 10], pytest.param([1, 5], marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize(
    "name",
    [pytest.param("glm_moe_dsa", marks=needs_indexers), "inkling_text", "inkling2_loop_text"],
)
def test_chunks_of_a_few_tokens(name, sizes):
    check_exact(name, 11, sizes)


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [2, 3, 16, 26])
def test_every_kind_at_other_lengths(name, length):
    check_exact(name, length, [1, 3, 5])


@needs_deepseeks_picks
def test_the_tiny_model_is_sparse():
    """Else nothing here would say anything about picking."""
    batch = make_batch("plain")
    few_keys, all_keys = (
        gradients(zoo.build("deepseek_v32", index_topk=k), **batch) for k in (4, 64)
    )
    assert abs(few_keys[0] - all_keys[0]) > 1e-4
    assert few_keys[1].keys() == all_keys[1].keys()
    assert not any("indexer" in name for name in few_keys[1])


@needs_indexers
def test_later_layers_read_what_an_earlier_one_picked():
    stock = zoo.build("glm_moe_dsa", indexer_types=["full", "shared"], index_topk=8)
    assert stock.model.layers[1].self_attn.indexer is None
    for chunk_size, mode in ((5, "left-padded"), (3, "right-padded"), (16, "packed")):
        batch = make_batch(mode)
        _, expected = gradients(stock, **batch)
        ours = patched(stock, chunk_size=chunk_size)
        assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-10
        assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


BLOCKS = {  # MiniMax M3's, of four keys; one layer has no indexer
    "num_hidden_layers": 3, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "dense", "sparse"], "rotary_dim": 8, "index_n_heads": 2, "index_block_size": 4,
    "index_topk_blocks": 2, "index_head_dim": 8,
}  # fmt: skip
STREAMS, CHECKPOINTS = "streams", "checkpoints"


def blocks_picked(batch, chunk_size=5, implementation="sdpa", **changes):
    """How each layer ran and why, where the gradients are the unpatched model's."""
    stock = zoo.build("minimax_m3_vl_text", **{**BLOCKS, **changes})
    stock.config._attn_implementation = implementation
    expected_loss, expected = gradients(stock, **batch)
    ours = patched(stock, chunk_size=chunk_size)
    loss, our_gradients = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10
    return streambp.describe(ours).layers, loss


@pytest.mark.full
@pytest.mark.parametrize("implementation", thinned(["sdpa", "eager"], lambda name: name == "sdpa"))
def test_blocks_of_keys_that_an_indexer_picks(implementation):
    """Its keys are in a layer of the cache. A block may be cut by a chunk's end."""
    losses = []
    for mode, chunk_size, topk in (
        ("plain", 1, 2),
        ("plain", 7, 2),
        ("right-padded", 5, 2),
        ("right-padded", 5, 64),
    ):
        layers, loss = blocks_picked(
            make_batch(mode), chunk_size, implementation, index_topk_blocks=topk
        )
        assert [layer.path for layer in layers] == [STREAMS] * 3
        losses.append(loss)
    assert abs(losses[2] - losses[3]) > 1e-4  # else picking all would be as good


@pytest.mark.parametrize(
    ("mode", "reason"), [("left-padded", "padding on the right"), ("packed", "by position_ids")]
)
def test_blocks_of_which_a_mask_leaves_nothing(mode, reason):
    """A query gets the mean over all keys then, which the next indexer reads."""
    layers, _ = blocks_picked(make_batch(mode))
    assert [layer.path for layer in layers] == [STREAMS, CHECKPOINTS, CHECKPOINTS]
    assert all(reason in layer.reason for layer in layers[1:])


def test_the_mutant_that_cuts_them_all(monkeypatch):
    monkeypatch.setattr(attention_carriers, "why_picked_blocks_stay_whole", lambda *_: None)
    for mode in ("left-padded", "packed"):
        with pytest.raises(AssertionError):
            blocks_picked(make_batch(mode))


def test_blocks_after_padding_that_eager_attention_averages_over():
    ours = patched(zoo.build("minimax_m3_vl_text", **BLOCKS), chunk_size=5)
    ours.config._attn_implementation = "eager"
    with pytest.raises(
        streambp.StreamBPError, match=r"pads on the left.*indexer of MiniMaxM3VLDecoderLayer"
    ):
        gradients(ours, **make_batch("left-padded"))


@needs_deepseeks_picks
def test_a_label_that_padding_predicts():
    """What may read nothing gives 0 by sdpa, whatever an indexer picks for it."""
    stock, batch = zoo.build("deepseek_v32"), make_batch("left-padded")
    is_token = batch["attention_mask"] == 1
    # the first token after padding, too
    batch["labels"] = batch["input_ids"].masked_fill(~is_token, -100)
    # a pad token's embedding would be zero
    batch["input_ids"] = batch["input_ids"].masked_fill(~is_token, 7)
    _, expected = gradients(stock, **batch)
    _, our_gradients = gradients(patched(stock, chunk_size=5), **batch)
    assert worst_error(our_gradients, expected) <= 1e-10


@pytest.mark.parametrize("name", [DEEPSEEK, pytest.param("inkling_text", marks=pytest.mark.full)])
def test_saving_and_offloading_change_no_bit(name):
    stock, batch = zoo.build(name), make_batch("plain")
    _, expected = gradients(patched(stock, chunk_size=5), **batch)
    for settings in (
        {"saves": ("kv",)},
        {"saves": ("kv",), "offload": "cpu"},
        {"offload": "cpu", "gpu_memory": 1},
    ):
        _, our_gradients = gradients(patched(stock, chunk_size=5, **settings), **batch)
        assert all(torch.equal(our_gradients[name], expected[name]) for name in expected), settings


# its cache's states are of rounded sizes
WIDE_SIZES = {"xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 4}}


@pytest.mark.parametrize("name", [DEEPSEEK, "xlstm"])
def test_without_a_graph_and_generation(name):
    stock = zoo.build(name, **WIDE_SIZES.get(name, {})).eval()
    ours = patched(stock, chunk_size=5)
    batch = make_batch("plain")
    with torch.no_grad():
        losses = [model(**batch, use_cache=False).loss for model in (stock, ours)]
    assert abs(losses[0] - losses[1]) <= 1e-12
    expected, computed = (
        model.generate(batch["input_ids"], max_new_tokens=4, min_new_tokens=4, do_sample=False)
        for model in (stock, ours)
    )
    assert torch.equal(expected, computed)


def test_a_long_evaluation_of_a_model_that_cuts_it_itself():
    """xLSTM hands its layers states, then: they run as unpatched."""
    stock = zoo.build("xlstm", max_inference_chunksize=8, **WIDE_SIZES["xlstm"]).eval()
    ours = patched(copy.deepcopy(stock), chunk_size=5)
    ids = make_batch("plain")["input_ids"]
    with torch.no_grad():
        expected, logits = (model(ids, use_cache=False).logits for model in (stock, ours))
    assert torch.equal(expected, logits)


def without_gradient(self, result, cache, real=state_carriers.StateCarrier.collect):
    collected = real(self, result, cache)
    if cache is not None:
        cache.end_states = {
            key: state.detach().requires_grad_() for key, state in cache.end_states.items()
        }
    return collected


def counted_from_zero(self, chunk):
    return torch.ones(1, 1, chunk.stop - chunk.start, chunk.stop, dtype=torch.bool).tril()


def of_the_chunk_alone(self, keys, *_, **__):
    return torch.cat((torch.zeros_like(keys[:, :1]).expand(-1, self.start, -1), keys), 1)


def of_the_blocks_alone(self, keys):
    return torch.cat(
        (torch.zeros_like(keys[..., :1, :]).expand(-1, -1, self._cache.start, -1), keys), -2
    )


CHUNK_ARGUMENTS = attention_carriers.CacheAttention.chunk_arguments


def from_the_chunks_start(self, arguments, chunk_attention):
    distances = {
        name: arguments[name] - chunk_attention.chunk.start
        for name in (DISTANCES,)
        if name in arguments
    }
    return CHUNK_ARGUMENTS(self, {**arguments, **distances}, chunk_attention)


MUTANTS = {
    "an indexer's blocks of the chunk alone": (LayerKeys, "update_index", of_the_blocks_alone, "minimax_m3_vl_text"),
    "an indexer's keys of the chunk alone": (ChunkCache, "update_indexer", of_the_chunk_alone, "deepseek_v32"),
    "biases as in the first chunk": (ChunkCache, "get_query_offset", lambda self, *_: 0, "inkling_text"),
    "a mask as of the first chunk": (OwnMask, "chunk_mask", counted_from_zero, "inkling_text"),
    "distances as in the first chunk": (
        attention_carriers.CacheAttention, "chunk_arguments", from_the_chunks_start,
        "inkling2_loop_text"
    ),
    "returned states without their gradient": (state_carriers.StateCarrier, "collect", without_gradient, "xlstm"),
}  # fmt: skip


@pytest.mark.fast(3)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_turns_a_test_red(mutant, monkeypatch):
    owner, attribute, wrong, name = MUTANTS[mutant]
    stock, batch = zoo.build(name, **(BLOCKS if "minimax" in name else {})), make_batch("plain")
    _, expected = gradients(stock, **batch)
    assert worst_error(gradients(patched(stock, chunk_size=5), **batch)[1], expected) <= 1e-10
    monkeypatch.setattr(entry, "can_stream", lambda call: Verdict(True))
    monkeypatch.setattr(owner, attribute, wrong)
    assert worst_error(gradients(patched(stock, chunk_size=5), **batch)[1], expected) > 1e-6
