"""Layers cut at their attention, on a group of one rank: the same gradients, no product twice,
bytes that do not grow with the number of ranks. Two ranks:
tests/distributed/test_split_sequences.py.

covers: sharded/call.py, sharded/gathered_keys.py, sharded/layer_halves.py, sharded/layer.py,
    sharded/shards.py
"""

from __future__ import annotations

import itertools
import types

import pytest
import torch
import torch.distributed as dist

import streambp
from streambp.attention.spans import Spans
from streambp.config import StreamConfig
from streambp.errors import UnsupportedMaskError, UnsupportedModelError
from streambp.known_names import GATHER, REDUCE_SCATTER
from streambp.layer.layer_state import LayerState
from streambp.sharded.gathered_keys import GatheredShards
from streambp.sharded.layer import stream_shard
from streambp.sharded.shards import Shards
from tests import zoo
from tests.counting import LinearFlops
from tests.device import ACCELERATOR
from tests.distributed.one_rank import give_back, split_over_one_rank, with_shifted_labels
from tests.families import MODES, build, make_batch
from tests.layer.test_arithmetic import LAYERS, LENGTH, layer_flops, meta_layer
from tests.layer.test_bytes import KB, qwen3_8b_layer, run_layer
from tests.oracle import assert_as_precise, gradients, relative_l2, worst_error
from tests.seeds import seed_torch
from tests.test_oracle import reference
from tests.tiers import thinned
from tests.versions import needs_diffllamas_calls, needs_indexers, needs_states


@pytest.fixture
def one_rank(monkeypatch):
    split_over_one_rank(monkeypatch)


def shard_gradients(model, batch, **config):
    streambp.patch(model, StreamConfig(**{"chunk_size": 5, **config}))
    return gradients(model, **with_shifted_labels(batch))


FAST_CASES = {
    "qwen3": (0, 1, 4, 2),
    "gemma3": (4, 0, 3, 1),
}  # the number of the saves for each mode


def settings():
    """In the fast tier one of all saves for each family and mode; two families meet all of them."""
    other_saves = [("attn_out",), ("kv",), ("attn_out", "kv"), ("self_attn.*", "mlp.up_proj")]
    for family, (m, mode) in itertools.product(FAST_CASES, enumerate(MODES)):
        for number, saves in enumerate([(), *other_saves]):
            fast = number == FAST_CASES[family][m]
            yield pytest.param(family, mode, saves, marks=() if fast else pytest.mark.full)


@pytest.mark.fast(3)
@pytest.mark.parametrize(("family", "mode", "saves"), settings())
def test_gradients_are_exact(family, mode, saves, one_rank, float64_oracle):
    expected_loss, expected = reference(family, mode)
    loss, our_gradients = shard_gradients(
        build(family, torch.float64), make_batch(mode), saves=saves
    )
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10


@pytest.mark.parametrize(
    "name",
    thinned(
        [
            "qwen3_moe",
            "gemma3n_text",
            "gemma4_text",
            "cohere2",
            "deepseek_v3",
            "granite",
            "gpt_oss",
        ],
        lambda name: name not in ("gemma4_text", "granite"),
    ),
)
def test_other_layers_are_exact(name, one_rank, float64_everywhere):
    """Experts, keys and values that later layers read, 4-D hidden states, no positions, latent
    attention, sinks."""
    model = zoo.build(name)
    expected_loss, expected = gradients(model, **make_batch("plain"))
    loss, our_gradients = shard_gradients(model, make_batch("plain"))
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10


@pytest.mark.fast("saves0")
@pytest.mark.parametrize("saves", [(), ("kv", "mlp.gate_proj")])
def test_offloading_and_recomputing_what_does_not_fit_change_nothing(saves, one_rank):
    expected = shard_gradients(build("qwen3"), make_batch("packed"), saves=saves)[1]
    small_host = {"host_memory": 8_000, "on_host_full": "recompute"}
    for settings in ({}, small_host, {"offload": "auto"}, {"offload": "auto", "saves": "auto"}):
        options = {"saves": saves, "offload": "cpu", **settings}
        model = streambp.patch(build("qwen3"), StreamConfig(chunk_size=5, **options))
        for _ in range(2):  # what is "auto" is chosen by the first step
            our_gradients = gradients(model, **with_shifted_labels(make_batch("packed")))[1]
            assert all(
                torch.equal(our_gradients[name], gradient) for name, gradient in expected.items()
            )
        if options["offload"] == "cpu":
            assert (model._streambp.offloader.stats()["left"] > 0) == ("host_memory" in settings)


