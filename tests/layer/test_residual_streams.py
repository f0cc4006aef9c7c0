"""Hidden states [B, T, M, h], M residual streams behind the tokens (hyper-connections), and keys
that an indexer pools.

covers: admission/own_run.py, attention/self_attending.py, cache.py, layer/arguments.py
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import streambp
from streambp import cache
from streambp.admission import own_run
from streambp.attention import self_attending as cached
from streambp.errors import UnsupportedModelError
from streambp.layer import arguments
from tests import zoo
from tests.families import LENGTH, MODES, SIZES, make_batch
from tests.oracle import gradients, worst_error
from tests.recurrent.test_states import patched
from tests.seeds import seed_torch

STREAM_COUNT = 4  # of hy_v4


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def glm5_next(attention="sdpa"):
    """Linear attention, an indexer that pools four keys, a layer that reads what the one before
    picked; two streams."""
    module = pytest.importorskip(
        "transformers.models.glm5_next", reason="this transformers has no GLM 5 Next"
    )
    # the latter's name has changed
    linear, sparse = dict.fromkeys(module.Glm5NextTextConfig().layer_types)
    text = {
        **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "num_hidden_layers": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "index_topk": 8, "index_head_dim": 8, "index_n_heads": 32, "index_kpool": 4, "linear_head_dim": 8,
        "linear_num_heads": 2, "hc_mult": 2, "indexer_types": ["full", "full", "shared", "shared"],
        "layer_types": [linear, sparse, sparse, linear],
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32, "patch_size": 4,
        "image_size": 8, "projection_intermediate_size": 16,
    }  # fmt: skip
    config = module.Glm5NextConfig(text_config=text, vision_config=vision)
    config.text_config._experts_implementation = "eager"  # grouped products know no float64
    seed_torch(0)
    model = (
        module.Glm5NextForConditionalGeneration._from_config(config, attn_implementation=attention)
        .double()
        .train()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() <= 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


BUILD = {"hy_v4": lambda: zoo.build("hy_v4"), "glm5_next": glm5_next}


def check(stock, batch, chunk_size, path="streams", **settings):
    expected_loss, expected = gradients(copy.deepcopy(stock), **batch)
    ours = patched(stock, chunk_size=chunk_size, **settings)
    loss, our_gradients = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10
    assert {layer.path for layer in streambp.describe(ours).layers} == {path}
    return our_gradients


POOLED_CASES = (("plain", 5), ("packed", 16))


@pytest.mark.fast("packed-16")
@pytest.mark.parametrize(
    ("mode", "chunk_size"),
    [
        # Left-padded in chunks of 5: check_unchanged, which the mutants start from.
        pytest.param(
            mode, chunk_size, marks=() if (mode, chunk_size) in POOLED_CASES else pytest.mark.full
        )
        for mode in MODES
        for chunk_size in (5, 16)
    ],
)
def test_pooled_keys(mode, chunk_size):
    check(glm5_next(), make_batch(mode), chunk_size, documents="as_given")


def test_documents_that_its_attention_is_not_told_of():
    with pytest.raises(UnsupportedModelError, match="does not separate them"):
        patched(glm5_next(), chunk_size=5)(**make_batch("packed"), use_cache=False)


FEW_CASES = (("hy_v4", 2), ("hy_v4", 11), ("glm5_next", 3))


@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(name, length, marks=() if (name, length) in FEW_CASES else pytest.mark.full)
        for name in BUILD
        for length in (2, 3, 11)
    ],
)
def test_few_tokens(name, length):
    check(BUILD[name](), make_batch("plain", length=length), 2)


@pytest.mark.fast("as many-4")
@pytest.mark.parametrize(
    ("first", "streams"),
    [
        *(("as many", STREAM_COUNT), ("others", 7)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("as many", 7), ("others", STREAM_COUNT))
        ),
    ],
)
def test_as_many_tokens_as_streams(streams, first):
    """It cannot be told which are which: such calls run whole, those before and after do not."""
    stock = zoo.build("hy_v4", hc_mult=streams)
    ours = patched(stock, chunk_size=2)
    for length in (streams, LENGTH, streams) if first == "as many" else (LENGTH, streams, LENGTH):
        batch = make_batch("plain", length=length)
        assert (
            worst_error(gradients(ours, **batch)[1], gradients(copy.deepcopy(stock), **batch)[1])
            <= 1e-10
        )
        path = "checkpoints" if length == streams else "streams"
        assert {layer.path for layer in streambp.describe(ours).layers} == {path}


@pytest.mark.fast("offloaded-hy_v4")
@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize(
    "all_settings",
    [
        [{"saves": ("kv",), "offload": "cpu"}, {"offload": "cpu", "gpu_memory": 1}],
        pytest.param(
            [{"saves": ("kv",)}, {"saves": ("kv",), "gpu_memory": 1, "offload": "cpu"}],
            marks=pytest.mark.full,
        ),
    ],
    ids=["offloaded", "saved"],
)
def test_saving_and_offloading_change_no_bit(name, all_settings):
    stock, batch = BUILD[name](), make_batch("left-padded")
    expected = check(stock, batch, 5)
    for settings in all_settings:
        our_gradients = check(stock, batch, 5, **settings)
        assert all(torch.equal(our_gradients[name], expected[name]) for name in expected), settings


@pytest.mark.full
def test_padding_under_eager_attention():
    """There a query that reads nothing gets the mean over all keys, in a chunk over others."""
    stock = glm5_next("eager")
    check(stock, make_batch("right-padded"), 5)  # every query reads the first token, at least
    batch = make_batch("left-padded")
    _, expected = gradients(copy.deepcopy(stock), **batch)
    ours = patched(stock, chunk_size=5)
    assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-10
    reasons = {layer.reason for layer in streambp.describe(ours).layers if layer.path != "streams"}
    assert reasons == {"it attends by itself, with padding whose queries read a mean over all keys"}


class ChunkAlone(cache.LayerKeys):
    def __init__(self, owner, number):
        super().__init__(owner, number - 5 if number > 5 else number)


MUTANTS = {
    "streams taken for tokens": (arguments, "_token_shape", lambda hidden_states, *_: hidden_states.shape[-1:]),
    "keys of the chunks before not counted": (cache, "LayerKeys", ChunkAlone),
    "padding as at the start": (cached.OwnMask, "chunk_mask", lambda self, chunk: self.mask[:, : chunk.stop - chunk.start]),
}  # fmt: skip


@functools.cache
def check_unchanged():
    check(glm5_next(), make_batch("left-padded"), 5)


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_turns_a_test_red(mutant, monkeypatch):
    stock, batch = glm5_next(), make_batch("left-padded")
    check_unchanged()
    owner, attribute, wrong = MUTANTS[mutant]
    monkeypatch.setattr(owner, attribute, wrong)
    # it would see some of them first
    monkeypatch.setattr(own_run.UnpatchedRun, "agrees", lambda self, unchunked: True)
    with pytest.raises(AssertionError):
        check(stock, batch, 5)
