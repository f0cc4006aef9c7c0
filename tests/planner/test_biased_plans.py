"""Plans of T5's kind, whose attention adds a bias by the distance of query and key.

covers: planner/sample_points.py, planner/laws.py, planner/step.py
"""

from __future__ import annotations

import pytest
import torch
from transformers import LongT5Config, MT5Config, T5Config, UMT5Config
from transformers.models.t5 import modeling_t5

import streambp
from streambp.errors import UnsupportedModelError
from streambp.layer.layer_state import LayerState
from streambp.planner import auto, laws, model_class, sample_points, step, survey
from streambp.planner.auto import BIASED_REASON
from streambp.planner.compose import unroll
from streambp.planner.configuration import build
from streambp.planner.model_class import counted_stack
from streambp.planner.profile import Setting, peak, work
from streambp.planner.sample_points import biased_points_for
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import CHECKPOINTING_RECIPE, UNPATCHED_RECIPE, Counter, streamed_recipe
from tests import families
from tests.planner import measured
from tests.seeds import seed_torch

pytestmark = pytest.mark.skipif(
    not hasattr(modeling_t5, "eager_attention_forward"),
    reason="T5 of this transformers attends without the interface, and its layers run unchunked",
)
LAYERS = 2
HEADS = 4
SIZES = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {"t5": T5Config(**SIZES), "mt5": MT5Config(**SIZES), "umt5": UMT5Config(**SIZES)}
# With biases of 8 heads beside narrow layers, whose bytes bend where chunks grow.
CONFIGS["many heads"] = T5Config(
    d_model=512, d_kv=64, d_ff=1024, num_layers=4, num_heads=8, feed_forward_proj="gated-gelu"
)
RECIPES = {
    "plain": UNPATCHED_RECIPE,
    "checkpointing": CHECKPOINTING_RECIPE,
    "streambp": streamed_recipe(),
    "saves": streamed_recipe(("attn_out",)),
}
LONG = 40000


def skeleton_of(name, device="cuda", encoder_len=None):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return Skeleton(CONFIGS[name], dtype, None, 16, device, encoder_len=encoder_len)


def costs(name, recipe, at, device="cuda", points=None, encoder_len=None):
    """Bytes and works of a step, by fitted functions and by a count of this step."""
    skeleton = skeleton_of(name, device, encoder_len)
    options = {"at": points, "accumulating": False, "tree": False}
    profile = survey.survey(skeleton, [recipe], **options)
    method = profile.method(recipe.name)
    fitted_bytes = peak(profile, method, *at, Setting(optimizer=0))
    counter = Counter(skeleton, skeleton.reduce(), 1, "cudnn" if device == "cuda" else None)
    counter.uses_fused_kernel(recipe)
    (spans,) = counter.count(recipe, at if method.chunked else (at[0], 0), accumulate=False)
    phases, _, works, _ = unroll(spans, counter.shrunk_model)
    counted_bytes = max(phase.peak for phase in phases)
    return fitted_bytes.total - fitted_bytes.weights, counted_bytes, work(method, *at), works


def check(fitted_bytes, counted_bytes, fitted, counted):
    assert fitted_bytes == pytest.approx(counted_bytes, rel=0.01)
    for name, part in counted.items():
        for field in ("products", "forward", "backward", "traffic"):
            assert getattr(fitted[name], field) == pytest.approx(getattr(part, field), rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "length"),
    [
        ("checkpointing", LONG),
        pytest.param("plain", LONG, marks=pytest.mark.full),
        pytest.param("plain", 512, marks=pytest.mark.full),
        pytest.param("checkpointing", 2048, marks=pytest.mark.full),
    ],
)
def test_unpatched_steps_of_another_length_are_predicted(recipe, length):
    check(*costs("t5", RECIPES[recipe], (length, length)))


@pytest.mark.full
@pytest.mark.parametrize("encoder_len", [None, 1024])
def test_streamed_steps_of_another_length_are_predicted(encoder_len):
    at = (20480, 3072)
    check(*costs("t5", RECIPES["streambp"], at, encoder_len=encoder_len))


@pytest.mark.full
def test_large_chunks_take_no_more_than_a_plan_says():
    """But for less than a plan leaves free of each card."""
    fitted_bytes, counted_bytes, _, _ = costs("many heads", RECIPES["streambp"], (32768, 16384))
    assert counted_bytes <= 1.03 * fitted_bytes
    assert fitted_bytes <= 1.05 * counted_bytes


