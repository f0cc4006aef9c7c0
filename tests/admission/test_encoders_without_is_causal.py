"""Encoders whose attention modules have no attribute `is_causal`, and stacks that lie deeper than
others.

covers: admission/stacks.py
"""

from __future__ import annotations

import pytest
from torch import nn
from transformers import (
    AlignTextConfig,
    AlignTextModel,
    BertConfig,
    ClapTextConfig,
    ClapTextModel,
    LayoutLMConfig,
    LayoutLMModel,
    MarkupLMConfig,
    MarkupLMModel,
    SplinterConfig,
    SplinterModel,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

import streambp
from streambp.admission import stacks
from streambp.errors import UnsupportedModelError

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
TOKENS = {"vocab_size": 99, "question_token_id": 98}
ENCODERS = {
    SplinterModel: SplinterConfig,
    LayoutLMModel: LayoutLMConfig,
    MarkupLMModel: MarkupLMConfig,
    ClapTextModel: ClapTextConfig,
    AlignTextModel: AlignTextConfig,
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_patch_refuses_an_encoder_that_looks_causal(kind):
    model = kind(ENCODERS[kind](**SIZES, **TOKENS, attn_implementation="eager"))
    with pytest.raises(UnsupportedModelError, match="makes a bidirectional mask"):
        streambp.patch(model)
    assert not hasattr(model, "_streambp")


def test_a_decoder_deeper_than_its_encoder_is_named():
    vision = ViTConfig(**SIZES, image_size=32, patch_size=8)
    text = BertConfig(**SIZES, vocab_size=99, is_decoder=True, add_cross_attention=True)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    model = VisionEncoderDecoderModel(config)
    if not any(isinstance(child, nn.ModuleList) for child in model.encoder.children()):
        pytest.skip("this transformers has ViT's layers as deep as BERT's")
    with pytest.raises(UnsupportedModelError, match="BertModel: its layers lie deeper"):
        streambp.patch(model)
    tower_stacks = stacks.find_stacks(model, towers=True)
    assert [type(stack.backbone).__name__ for stack in tower_stacks.stacks] == ["ViTModel"]
    assert any(reason.startswith("BertModel: ") for reason in tower_stacks.left_alone)
