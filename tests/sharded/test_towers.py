"""Vision and audio towers, and encoders before a decoder, with `StreamConfig(towers=True)`.

covers: admission/stacks.py, attention/kinds.py, model/patching.py, model/wrappers.py
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
from transformers import (
    ASTConfig,
    ASTModel,
    BartConfig,
    BartForConditionalGeneration,
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    VideoMAEConfig,
    VideoMAEModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.masking_utils import causal_mask_function
from transformers.models.idefics3.modeling_idefics3 import (
    Idefics3VisionConfig,
    Idefics3VisionTransformer,
)

import streambp
from streambp.admission import stacks
from streambp.attention import kinds
from streambp.errors import UnsupportedModelError
from streambp.launch.settings import LaunchSettings, settings_from_fields
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_torch, seeded
from tests.sharded.test_bidirectional import in_halves, llama

__all__ = ["in_halves"]  # a fixture

CHUNK = 7
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0}
VISION = {**SIZES, "image_size": 16, "patch_size": 4}
SIGLIP = {
    **VISION, "model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False,
}  # fmt: skip
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
IMAGE = 60  # token of an image's patch
NOT_STREAMED = "its attention is bidirectional (an encoder or a tower); StreamConfig(towers=True)"


pytestmark = pytest.mark.usefixtures("float64_everywhere")


def pixels():
    return torch.randn(2, 3, 16, 16)


def clip(**settings):
    return CLIPVisionModel(CLIPVisionConfig(**VISION, **settings)), {"pixel_values": pixels()}


def siglip2():
    """Images of two sizes: patches that are padding."""
    config = Siglip2VisionConfig(**SIZES, patch_size=4, num_patches=25, vision_use_head=False)
    exists = torch.ones(2, 25, dtype=torch.long)
    exists[1, 16:] = 0
    sizes = torch.tensor([[5, 5], [4, 4]])
    batch = {"pixel_values": torch.randn(2, 25, 48), "pixel_attention_mask": exists}
    return Siglip2VisionModel(config), {**batch, "spatial_shapes": sizes}


def spectrogram():
    model = ASTModel(ASTConfig(**SIZES, max_length=100, num_mel_bins=32))
    return model, {"input_values": torch.randn(2, 100, 32)}


def wav2vec2():
    """Rows of two lengths; the input's gradient is that of the features."""
    config = Wav2Vec2Config(
        **SIZES, mask_time_prob=0.0, layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, feat_proj_dropout=0.0, conv_dim=(16,), conv_stride=(10,),
        conv_kernel=(10,), num_feat_extract_layers=1, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer",
    )  # fmt: skip
    exists = torch.ones(2, 300, dtype=torch.long)
    exists[1, 200:] = 0
    return Wav2Vec2Model(config), {"speech": torch.randn(2, 300), "attention_mask": exists}


def text(images=16):
    ids = torch.randint(3, IMAGE, (2, 30))
    ids[:, 2 : 2 + images] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def llava(**vision):
    config = LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**VISION, "model_type": "clip_vision_model", "projection_dim": 32, **vision},
        image_token_index=IMAGE,
    )
    return LlavaForConditionalGeneration(config), {**text(), "pixel_values": pixels()}


def pixtral():
    """Two images in one row of patches, with a mask of blocks and rotated positions."""
    vision = {**VISION, "model_type": "pixtral", "head_dim": 8}
    config = LlavaConfig(
        text_config={**TEXT, "model_type": "llama"}, vision_config=vision, image_token_index=IMAGE,
        vision_feature_select_strategy="full", vision_feature_layer=-1,
    )  # fmt: skip
    sizes = torch.tensor([[16, 16], [16, 16]])
    batch = {**text(), "pixel_values": pixels(), "image_sizes": sizes}
    return LlavaForConditionalGeneration(config), batch


def gemma3():
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3Config(
        text_config={**TEXT, "sliding_window": 8, "layer_types": layers}, vision_config=SIGLIP,
        mm_tokens_per_image=16, image_token_index=IMAGE,
    )  # fmt: skip
    batch = text()
    batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return Gemma3ForConditionalGeneration(config), {**batch, "pixel_values": pixels()}


