"""Plans of models whose attention is bidirectional: bytes beside those that real steps keep alive,
FLOPs of all pairs, and the classes that configurations are built with.

covers: planner/mask_rules.py, planner/model_class.py
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ModernBertConfig,
    PaliGemmaConfig,
)

from streambp.admission.stacks import find_stacks
from streambp.attention.mask_scan import find_barriers, find_reach
from streambp.layer.layer_state import LayerState
from streambp.planner import mask_rules, model_class, step
from streambp.planner.configuration import build
from streambp.planner.plan import plan
from streambp.planner.profile import flops, from_json, to_json, work
from streambp.planner.report import plan_table
from streambp.planner.skeleton import Skeleton
from streambp.planner.survey import CHECKPOINTING_RECIPE, UNPATCHED_RECIPE, streamed_recipe, survey
from streambp.planner.work import pairs
from tests.planner import measured
from tests.seeds import seed_torch

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 200,
    "max_position_embeddings": 2**20, "pad_token_id": 0,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, is_causal=False),
    "bert": BertConfig(**SIZES, **NO_DROPOUT),
    "modernbert": ModernBertConfig(**SIZES, **SPECIAL_TOKENS, architectures=["ModernBertModel"]),
    "embedding_gemma": Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, use_bidirectional_attention=True, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        architectures=["Gemma3TextModel"],
    ),
    "paligemma": PaliGemmaConfig(
        text_config={"model_type": "gemma", **SIZES, "num_key_value_heads": 2, "head_dim": 16},
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
    ),
}  # fmt: skip
RECIPES = {
    "checkpointing": CHECKPOINTING_RECIPE,
    "streambp": streamed_recipe(),
    "saves": streamed_recipe(("attn_out",)),
}
FAST_CASES = (("llama", "streambp"), ("modernbert", "saves"), ("bert", "checkpointing"))


def built(name):
    seed_torch()
    config = CONFIGS[name]
    return build(config, lambda config: model_class.build_as(config, dtype=torch.float32)).train()


def peaks(name, recipe, length=1500):
    """Peaks of activations of a step, predicted and measured."""
    return measured.peaks(built(name), recipe, length, 500)


@pytest.fixture
def without_witness(monkeypatch):
    """What a witness notes is a few KB a chunk, which is much for these small models."""
    monkeypatch.setattr(LayerState, "witness", lambda self, x, autocast: None)


@pytest.mark.fast(3)
@pytest.mark.usefixtures("without_witness")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        (name, recipe)
        if (name, recipe) in FAST_CASES
        else pytest.param(name, recipe, marks=pytest.mark.full)
        for name in ("llama", "bert", "modernbert", "embedding_gemma")
        for recipe in RECIPES
    ],
)
def test_live_bytes_are_predicted(name, recipe):
    predicted, real = peaks(name, RECIPES[recipe])
    print(f"{name}, {recipe}: {100 * (predicted / real - 1):+.2f} %")
    assert abs(predicted / real - 1) <= 0.03


@pytest.mark.full
@pytest.mark.usefixtures("without_witness")
def test_the_mutant_whose_windows_read_all_keys_is_noticed(monkeypatch):
    monkeypatch.setattr(mask_rules, "_position_rectangles", mask_rules.rectangles)
    predicted, real = peaks("modernbert", RECIPES["streambp"])
    assert abs(predicted / real - 1) > 0.03


@pytest.mark.full
@pytest.mark.usefixtures("without_witness")
def test_bytes_beside_causal_layers_are_what_the_layers_keep():
    """Queries, and gradients of queries and outputs, of all tokens in one layer's backward."""
    longer = [peaks("llama", streamed_recipe(), length)[0] for length in (1500, 3000)]
    slope = (longer[1] - longer[0]) / 1500 / (4 * SIZES["hidden_size"])
    print(f"{slope:.2f} hidden sizes a token")
    x_of_layers = SIZES["num_hidden_layers"]
    assert 3 <= slope - x_of_layers <= 9


