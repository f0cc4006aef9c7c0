"""Calls whose tokens are embeddings, have positions of several axes or are marked one by one, as
packed rows in float64.

covers: prefixes/arguments.py, prefixes/tree.py, prefixes/admission.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import streambp
from streambp.prefixes import arguments, calls
from tests import zoo
from tests.families import VOCABULARY
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.prefixes.test_calls import float64_everywhere, tokens_or_reason  # noqa: F401 - a fixture
from tests.prefixes.test_padding import SHAPES, any_saving, build, make  # noqa: F401 - a fixture
from tests.seeds import seed_torch, seeded
from tests.versions import needs_states

IMAGE, IMAGE_START = VOCABULARY - 1, VOCABULARY - 2
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "depth": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def step(model, run):
    model.zero_grad(set_to_none=True)
    loss = run(model)
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def check(stock, run, rows="packed", **settings):
    """The patched copy's loss and gradients are the unpatched model's; returns the copy."""
    seed_torch(0)
    ours = streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5, rows=rows, **settings)
    )
    (expected_loss, expected), (loss, our_gradients) = step(stock, run), step(ours, run)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    return ours


def real_tokens(shape):
    return sum(length for _, length in SHAPES[shape])


def as_embeddings(batch):
    """A program that embeds tokens by itself, and scales them."""

    def run(model):
        other_arguments = {name: value for name, value in batch.items() if name != "input_ids"}
        scales = torch.linspace(0.5, 2, batch["input_ids"].shape[1])[:, None]  # [T, 1]
        embedded = model.get_input_embeddings()(batch["input_ids"]) * scales
        return model(inputs_embeds=embedded, **other_arguments, use_cache=False).loss

    return run


@pytest.mark.fast("qwen3-both", "gpt2-left", "lfm2-right", "gpt_oss-an empty row")
@pytest.mark.parametrize(
    "shape", [name for name in SHAPES if name not in ("many rows", "all alike")]
)
@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3", "gpt_oss", "gpt2", pytest.param("lfm2", marks=needs_states)]
)
def test_embeddings(family, shape):
    ours = check(
        build(family), as_embeddings(make(shape)), "packed" if family == "gpt_oss" else "auto"
    )
    assert tokens_or_reason(ours) == (real_tokens(shape), real_tokens(shape))


def test_embeddings_are_not_compared():
    """Equal rows are computed twice: who would compare what a vision tower gave?"""
    ours = check(build("llama"), as_embeddings(make("all alike")))
    assert tokens_or_reason(ours) == (44, 44)


def of_types(shape, alike=True):
    batch = make(shape)
    batch["token_type_ids"] = torch.randint(
        3, VOCABULARY, batch["input_ids"].shape, generator=seeded(5)
    )
    if alike:
        batch["token_type_ids"][:] = batch["token_type_ids"][0].clone()
    return batch


@pytest.mark.parametrize("alike", [True, False])
def test_types_of_tokens(alike):
    """GPT-2 embeds them: rows of equal ids share where their types are equal, too."""
    batch = of_types("all alike", alike)
    ours = check(build("gpt2"), lambda m: m(**batch, use_cache=False).loss)
    assert tokens_or_reason(ours) == (44, 11 if alike else 44)


def test_types_of_tokens_beside_padding():
    ours = check(build("gpt2"), lambda m: m(**of_types("both"), use_cache=False).loss)
    assert tokens_or_reason(ours) == (real_tokens("both"), real_tokens("both"))


def test_types_that_are_not_compared_are_found(monkeypatch):
    monkeypatch.setattr(calls, "token_numbers", lambda kwargs: kwargs["input_ids"])
    with pytest.raises(AssertionError):
        test_types_of_tokens(False)


def images(padding, device="cpu"):
    """Three rows, of which two have an image of four tokens, padded on the left or on the right."""
    ids = torch.randint(3, IMAGE_START - 1, (3, 23), generator=seeded(0))
    mask = torch.ones_like(ids)
    for row, length in ((1, 14), (2, 9)):
        mask[row, slice(0, 23 - length) if padding == "left" else slice(length, 23)] = 0
    for row, start in ((0, 5), (1, 10 if padding == "left" else 3)):
        ids[row, start - 1], ids[row, start : start + 4] = IMAGE_START, IMAGE
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE) | (mask.cumsum(1) < 3), -100)
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": labels,
        "use_cache": False,
    }


def qwen_images(padding):
    """An image has patches in two dimensions, so that each token has three positions."""
    batch = images(padding)
    batch["image_grid_thw"] = torch.tensor([[1, 2, 2], [1, 2, 2]])
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return batch


def text_of(name):
    config = zoo.tiny_config(name).to_dict()
    config["rope_parameters"] = ROPE
    del config["model_type"]
    return config


def qwen2_5_vl():
    vision = {
        **VISION,
        "spatial_merge_size": 1,
        "window_size": 8,
        "fullatt_block_indexes": [1],
        "temporal_patch_size": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config=text_of("qwen2"), vision_config=vision, image_token_id=IMAGE
    )
    config.vision_start_token_id = IMAGE_START
    return Qwen2_5_VLForConditionalGeneration(config).train()


def qwen3_vl():
    vision = {
        **VISION,
        "spatial_merge_size": 1,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=text_of("qwen3"),
        vision_config={**vision, "num_position_embeddings": 16},
        image_token_id=IMAGE,
        vision_start_token_id=IMAGE_START,
    )
    return Qwen3VLForConditionalGeneration(config).train()


VISION_MODELS = {"Qwen2.5-VL": (qwen2_5_vl, 96), "Qwen3-VL": (qwen3_vl, 96)}


@pytest.mark.fast("auto-left-Qwen3-VL", "packed-right-Qwen2.5-VL")
@pytest.mark.parametrize("model", VISION_MODELS)
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("rows", ["packed", "auto"])
def test_images_with_three_positions_for_each_token(model, padding, rows):
    build, patch = VISION_MODELS[model]
    pixels = torch.randn(8, patch, generator=seeded(1))
    ours = check(build(), lambda m: m(**qwen_images(padding), pixel_values=pixels).loss, rows)
    assert tokens_or_reason(ours) == (46, 46)


def marked(shape):
    """A text model's call with what its second layer adds at some tokens."""
    batch = make(shape)
    marks = (batch["input_ids"] % 3 == 1) & (batch["attention_mask"] > 0)
    added = [torch.randn(int(marks.sum()), 32, generator=seeded(number)) for number in (1, 2)]
    return batch, {"visual_pos_masks": marks, "deepstack_visual_embeds": added}


