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
    BertModel,
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


class OlderModel(BertModel):
    """A model as of transformers before 5.23, whose mask is causal in a decoder alone."""

    __module__ = "transformers.models.older"  # names of variables count in transformers alone

    def forward(self, input_ids, attention_mask):
        extended_attention_mask = self.get_extended_attention_mask(attention_mask, input_ids.shape)
        return -extended_attention_mask


@pytest.mark.parametrize(("is_decoder", "streams"), [(True, True), (False, False)])
def test_a_mask_that_is_causal_in_a_decoder_alone(is_decoder, streams):
    model = OlderModel(BertConfig(**SIZES, vocab_size=99, is_decoder=is_decoder))
    assert (stacks._why_mask_differs(model, ()) is None) == streams


def test_the_mutant_that_knows_no_such_mask(monkeypatch):
    monkeypatch.setattr(stacks, "EITHER_MASK", "")
    with pytest.raises(AssertionError):
        test_a_mask_that_is_causal_in_a_decoder_alone(True, True)