def paligemma():
    config = PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"}, vision_config=SIGLIP, projection_dim=32,
        image_token_index=IMAGE,
    )  # fmt: skip
    batch = text()
    batch["token_type_ids"] = torch.arange(30).ge(20).long().expand(2, -1)
    return PaliGemmaForConditionalGeneration(config), {**batch, "pixel_values": pixels()}


def whisper(**settings):
    config = WhisperConfig(**WHISPER, num_mel_bins=8, max_source_positions=30, **settings)
    batch = {"input_features": torch.randn(2, 8, 60), "labels": torch.randint(3, 60, (2, 16))}
    return WhisperForConditionalGeneration(config), batch


def bart():
    names = {name: value for name, value in WHISPER.items() if name != "d_model"}
    config = BartConfig(**names, d_model=32, dropout=0.0, max_position_embeddings=64)
    exists = torch.ones(2, 30, dtype=torch.long)
    exists[1, 20:] = 0
    ids, labels = torch.randint(3, 60, (2, 30)), torch.randint(3, 60, (2, 16))
    batch = {"input_ids": ids, "attention_mask": exists, "labels": labels}
    return BartForConditionalGeneration(config), batch


# patches or frames of the tower's rows, by model
LENGTHS = {
    clip: 17, siglip2: 25, spectrogram: 20, wav2vec2: 30, llava: 17, pixtral: 32, gemma3: 16,
    paligemma: 16, whisper: 30, bart: 30,
}  # fmt: skip


def gradients(model, batch):
    """The loss, and the gradients of all parameters and of the pixels or frames."""
    model.zero_grad(set_to_none=True)
    inputs, leaves = {}, {}
    for name, value in batch.items():
        inputs[name] = value
        if value.is_floating_point() and name != "speech":
            inputs[name] = leaves[name] = value.clone().requires_grad_()
    if "speech" in inputs:
        inputs["input_values"] = inputs.pop("speech")
    output = model(**inputs)
    loss = getattr(output, "loss", None)
    if loss is None:
        states = output.last_hidden_state
        loss = (states * torch.randn(states.shape, generator=seeded(3))).sum()
    loss.backward()
    tensors = {**dict(model.named_parameters()), **leaves}
    return loss.detach(), {n: t.grad.clone() for n, t in tensors.items() if t.grad is not None}


def check(make, implementation="sdpa", change=lambda model: None, **settings):
    """Compare two steps of the patched model with the unpatched one, and return its description."""
    seed_torch()
    stock, batch = make()
    change(stock.train())
    stock.set_attn_implementation(implementation)
    loss, expected = gradients(stock, batch)
    config = streambp.StreamConfig(**{"chunk_size": CHUNK, "towers": True, **settings})
    ours = streambp.patch(copy.deepcopy(stock), config)
    for _ in range(2):
        our_loss, our_gradients = gradients(ours, batch)
        assert abs(our_loss - loss) <= 1e-12 * abs(loss)
        assert worst_error(our_gradients, expected) <= MAX_FLOAT64_ERROR
    return streambp.describe(ours)


@pytest.mark.fast(
    "clip-eager", "siglip2-sdpa", "wav2vec2-sdpa", "llava-sdpa", "gemma3-sdpa", "whisper-sdpa"
)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("make", LENGTHS, ids=lambda make: make.__name__)
def test_exact(make, implementation, in_halves):
    described = check(make, implementation)
    assert {layer.path for layer in described.layers} == {"streams"}
    assert in_halves.count(LENGTHS[make]) == 4  # two layers, two steps


def test_a_pooling_head_that_reads_the_mask(in_halves):
    """SigLIP 2's head repeats its mask for torch's own attention."""
    seed_torch()
    model, batch = siglip2()
    config = copy.deepcopy(model.config)
    config.vision_use_head = True
    stock = Siglip2VisionModel(config).train()
    settings = streambp.StreamConfig(chunk_size=CHUNK, towers=True)
    ours = streambp.patch(copy.deepcopy(stock), settings)
    for model in (stock, ours):
        model(**batch).pooler_output.square().sum().backward()
    expected = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
    computed = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert worst_error(computed, expected) <= MAX_FLOAT64_ERROR
    assert in_halves