def test_dropout_after_attention_is_drawn_as_in_chunks(monkeypatch, float64_oracle):
    """The same chunks in the same order draw the same masks, and backward replays them."""
    results = {}
    for split in (False, True):
        model = build("phi3", torch.float64, resid_pdrop=0.3)
        with monkeypatch.context() as patch:
            if split:
                split_over_one_rank(patch)
            seed_torch(3)
            results[split] = shard_gradients(model, make_batch("plain"))
    assert results[True][0] == pytest.approx(results[False][0].item(), rel=1e-12)
    assert worst_error(results[True][1], results[False][1]) <= 1e-10
    without = shard_gradients(build("phi3", torch.float64), make_batch("plain"))
    assert worst_error(results[True][1], without[1]) > 0.1


@pytest.mark.full
def test_autocast_is_replayed(one_rank):
    """Against float32, beside the unpatched model under autocast."""
    assert_as_precise(map(autocast_errors, itertools.count()))


def autocast_errors(seed):
    batch = with_shifted_labels(make_batch("plain", length=96, seed=seed))
    model = build("qwen3", seed=seed, hidden_size=64)
    _, truth = gradients(model, **batch)
    errors = []
    for patched in (False, True):
        if patched:
            streambp.patch(model, StreamConfig(chunk_size=11))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        errors.append(relative_l2({name: p.grad for name, p in model.named_parameters()}, truth))
        model.zero_grad(set_to_none=True)
    stock, ours = errors
    assert stock > 1e-3
    return ours, stock


def test_a_half_without_trainable_parameters_before_it(one_rank, float64_oracle):
    """The first layer's MLP alone is trained: nothing before its attention wants a gradient."""
    results = []
    for split in (False, True):
        model = build("qwen3", torch.float64)
        model.requires_grad_(False)
        for part in (model.model.layers[0].mlp, model.model.layers[1], model.lm_head):
            part.requires_grad_(True)
        batch = make_batch("plain")
        results.append((shard_gradients(model, batch) if split else gradients(model, **batch))[1])
    assert worst_error(results[1], results[0]) <= 1e-10


@pytest.mark.gpu(any=True)
@pytest.mark.parametrize("mode", ["plain", "packed"])
def test_on_a_gpu(mode, one_rank):
    """bf16 against float32 math, beside the unpatched model."""
    model = build("qwen3", device=ACCELERATOR, hidden_size=512, head_dim=128)
    batch = with_shifted_labels(make_batch(mode, length=1024, device=ACCELERATOR))
    _, truth = gradients(model.bfloat16().float(), **batch)
    model.bfloat16()
    _, stock = gradients(model, **batch)
    streambp.patch(model, StreamConfig(chunk_size=160, saves=("attn_out",)))
    _, ours = gradients(model, **batch)
    # one draw: up to a tenth off by chance
    assert relative_l2(ours, truth) <= 1.15 * relative_l2(stock, truth)


def lose(received, sent, group=None):
    raise RuntimeError("lost")


def test_without_grad_and_through_an_exception(one_rank, monkeypatch):
    model = streambp.patch(build("qwen3"), StreamConfig(chunk_size=5))
    batch = with_shifted_labels(make_batch("plain"))
    expected_loss, expected = gradients(model, **batch)
    with torch.no_grad():
        # Without a graph the head has other products, which a CPU may sum up in another order.
        assert abs(model(**batch, use_cache=False).loss - expected_loss) <= 1e-6 * expected_loss
    loss = model(**batch, use_cache=False).loss
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", lose)
        with pytest.raises(RuntimeError, match="lost"):
            loss.backward()
    loss, our_gradients = gradients(model, **batch)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(our_gradients[name], gradient) for name, gradient in expected.items())


def over(ranks, length):
    return Shards(None, ranks, length, Spans.causal(1, ranks * length))


# Norms after the products, and queries, keys and values in one product; the others' products are
# qwen3's.
PRODUCTS = ("qwen3-8b", "gemma3-4b, post-norm", "phi3-mini, fused qkv")


