"""Masks that let queries read ahead (images, prefixes): chunk ends move to where none does, and
gradients are exact.

covers: attention/masks.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    SiglipVisionConfig,
)

import streambp
from streambp.attention import masks
from tests import zoo
from tests.families import LENGTH, VOCABULARY, build, make_batch
from tests.offload.runs import assert_same, sampled
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch
from tests.versions import IMAGES_IN_FULL_LAYERS

IMAGE = VOCABULARY - 1
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
}
# of each row; the second's lie side by side
BLOCKS = ([slice(5, 9), slice(14, 18)], [slice(3, 7), slice(7, 11)])
SAVES = ((), ("attn_out", "kv", "mlp.up_proj"))


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def gemma3(attention="sdpa"):
    """Image tokens read all of their image in every layer, within the window in some. The first row
    has padding."""
    text = zoo.tiny_config("gemma3_text").to_dict()
    vision = SiglipVisionConfig(**VISION, patch_size=4).to_dict()
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        attn_implementation=attention,
    )
    seed_torch(0)
    model = Gemma3ForConditionalGeneration(config).double().train()
    batch = make_batch("plain")
    padding_mask = torch.ones_like(batch["input_ids"])
    padding_mask[0, :2] = 0
    for row, images in enumerate(BLOCKS):
        for image in images:
            batch["input_ids"][row, image] = IMAGE
        batch["input_ids"][row, images[-1].stop] = 5
    batch["input_ids"][1, 7] = 4  # parts two images
    is_image = batch["input_ids"] == IMAGE
    batch["labels"][is_image | (padding_mask == 0)] = -100
    batch["labels"][0, 2] = -100
    batch["token_type_ids"] = is_image.long()
    batch["attention_mask"] = padding_mask
    return model, batch


def gemma4():
    """Image tokens read all of their image in sliding layers only; later layers read earlier ones'
    keys and values."""
    config = Gemma4Config(
        text_config=zoo.tiny_config("gemma4_text", use_bidirectional_attention="vision").to_dict(),
        vision_config=None, audio_config=None,
    )  # fmt: skip
    seed_torch(0)
    model = Gemma4ForConditionalGeneration(config).double().train()
    batch = make_batch("plain")
    kinds = torch.zeros_like(batch["input_ids"])
    for row, images in enumerate(BLOCKS):
        for image in images:
            kinds[row, image] = 1
    batch["mm_token_type_ids"] = kinds
    return model, batch


def prefix_mask(added=False, rows=2):
    """[B, 1, T, T]: all of a prefix, and causal behind it."""
    mask = torch.ones(rows, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    for row in range(rows):
        mask[row, :, :, : 7 + row] = True
    return torch.where(mask, 0.0, torch.finfo(torch.float64).min) if added else mask


def check(stock, batch, chunk_size, **settings):
    expected_loss, expected = gradients(stock, **batch)
    ours = streambp.patch(
        copy.deepcopy(stock), streambp.StreamConfig(chunk_size=chunk_size, **settings)
    )
    loss, our_gradients = gradients(ours, **batch)
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(our_gradients, expected) <= 1e-10
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}
    return ours


MODELS = {"gemma3": gemma3, "gemma3 eager": lambda: gemma3("eager"), "gemma4": gemma4}


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    sampled(
        lambda name, size: (name, size) in (("gemma3", 5), ("gemma3 eager", 6), ("gemma4", 11)),
        MODELS,
        range(1, 24),
    ),
)
def test_images(name, chunk_size):
    check(*MODELS[name](), chunk_size)


def check_images():
    check(*gemma3(), 5)


def test_layers_have_their_own_chunks():
    """Gemma 4's full layers are causal with images, too; in older transformers they read all of an
    image."""
    model, batch = gemma4()
    description = streambp.describe(check(model, batch, 3))
    has_larger_chunks = ["chunks of up to" in layer.reason for layer in description.layers]
    kinds = model.config.text_config.layer_types
    assert has_larger_chunks == [
        IMAGES_IN_FULL_LAYERS or kind == "sliding_attention" for kind in kinds
    ]
    assert len(set(kinds)) == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("saves", "gpu_memory", "chunk_size"),
    sampled(
        lambda saves, memory, size: saves and memory == 1 and size == 5,
        SAVES,
        (None, 1),
        (3, 5, 8, 11),
    ),
)
def test_offloading_changes_no_bit(saves, gpu_memory, chunk_size):
    """Tiles of keys and values have the chunks' lengths."""
    model, batch = gemma3()
    plain = check(model, batch, chunk_size, saves=saves)
    offloaded_model = check(
        model, batch, chunk_size, saves=saves, offload="cpu", gpu_memory=gpu_memory
    )
    assert_same(gradients(offloaded_model, **batch), gradients(plain, **batch))


def test_measured_choices_with_uneven_chunks():
    model, batch = gemma3()
    expected = gradients(model, **batch)[1]
    ours = streambp.patch(model, streambp.StreamConfig(chunk_size=5, saves="auto", offload="auto"))
    for _ in range(3):
        assert worst_error(gradients(ours, **batch)[1], expected) <= 1e-10


@pytest.mark.fast(2)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_prefixes(name, added, attended_chunks):
    """chunk_size = 3: the prefixes of 7 and 8 tokens are one chunk; 8 + 5 * 3 = 23."""
    batch = {**make_batch("plain"), "attention_mask": prefix_mask(added)}
    stock = build(name, torch.float64)
    if name == "gemma3":
        batch["attention_mask"] = dict.fromkeys(stock.config.layer_types, batch["attention_mask"])
    ours = check(stock, batch, 3)
    assert attended_chunks[-6:] == [3, 3, 3, 3, 3, 8]
    assert "chunks of up to 8 tokens" in str(streambp.describe(ours))
    gradients(ours, **make_batch("plain"))
    assert "chunks of up to" not in str(streambp.describe(ours))


@pytest.mark.parametrize("name", ["gptj", "xglm"])
def test_prefixes_of_layers_that_attend_by_themselves(name):
    batch = {**make_batch("plain"), "attention_mask": prefix_mask(added=True)}
    stock = zoo.build(name)
    ours = check(stock, batch, 3)
    assert "chunks of up to 8 tokens" in str(streambp.describe(ours))


def test_bidirectional_batch_leaves_the_model_usable():
    model = streambp.patch(build("qwen3", torch.float64), streambp.StreamConfig(chunk_size=5))
    full_mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(streambp.StreamBPError, match="not causal"):
        model(**make_batch("plain"), attention_mask=full_mask, use_cache=False)
    stock = streambp.unpatch(copy.deepcopy(model))
    expected = gradients(stock, **make_batch("plain"))[1]
    assert worst_error(gradients(model, **make_batch("plain"))[1], expected) <= 1e-10


@pytest.mark.parametrize("mode", ["plain", "left-padded", "right-padded", "packed"])
def test_masks_with_a_rule_are_not_looked_through(mode, monkeypatch):
    monkeypatch.setattr(masks, "find_barriers", lambda *_: pytest.fail("the whole mask was read"))
    model = streambp.patch(build("gemma3", torch.float64), streambp.StreamConfig(chunk_size=5))
    assert gradients(model, **make_batch(mode))[0].isfinite()
