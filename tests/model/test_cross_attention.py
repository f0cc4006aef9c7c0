"""Decoders that read more than their text: cross-attention to images and proteins, other weights
for audio, many heads.

covers: admission/own_run.py, attention/interface.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    EvollaConfig,
    EvollaForProteinText2Text,
    HiggsAudioV2Config,
    HiggsAudioV2ForConditionalGeneration,
    IdeficsConfig,
    IdeficsForVisionText2Text,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MusicgenMelodyForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.musicgen_melody.configuration_musicgen_melody import (
    MusicgenMelodyDecoderConfig,
)

import streambp
from streambp.admission.own_run import StreamingMismatchError
from streambp.attention import interface
from tests.oracle import worst_error
from tests.seeds import seed_torch

LENGTH = 23
TEXT = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def tokens(high=53, rows=2):
    ids = torch.randint(3, high, (rows, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def idefics():
    vision = {
        "embed_dim": 16, "image_size": 8, "patch_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 16,
    }  # fmt: skip
    config = IdeficsConfig(
        **TEXT,
        vision_config=vision,
        cross_layer_interval=1,
        use_resampler=False,
        alpha_initializer="ones",
        dropout=0.0,
    )
    image_mask = torch.ones(2, LENGTH, 1, dtype=torch.long)
    image_mask[:, :5] = 0  # before the image
    batch = {
        **tokens(),
        "pixel_values": torch.randn(2, 1, 3, 8, 8),
        "image_attention_mask": image_mask,
    }
    return IdeficsForVisionText2Text(config), batch, 4


def mllama():
    vision = {
        "image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_layers_indices": [0], "vision_output_dim": 32,
        "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2, "intermediate_size": 16, "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    text = {**TEXT, "num_key_value_heads": 2, "cross_attention_layers": [1]}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=52)
    batch = tokens(52)
    batch["input_ids"][:, 3] = 52
    batch["labels"][:, 3] = -100
    image_mask = torch.ones(
        2, LENGTH, 2, 1, dtype=torch.long
    )  # two images, the second from token 12 on
    image_mask[:, :3] = 0
    image_mask[:, :12, 1] = 0
    batch |= {
        "pixel_values": torch.randn(2, 2, 1, 3, 8, 8), "aspect_ratio_ids": torch.ones(2, 2, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 2, 1), "cross_attention_mask": image_mask,
    }  # fmt: skip
    model = MllamaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "gate" in name:
            parameter.data.fill_(0.5)  # 0 shuts the image out
    return model, batch, 2


def evolla():
    config = EvollaConfig(
        **TEXT, num_key_value_heads=2, aligner_num_add_layers=1, resampler_depth=1, resampler_dim_head=4, resampler_heads=2,
        resampler_num_latents=7, aligner_ffn_mult=1, resampler_ff_mult=1,
        protein_encoder_config={
            "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 11,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
    )  # fmt: skip
    protein = torch.randint(3, 20, (2, 9))
    batch = {
        **tokens(),
        "protein_input_ids": protein,
        "protein_attention_mask": torch.ones_like(protein),
    }
    return EvollaForProteinText2Text(config), batch, 2


def higgs_audio():
    config = HiggsAudioV2Config(
        **TEXT, num_key_value_heads=2, head_dim=8, num_codebooks=8, codebook_size=16, audio_token_id=52,
        audio_bos_token_id=51, audio_delay_token_id=50, audio_stream_bos_id=15, audio_stream_eos_id=14,
    )  # fmt: skip
    batch = tokens(50)
    batch["input_ids"][:, 8:17] = 52
    batch["audio_input_ids"] = torch.randint(0, 14, (2, 9, 8))
    batch["audio_input_ids_mask"] = torch.ones(2, 9, dtype=torch.bool)
    batch.pop("labels")
    batch["audio_labels"] = batch["audio_input_ids"].clone()
    return HiggsAudioV2ForConditionalGeneration(config), batch, 2


def musicgen_melody():
    config = MusicgenMelodyDecoderConfig(
        vocab_size=53, hidden_size=32, ffn_dim=40, num_hidden_layers=2, num_attention_heads=4, num_codebooks=2, dropout=0.0,
        pad_token_id=52, bos_token_id=52,
    )  # fmt: skip
    ids = torch.randint(3, 50, (2 * 2, LENGTH))
    batch = {"input_ids": ids, "labels": ids.view(2, 2, LENGTH).transpose(1, 2).contiguous()}
    batch |= {
        "encoder_hidden_states": torch.randn(2, 4, 32),
        "encoder_attention_mask": torch.ones(2, 4),
    }
    return MusicgenMelodyForCausalLM(config), batch, 2


def bart():
    """A decoder whose layers hold cross-attention that reads nothing."""
    config = BartConfig(
        vocab_size=53, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=40, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, is_encoder_decoder=False,
    )  # fmt: skip
    return BartForCausalLM(config), tokens(), 2


def gradients_of(model, batch):
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.fast(2)
@pytest.mark.parametrize("make", [idefics, mllama, evolla, higgs_audio, musicgen_melody, bart])
def test_exact_and_every_layer_streams(make):
    seed_torch(0)
    stock, batch, count = make()
    ours = copy.deepcopy(stock.double().train())
    expected_loss, expected = gradients_of(stock, batch)
    for chunk_size in (5, 7, 10):  # of 23 tokens; mllama's two images have 10 keys
        streambp.patch(ours, streambp.StreamConfig(chunk_size=chunk_size))
        loss, grads = gradients_of(ours, batch)
        assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
        assert worst_error(grads, expected) <= 1e-10
        described = streambp.describe(ours)
        assert [layer.path for layer in described.layers] == ["streams"] * count
        if make is musicgen_melody:
            assert described.head == "builds the logits: the head is a ModuleList, costs memory"
    streambp.unpatch(ours)
    assert worst_error(gradients_of(ours, batch)[1], expected) <= 1e-12


@pytest.mark.parametrize("make", [idefics, mllama])
def test_frozen_text_over_a_trained_vision_tower(make):
    """The second step skips products, which are found by what the tower's output needs."""
    seed_torch(0)
    stock, batch, _ = make()
    stock = stock.double().train()
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_("vision" in name or "projector" in name)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    _, expected = gradients_of(stock, batch)
    for _ in range(3):
        assert worst_error(gradients_of(ours, batch)[1], expected) <= 1e-10


def test_cross_attention_without_a_mask_is_refused():
    """sdpa would take None for causal, in every chunk from the first key on."""
    seed_torch(0)
    model, batch, _ = mllama()
    streambp.patch(model.double().train(), streambp.StreamConfig(chunk_size=5))
    gradients_of(model, batch)
    del batch["cross_attention_mask"]
    with pytest.raises(streambp.StreamBPError, match="no mask over keys from elsewhere"):
        model(**batch)


def test_the_mutant_without_the_images_mask_is_noticed(monkeypatch):
    def unmasked(module, query, key, value, mask, *args, **kwargs):
        return sdpa_attention_forward(
            module, query, key, value, torch.zeros_like(mask), *args, **kwargs
        )

    monkeypatch.setattr(interface, "sdpa_attention_forward", unmasked)
    # the comparison with the unpatched layer comes first
    with pytest.raises((AssertionError, StreamingMismatchError)):
        test_exact_and_every_layer_streams(mllama)