def surveyed(config, at=(4096, 1024)):
    skeleton = Skeleton(config, torch.bfloat16, None, 16, "cuda")
    recipes = (
        UNPATCHED_RECIPE,
        CHECKPOINTING_RECIPE,
        streamed_recipe(),
        streamed_recipe(("attn_out",)),
    )
    return survey(skeleton, recipes, at=at, accumulating=False, tree=False, timed=False)


def attention(profile, name, at=(4096, 1024)):
    parts = work(profile.method(name), *at).values()
    return sum(part.forward for part in parts), sum(part.backward for part in parts)


@pytest.mark.full
def test_attention_flops_are_those_of_all_pairs():
    causal_config = LlamaConfig(**SIZES, num_key_value_heads=2)
    bidirectional = surveyed(CONFIGS["llama"])
    causal = surveyed(causal_config)
    forward_flops = 4 * 4096**2 * SIZES["hidden_size"] * SIZES["num_hidden_layers"]
    for name, repeats in (("plain", 1), ("checkpointing", 2), ("streambp", 2)):
        assert attention(bidirectional, name) == pytest.approx(
            (repeats * forward_flops, 2.5 * forward_flops), rel=1e-3
        )
        assert attention(causal, name)[0] == pytest.approx(repeats * forward_flops / 2, rel=1e-3)
    # the attention of the saved outputs is not computed again
    assert attention(bidirectional, "streambp saves attn_out")[0] == pytest.approx(
        forward_flops, rel=1e-3
    )
    assert bidirectional.assumed[0].startswith("attention is bidirectional")
    assert causal.assumed == ()
    assert from_json(to_json(bidirectional)) == bidirectional


@pytest.mark.full
def test_the_mutant_whose_unpatched_attention_is_causal_is_noticed(monkeypatch):
    flash = step._flash
    monkeypatch.setattr(step, "_flash", lambda _, *args, **kwargs: flash(None, *args, **kwargs))
    with pytest.raises(AssertionError):
        test_attention_flops_are_those_of_all_pairs()


@pytest.mark.full
def test_products_of_both_halves_are_counted():
    """The Linears' FLOPs of a step under streambp are nearly those of the causal model's step."""
    totals = []
    for config in (CONFIGS["llama"], LlamaConfig(**SIZES, num_key_value_heads=2)):
        parts = work(surveyed(config).method("streambp"), 4096, 1024)
        totals.append(parts["forward"].products + parts["backward"].products)
    assert totals[0] / totals[1] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("window", [1, 64, 700, 1500])
def test_windows_are_evaluated_as_a_scan_of_the_mask_does(window):
    def function(row, head, query, key):
        return (query - key).abs() <= window

    same_as_scan(function)


def test_a_prefix_is_evaluated_as_a_scan_of_the_mask_does():
    def function(row, head, query, key):
        return (key <= query) | ((query < 300) & (key < 300))

    same_as_scan(function)


def same_as_scan(function, length=2500):
    positions = torch.arange(length)

    def tile(q0, q1, k0, k1):
        zero = torch.zeros((), dtype=torch.long)
        return function(zero, zero, positions[q0:q1, None], positions[None, k0:k1])[None, None]

    device = torch.device("cpu")
    reach, barriers = mask_rules._reach_and_barriers(function, length)
    assert reach == find_reach(tile, length, device)
    assert barriers == find_barriers(tile, length, device)


def test_a_mask_that_reads_all_keys_is_no_window():
    def function(row, head, query, key):
        return (query - key).abs() < 5000

    assert mask_rules._reach_and_barriers(function, 2500) is None


@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_pairs_of_a_window_to_both_sides(window):
    distance = (torch.arange(20)[:, None] - torch.arange(20)).abs()
    assert pairs(20, 20, False, window) == int((distance < window).sum())