@pytest.mark.parametrize("at_padding", [False, True])
def test_what_is_added_at_marked_tokens(at_padding):
    """In the order of the tokens, which is that of the packed row: but for marks at padding."""
    stock, (batch, visual_arguments) = qwen3_vl(), marked("both")
    if at_padding:
        visual_arguments["visual_pos_masks"] |= batch["attention_mask"] == 0
        visual_arguments["deepstack_visual_embeds"] = [
            torch.randn(
                int(visual_arguments["visual_pos_masks"].sum()), 32, generator=seeded(number)
            )
            for number in (1, 2)
        ]

    def run(model):
        text = model.model.language_model
        embedded = text.embed_tokens(batch["input_ids"])
        hidden = text(
            inputs_embeds=embedded,
            attention_mask=batch["attention_mask"],
            **visual_arguments,
            use_cache=False,
        )[0]
        return (hidden * batch["attention_mask"][..., None]).pow(2).mean()

    ours = check(stock, run)
    if at_padding:
        assert "visual_pos_masks mark padding" in tokens_or_reason(ours)
    else:
        assert tokens_or_reason(ours) == (real_tokens("both"), real_tokens("both"))


def test_llava():
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        projection_dim=16,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision,
        text_config=zoo.tiny_config("llama"),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    pixels = torch.randn(2, 3, 8, 8, generator=seeded(1))
    stock = LlavaForConditionalGeneration(config).train()
    assert tokens_or_reason(
        check(stock, lambda m: m(**images("left"), pixel_values=pixels).loss, "auto")
    ) == (
        46,
        46,
    )


def three_positions(alike):
    """Rows of equal ids, whose heights and widths differ or do not."""
    batch = make("all alike")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0).repeat(4, 1, 1)
    positions[2] += torch.randint(0, 4, positions[2].shape, generator=seeded(3))
    if alike:
        positions[2] = positions[2, 0].clone()
    return {**batch, "position_ids": positions}


@pytest.mark.parametrize("alike", [True, False])
def test_axes_are_compared(alike):
    stock, batch = qwen3_vl(), three_positions(alike)

    def run(model):
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        hidden = model.model.language_model(**inputs, use_cache=False)[0]
        return (hidden * batch["attention_mask"][..., None]).pow(2).mean()

    assert tokens_or_reason(check(stock, run)) == (44, 11 if alike else 44)


def test_rows_say_why_they_are_not_packed():
    batch = make("both")
    embedded = torch.randn(*batch["input_ids"].shape, 32, generator=seeded(1))
    reasons = {
        "inputs_embeds, which are not compared": {"inputs_embeds": embedded},
        "neither input_ids": {
            "inputs_embeds": embedded[0],
            "attention_mask": batch["attention_mask"],
        },
        "token_type_ids are not [B, T]": {**batch, "token_type_ids": batch["input_ids"][:1]},
        "position_ids are not": {**batch, "position_ids": batch["input_ids"][0]},
        "without inputs_embeds": {**batch, "deepstack_visual_embeds": [embedded]},
        "the call has per_layer_inputs": {**batch, "per_layer_inputs": embedded},
    }
    for why, kwargs in reasons.items():
        assert why in arguments.why_not_packed(kwargs)
    assert arguments.why_not_packed(batch) is None