@pytest.mark.fast("phi3-mini, fused qkv")
@pytest.mark.parametrize("name", thinned(LAYERS, lambda name: name in PRODUCTS))
def test_linear_products_are_not_computed_in_both_halves(name, monkeypatch):
    """Beside torch's checkpointing; the streamed layer that is not cut has its own bars."""
    monkeypatch.setattr(dist, "all_to_all_single", give_back)
    layer, sizes, _ = meta_layer(name)
    head_dim = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    x = torch.empty(
        1, LENGTH, sizes["hidden_size"], dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    rotary = torch.empty(1, LENGTH, head_dim, dtype=torch.bfloat16, device="meta")
    arguments = {"attention_mask": None, "position_embeddings": (rotary, rotary)}
    with LinearFlops() as flops:
        out = stream_shard(
            LayerState(layer, StreamConfig(chunk_size=512)), (x,), arguments, over(2, LENGTH)
        )
        out.backward(torch.empty_like(out))
    ratio = flops.total / layer_flops(layer, sizes)
    print(f"{name}, cut at its attention: {ratio:.4f} x checkpointing's Linear FLOPs")
    assert ratio <= 1.05


def bytes_of_a_token(ranks, over=over):
    """Of this rank's shard, between 8k and 16k tokens: what a chunk takes is in both."""
    index = itertools.count()

    def forward(layer, x, position_embeddings):
        layer_state = LayerState(layer, StreamConfig(chunk_size=4096), index=next(index))
        arguments = {"attention_mask": None, "position_embeddings": position_embeddings}
        return stream_shard(layer_state, (x,), arguments, over(ranks, x.shape[1]))

    layer, lengths = qwen3_8b_layer(), (8192, 16384)
    short, long = (run_layer(layer, length, forward) for length in lengths)
    return {name: (long[name] - short[name]) / (lengths[1] - lengths[0]) / KB for name in long}


@pytest.mark.full
def test_bytes_of_a_token_do_not_grow_with_the_number_of_ranks(monkeypatch):
    monkeypatch.setattr(dist, "all_to_all_single", give_back)
    kilobytes = {ranks: bytes_of_a_token(ranks) for ranks in (2, 4)}
    for ranks, peaks in kilobytes.items():
        print(f"{ranks} ranks, Qwen3-8B layer, KB per token of the shard: {peaks}")
        assert peaks["last layer"] <= 45
        assert peaks["first layer"] <= 37
    assert kilobytes[2] == pytest.approx(kilobytes[4], rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [16, 64])
@pytest.mark.parametrize(("headroom", "of_shard", "of_whole"), [(1, 46, 2.6), (2**50, 51, 16)])
def test_bytes_where_keys_are_gathered(headroom, of_shard, of_whole, ranks, monkeypatch):
    """KB a token of the shard, and a token of the whole sequence: one kv head at a time, and all
    eight at once."""
    kilobytes = bytes_where_gathered(ranks, headroom, monkeypatch)
    print(f"{ranks} ranks, room {headroom}, KB per token of the shard: {kilobytes}")
    assert max(kilobytes.values()) <= of_shard + ranks * of_whole


def bytes_where_gathered(ranks, headroom, monkeypatch):
    arrived = types.SimpleNamespace(wait=lambda: None)
    for names in (GATHER, REDUCE_SCATTER):
        for name in names:
            monkeypatch.setattr(
                dist,
                name,
                lambda received, sent, group=None, async_op=False: arrived,
                raising=False,
            )

    def gathered(ranks, length):
        return GatheredShards(
            None, ranks, length, Spans.causal(1, ranks * length), headroom=headroom
        )

    return bytes_of_a_token(ranks, gathered)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"attention_dropout": 0.1}, "attention dropout"),
        pytest.param("diffllama", {}, "attended 2 times", marks=needs_diffllamas_calls),
        pytest.param("deepseek_v32", {}, "compares all keys of the sequence", marks=needs_indexers),
        ("xglm", {}, "attends by itself"),
        pytest.param("lfm2", {}, "goes on from a state", marks=needs_states),
        ("llama4_text", {"attention_chunk_size": 8}, "sliding window"),
    ],
)
def test_what_cannot_be_split_is_refused(family, changes, message, one_rank):
    model = (build if family == "qwen3" else zoo.build)(family, torch.float32, **changes)
    with pytest.raises((UnsupportedModelError, UnsupportedMaskError), match=message):
        shard_gradients(model, make_batch("plain"))


def test_what_cannot_be_known_of_other_shards_is_refused(one_rank):
    model = streambp.patch(build("qwen3"), StreamConfig(chunk_size=5))
    batch = with_shifted_labels(make_batch("plain"))
    length = batch["input_ids"].shape[1]
    holes = torch.ones_like(batch["input_ids"])
    holes[0, 7] = 0
    for change, message in (
        ({"position_ids": None}, "position_ids are missing"),
        ({"shift_labels": None}, "without shift_labels"),
        ({"attention_mask": torch.ones(2, 1, length, length).tril().bool()}, "padding mask"),
        ({"attention_mask": holes}, "masks tokens in the middle|no sliding window"),
        ({"cu_seq_lens_q": torch.tensor([0, length])}, "cu_seq_lens"),
    ):
        with pytest.raises(streambp.StreamBPError, match=message):
            model(**{**batch, **change}, use_cache=False)
    assert model(**batch, use_cache=False).loss.isfinite()