@pytest.mark.parametrize(
    "settings",
    [
        {"saves": ("attn_out", "kv"), "offload": "cpu"},
        {"saves": ("*",), "rows": "packed"},
        {"weights": "cpu"},
        {"chunk_size": "auto", "offload": "auto"},
    ],
    ids=str,
)
def test_settings(settings):
    described = check(llava, **settings)
    assert {layer.path for layer in described.layers} == {"streams"}


def test_a_checkpointing_program_streams(in_halves):
    check(llava, change=lambda model: model.gradient_checkpointing_enable())
    assert in_halves.count(LENGTHS[llava]) == 4


@pytest.mark.parametrize("make", [llava, whisper, bart], ids=lambda make: make.__name__)
def test_the_default_leaves_towers_and_names_the_setting(make, in_halves):
    described = str(check(make, towers=False))
    assert f"{NOT_STREAMED} streams it" in described
    assert LENGTHS[make] not in in_halves


def test_a_tower_alone_is_refused_with_the_settings_name():
    model, _ = clip()
    with pytest.raises(UnsupportedModelError, match="towers=True"):
        streambp.patch(model)


def test_a_tower_with_the_main_input_name_of_text_is_refused():
    config = Idefics3VisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8,
    )  # fmt: skip
    model = Idefics3VisionTransformer(config)
    assert model.main_input_name == "input_ids"
    with pytest.raises(UnsupportedModelError, match="towers=True"):
        streambp.patch(model)


def freeze_tower(model):
    model.model.vision_tower.requires_grad_(False)


def test_a_frozen_tower_stays_as_it_is(in_halves):
    described = check(llava, change=freeze_tower)
    # The older name is CLIPVisionTransformer.
    reason = r"left as it is: CLIPVision\w+: none of its parameters is trained"
    assert re.search(reason, str(described))
    assert [layer.kind for layer in described.layers] == ["LlamaDecoderLayer"] * 2
    assert not in_halves


def add_lora(model):
    peft = pytest.importorskip("peft")
    targets = r".*vision_tower.*(q_proj|v_proj|fc1)"
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model.double()


def test_adapters_of_a_frozen_tower(in_halves):
    described = check(llava, change=add_lora)
    assert {layer.path for layer in described.layers} == {"streams"}
    assert in_halves.count(LENGTHS[llava]) == 4


def test_dropout_in_a_tower(in_halves):
    """Difference quotients of the loss along one direction, with the same random draws."""
    seed_torch(1)
    model, batch = whisper(dropout=0.2, attention_dropout=0.2, activation_dropout=0.1)
    ours = streambp.patch(model.train(), streambp.StreamConfig(chunk_size=CHUNK, towers=True))

    def step():
        seed_torch(2)
        return gradients(ours, batch)

    step()  # the layers are tested
    loss, ours_by_name = step()
    assert step()[0] == loss
    parameters = dict(ours.named_parameters())
    directions = {}
    for name, parameter in parameters.items():
        if name in ours_by_name and "encoder" in name:
            directions[name] = torch.randn_like(parameter)
    losses = []
    for sign in (1, -1):
        for name, direction in directions.items():
            parameters[name].data += sign * 1e-6 * direction
        losses.append(step()[0])
        for name, direction in directions.items():
            parameters[name].data -= sign * 1e-6 * direction
    slope = sum((ours_by_name[n] * d).sum() for n, d in directions.items())
    assert abs((losses[0] - losses[1]) / 2e-6 - slope) <= 1e-6 * abs(slope)
    assert LENGTHS[whisper] in in_halves