CLASSES = {
    "llama": "LlamaForCausalLM",
    "bert": "BertForMaskedLM",
    "modernbert": "ModernBertModel",
    "embedding_gemma": "Gemma3TextModel",
    "paligemma": "PaliGemmaForConditionalGeneration",
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_configurations(name):
    model = built(name)
    assert type(model).__name__ == CLASSES[name]
    for layer in find_stacks(model).stacks[0].layers:
        flags = [module.is_causal for module in layer.modules() if hasattr(module, "is_causal")]
        assert flags == [False]


def test_a_decoder_of_a_masked_language_model_is_planned_as_causal():
    config = BertConfig(**SIZES, is_decoder=True)
    model = build(config, lambda config: model_class.build_as(config, dtype=torch.float32))
    assert type(model).__name__ == "BertLMHeadModel"


@pytest.mark.full
def test_a_plan_without_a_head_says_what_it_assumes():
    profile = surveyed(CONFIGS["embedding_gemma"], (2048, 1024))
    assert [method.name for method in profile.methods][:2] == ["plain", "checkpointing"]
    assumptions = "; ".join(profile.assumed)
    assert "mean of the hidden states" in assumptions
    assert "windows are computed by plain products" in assumptions


def test_dropout_of_attention_is_told():
    model = build(
        BertConfig(**SIZES), lambda config: model_class.build_as(config, dtype=torch.float32)
    )
    layers = find_stacks(model).stacks[0].layers
    assumptions = model_class.assumptions(model, layers, True, None)
    assert any("probability 0.1" in text for text in assumptions)


@pytest.mark.full
def test_paligemma_is_planned():
    profile = surveyed(CONFIGS["paligemma"])
    assert "the prefix is counted as causal" in profile.assumed[0]
    assert profile.method("streambp").chunked
    # all pairs in the unpatched step, whose attention gets the mask; half of them under streambp
    assert attention(profile, "plain")[0] > 0
    assert flops(profile.method("streambp"), 4096, 1024) > 0


@pytest.mark.full
def test_the_planned_step_is_run_by_patch():
    bert_plan = plan(CONFIGS["llama"], 2**17, gpu_memory="20GiB", methods=("plain", "streambp"))
    assert bert_plan.choice is not None
    assert bert_plan.choice.method == "streambp"
    assert "Assumed: attention is bidirectional" in plan_table(bert_plan)


def test_a_table_of_fewer_positions_than_counted_rows_is_no_hindrance():
    """BERT slices buffers of 512 positions; rows of a count have thousands of tokens."""
    sizes = {**SIZES, "max_position_embeddings": 512}
    config = BertConfig(**sizes, **NO_DROPOUT, architectures=["BertForMaskedLM"])
    profile = survey(
        Skeleton(config, torch.bfloat16, None, 16, "cuda"), (streamed_recipe(),), tree=False
    )
    (method,) = profile.methods
    assert {phase.name for phase in method.first} >= {"forward 0", "backward 0"}


def test_positions_of_a_tower_are_not_the_texts():
    """Its buffers are shorter than rows of text, too."""
    text = {"model_type": "llama", **SIZES, "num_key_value_heads": 2}
    vision = {**SIZES, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 4}
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))
    assert any(name.endswith("position_ids") for name, _ in model.named_buffers())
    ids = torch.zeros(1, 4096, dtype=torch.long)
    assert model_class.inputs_of(model, ids).keys() == {"input_ids"}


def planned_seconds(name, length):
    planned = plan(CONFIGS[name], length, gpu_memory="40GiB", methods=("streambp",))
    assert planned.choice is not None
    assert planned.choice.peak.total < 40 * 2**30
    return planned.choice.seconds.total


@pytest.mark.full
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_plan_has_seconds(name):
    """Twice the length takes more than twice as long, and less than four times, since all pairs of
    tokens count in attention and in nothing else."""
    shorter, longer = (planned_seconds(name, length) for length in (2**15, 2**16))
    print(f"{name}: {shorter:.4f} s at 32k, {longer:.4f} s at 64k")
    assert 2 * shorter < longer < 4.1 * shorter