@pytest.mark.full
def test_the_mutant_of_points_with_small_chunks_is_noticed(monkeypatch):
    first, _ = sample_points.BIASED_POINTS
    small = ((10240, 2048), (12288, 2048), (12288, 3072), (15360, 3072))
    monkeypatch.setattr(sample_points, "BIASED_POINTS", (first, small))
    with pytest.raises(AssertionError):
        test_large_chunks_take_no_more_than_a_plan_says()


@pytest.mark.full
def test_the_mutant_without_a_square_is_noticed(monkeypatch):
    monkeypatch.setattr(laws, "BIASED_BYTES_FEATURES", laws.BYTES_FEATURES)
    with pytest.raises(AssertionError):
        check(*costs("t5", RECIPES["checkpointing"], (LONG, LONG)))


def bias_copies():
    """Biases of all pairs that an unpatched forward in bfloat16 keeps, [1, H, T, T] each."""
    skeleton = skeleton_of("t5")
    counter = Counter(skeleton, skeleton.reduce(), 1, None)
    (spans,) = counter.count(RECIPES["plain"], (LONG, 0), accumulate=False)
    head = next(span for span in spans if span.name == "head")
    return head.start / (2 * HEADS * LONG**2)


def test_an_unpatched_step_keeps_biases_of_all_pairs():
    """Each layer of both stacks has one, the decoder's has no mask yet, and attention to the
    encoder's output has zeros. Both tables have indices in int64; booleans of masks are less."""
    indices = 2 * 8 / (2 * HEADS)
    assert int(bias_copies()) == 2 * LAYERS + 2 + indices


def test_the_mutant_that_attends_without_the_bias_is_noticed(monkeypatch):
    def forgets(query, key, value, *_, is_causal=False, scale=None, **__):
        operator = torch.ops.aten._scaled_dot_product_flash_attention
        return operator(query, key, value, 0.0, is_causal, scale=scale)[0]

    monkeypatch.setattr(step, "_flash_as_sdpa", forgets)
    with pytest.raises(AssertionError):
        test_an_unpatched_step_keeps_biases_of_all_pairs()


def test_the_decoder_is_divided_into_phases():
    deep = T5Config(**{**SIZES, "num_layers": LAYERS + 1, "num_decoder_layers": LAYERS})
    with torch.device("meta"):
        model = model_class.build_as(deep)
    assert counted_stack(model).backbone is model.decoder


def test_an_encoder_with_local_blocks_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="LongT5LocalAttention adds a bias"):
        Skeleton(LongT5Config(**SIZES), torch.bfloat16, None, 16, "cuda")


def test_a_plan_says_that_the_encoder_streams_and_moves_no_weights():
    skeleton = skeleton_of("t5")
    profile = survey.survey(skeleton, [CHECKPOINTING_RECIPE], accumulating=False, tree=False)
    assert "and streams, too" in profile.assumed[0]
    assert profile.frozen == ()


def test_points_have_the_requested_length():
    """Functions through them are exact there."""
    for chunked in (False, True):
        (points,) = biased_points_for((4096, 1024), chunked, True)
        assert points[0] == (4096, 1024 if chunked else 0)


def model_of(name):
    seed_torch()
    build_as = model_class.build_as
    return build(CONFIGS[name], lambda config: build_as(config, dtype=torch.float32)).train()


@pytest.mark.full
@pytest.mark.parametrize("encoder_len", [None, 150])
@pytest.mark.parametrize("recipe", ["checkpointing", "streambp", "saves"])
@pytest.mark.parametrize("name", CONFIGS)
def test_live_bytes_are_predicted(name, recipe, encoder_len, monkeypatch):
    """Without a witness, whose few KB a chunk are much for these small models."""
    monkeypatch.setattr(LayerState, "witness", lambda self, x, autocast: None)
    predicted, real = measured.peaks(model_of(name), RECIPES[recipe], 600, 200, encoder_len)
    print(f"{name}, {recipe}, {encoder_len}: {100 * (predicted / real - 1):+.3f} %")
    assert abs(predicted / real - 1) <= 0.01


def test_steps_of_batches_are_planned_by_an_upper_bound():
    """Their bytes are no function of a batch's tokens: eight rows take eight squares of a row."""
    config = streambp.StreamConfig()
    tiny = T5Config(**{**SIZES, "num_layers": 1})
    with torch.device("meta"):
        biased = streambp.patch(model_class.build_as(tiny), config)
    assert auto._law(biased, config, None) == BIASED_REASON
    unbiased = streambp.patch(families.build("qwen3"), config)
    assert not isinstance(auto._law(unbiased, config, None), str)