def test_evaluation_without_gradients(in_halves):
    seed_torch(3)
    stock, batch = llava()
    ours = streambp.patch(
        copy.deepcopy(stock.eval()), streambp.StreamConfig(chunk_size=CHUNK, towers=True)
    )
    with torch.no_grad():
        expected, streamed = (m(**batch, use_cache=False).loss for m in (stock, ours))
    assert abs(streamed - expected) <= 1e-12
    assert in_halves.count(LENGTHS[llava]) == 2


def test_micro_batches_do_not_run_unpatched():
    """A step's tokens would predict the memory of the text alone."""
    for towers in (True, False):
        model, _ = llava()
        streambp.patch(model, streambp.StreamConfig(towers=towers))
        assert (model._streambp.unpatched is None) == towers


def test_a_layer_without_a_mask_runs_whole(in_halves):
    def videomae():
        config = VideoMAEConfig(**VISION, num_frames=4)
        return VideoMAEModel(config), {"pixel_values": torch.randn(2, 4, 3, 16, 16)}

    described = str(check(videomae))
    assert (
        "VideoMAELayer takes no attention_mask, in whose place a chunk gets its keys" in described
    )
    assert not in_halves


def test_packed_frames_run_whole(in_halves):
    """Qwen-VL's tower has one row of all images without a batch dimension."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    def qwen():
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
        vision = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
            "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1],
        }  # fmt: skip
        config = Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": rope}, vision_config=vision,
            image_token_id=IMAGE, vision_start_token_id=61, vision_end_token_id=62,
        )  # fmt: skip
        batch = {**text(), "pixel_values": torch.randn(128, 96)}
        batch["image_grid_thw"] = torch.tensor([[1, 8, 8]] * 2)
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
        return Qwen2_5_VLForConditionalGeneration(config), batch

    described = check(qwen)
    reason = "Qwen2_5_VLVisionBlock takes cu_seqlens in place of an attention_mask"
    assert [layer.path for layer in described.layers] == ["streams"] * 2 + ["checkpoints"] * 2
    assert all(reason in layer.reason for layer in described.layers[2:])
    assert not in_halves


@pytest.mark.parametrize("towers", [True, False])
def test_text_without_a_mask_stays_refused(towers, in_halves):
    """transformers may have left out a causal mask, which sdpa then does not know of."""
    seed_torch(4)
    config = streambp.StreamConfig(chunk_size=CHUNK, towers=towers)
    model = streambp.patch(llama().train(), config)
    x = torch.randn(2, 20, 32)
    positions = model.rotary_emb(x, torch.arange(20)[None])
    model.layers[0](x, position_embeddings=positions)
    assert "has no mask that tells which keys exist" in str(streambp.describe(model))
    assert not in_halves


def test_the_setting_reaches_the_config():
    from streambp.integrations.deepspeed import stream_config

    assert stream_config({"streambp": {"towers": True}}).towers
    settings = settings_from_fields({"towers": True})
    assert settings.config.towers
    assert '"towers": true' in settings.to_json()
    assert not LaunchSettings().config.towers


MUTANTS = {
    "a causal mask in place of None": (
        kinds, "bidirectional_mask_function", causal_mask_function,
        lambda: check(clip),
    ),
    "a text layer that counts as a tower's": (
        stacks, "BidirectionalAttention", kinds.TowerAttention,
        lambda: test_text_without_a_mask_stays_refused(False, []),
    ),
    "towers in modules of their own are not found": (
        stacks, "_deeper_stacks", lambda models, inner_ids: [],
        lambda: test_the_default_leaves_towers_and_names_the_setting(llava, []),
    ),
    "a tower's layer that counts as a text's": (
        stacks, "is_tower", lambda backbone: False,
        lambda: test_exact(clip, "sdpa", [17] * 4),
    ),
    "layers without a mask are tried": (
        stacks, "_why_no_mask", lambda layer: None,
        lambda: test_a_layer_without_a_mask_runs_whole([]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants(mutant, monkeypatch):
    module, name, replacement, run = MUTANTS[mutant]
    monkeypatch.setattr(module, name, replacement)
    if name == "is_tower":
        from streambp.model import patching

        monkeypatch.setattr(patching, name, replacement)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        run()
