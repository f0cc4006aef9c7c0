"""What `describe` says of the head is what it did in the last step, and its gradients are the
unpatched model's.

covers: model/causal_lm.py, model/describe.py
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    CsmConfig,
    CsmForConditionalGeneration,
    InstructBlipConfig,
    InstructBlipForConditionalGeneration,
    InstructBlipQFormerConfig,
    InstructBlipVisionConfig,
    VoxtralRealtimeConfig,
    VoxtralRealtimeEncoderConfig,
    VoxtralRealtimeForConditionalGeneration,
    VoxtralRealtimeTextConfig,
)

import streambp
from tests import zoo
from tests.families import SIZES, VOCABULARY, make_batch
from tests.oracle import gradients, worst_error
from tests.seeds import seed_torch, seeded

IMAGE = VOCABULARY - 1
BLOCKWISE = "blockwise loss, no logits"
CALLERS = "as its caller computes it, from logits [B, T, V] (a call without labels), costs memory"


def _blip(kind, config_class, vision_class, qformer_class, **inputs):
    """The BLIPs' language model is called without labels: the loss is computed around it."""
    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = config_class(
        vision_config=vision_class(**small, image_size=8, patch_size=4).to_dict(),
        qformer_config=qformer_class(**small, **dropout, encoder_hidden_size=16).to_dict(),
        text_config=zoo.tiny_config("opt").to_dict(), num_query_tokens=3, image_token_index=IMAGE,
    )  # fmt: skip
    ids = make_batch("plain")["input_ids"].clamp(max=IMAGE - 1)
    ids[:, 2:5] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    pixels = torch.randn(2, 3, 8, 8, generator=seeded(0), dtype=torch.float64)
    inputs |= {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": pixels,
        "attention_mask": torch.ones_like(ids),
    }
    return kind(config), inputs, f"{CALLERS} (1 of 1 training calls came without labels)"


def blip_2():
    return _blip(Blip2ForConditionalGeneration, Blip2Config, Blip2VisionConfig, Blip2QFormerConfig)


def instructblip():
    instruction = torch.randint(5, VOCABULARY, (2, 4), generator=seeded(1))
    return _blip(
        InstructBlipForConditionalGeneration, InstructBlipConfig, InstructBlipVisionConfig, InstructBlipQFormerConfig,
        qformer_input_ids=instruction, qformer_attention_mask=torch.ones_like(instruction),
    )  # fmt: skip


def deepseek_ocr2():
    """Its image encoder is a decoder stack as well, and comes first: its norm is not the head's."""
    if not hasattr(transformers, "DeepseekOcr2Config"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek-OCR 2")
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    sam = {
        **small, "output_channels": 16, "image_size": 16, "patch_size": 2, "mlp_ratio": 2.0, "window_size": 4,
        "global_attn_indexes": [1], "downsample_channels": [16, 32], "initializer_range": 0.02,
    }  # fmt: skip
    encoder = {**small, "num_key_value_heads": 4, "intermediate_size": 40}
    experts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    text = {**SIZES, **experts, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]}
    config = transformers.DeepseekOcr2Config(
        vision_config={"sam_config": sam, "encoder_config": encoder},
        text_config=text,
        image_token_id=IMAGE,
    )
    ids = torch.randint(5, IMAGE, (1, 170), generator=seeded(0))
    ids[:, 3:148] = IMAGE  # an image takes 144 tokens and a separator, however small
    labels = ids.masked_fill(ids == IMAGE, -100)
    pixels = torch.randn(1, 3, 16, 16, generator=seeded(1), dtype=torch.float64)
    inputs = {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": pixels,
        "attention_mask": torch.ones_like(ids),
    }
    model = transformers.DeepseekOcr2ForConditionalGeneration(config)
    model.set_experts_implementation("eager")  # grouped products know no float64
    return model, inputs, BLOCKWISE


def voxtral_realtime():
    """Its audio encoder streams as well, and comes first: its norm is not the head's."""
    sizes = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
    audio = VoxtralRealtimeEncoderConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        num_mel_bins=4,
    )
    text = VoxtralRealtimeTextConfig(**sizes, head_dim=8)
    config = VoxtralRealtimeConfig(
        audio_config=audio.to_dict(), text_config=text.to_dict(), downsample_factor=2
    )
    batch = make_batch("plain")
    audio = torch.randn(2, 2 * batch["input_ids"].shape[1], 16, generator=seeded(0))
    return (
        VoxtralRealtimeForConditionalGeneration(config),
        {**batch, "encoder_inputs_embeds": audio.double()},
        BLOCKWISE,
    )


def csm():
    """Some of the final norm's outputs go to its depth decoder as well."""
    sizes = {
        name: size for name, size in SIZES.items() if name not in ("bos_token_id", "eos_token_id")
    }
    codec = {  # takes no part
        "model_type": "mimi", "hidden_size": 16, "num_filters": 4, "num_hidden_layers": 1, "intermediate_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "codebook_size": 16, "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8, "upsample_groups": 16, "num_quantizers": 4,
    }  # fmt: skip
    depth = {**sizes, "backbone_hidden_size": 32, "num_codebooks": 4, "head_dim": 8}
    config = CsmConfig(
        **SIZES, num_codebooks=4, text_vocab_size=VOCABULARY, head_dim=8, codebook_pad_token_id=0, codebook_eos_token_id=1,
        audio_token_id=3, audio_eos_token_id=4, depth_decoder_config=depth, codec_config=codec,
    )  # fmt: skip
    frames = torch.randint(5, VOCABULARY, (2, 13, 4), generator=seeded(0))
    inputs = {
        "input_ids": frames,
        "labels": frames,
        "attention_mask": torch.ones(2, 13, dtype=torch.long),
    }
    head_text = f"{BLOCKWISE}; the final norm's output is computed for the model's __setitem__"
    return CsmForConditionalGeneration(config), inputs, head_text


def modernbert_decoder():
    """A dense layer and a nonlinearity stand before its output projection."""
    head_text = f"{BLOCKWISE}; the final norm's output is computed for the model's gelu"
    return zoo.build("modernbert-decoder"), make_batch("plain"), head_text


def plain():
    return zoo.build("qwen3"), make_batch("plain"), BLOCKWISE


@pytest.mark.fast(3)
@pytest.mark.usefixtures("float64_everywhere")
@pytest.mark.parametrize(
    "make", [plain, blip_2, instructblip, voxtral_realtime, deepseek_ocr2, csm, modernbert_decoder]
)
def test_families(make):
    seed_torch(0)
    model, batch, expected = make()
    stock = model.double().train()
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    assert streambp.describe(ours).head.endswith(
        "when labels are given; no call yet in training or with labels"
    )
    (stock_loss, reference), (loss, our_gradients) = (
        gradients(stock, **batch),
        gradients(ours, **batch),
    )
    assert abs(loss - stock_loss) <= 1e-12 * abs(stock_loss)
    assert worst_error(our_gradients, reference) <= 1e-10
    assert streambp.describe(ours).head == expected


def step(model, labels=True, training=True):
    batch = make_batch("plain")
    inputs = batch if labels else {"input_ids": batch["input_ids"]}
    output = model.train(training)(**inputs, use_cache=False)
    return (
        output.loss
        if labels
        else F.cross_entropy(output.logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])
    )


def test_calls_without_labels_are_counted():
    """As in every program that computes its loss from logits: DPO, label smoothing, a loss function
    of the user's."""
    model = streambp.patch(zoo.build("qwen3", torch.float32), streambp.StreamConfig(chunk_size=5))
    for _ in range(2):
        step(model, labels=False).backward()
    assert streambp.describe(model).head == f"{CALLERS} (2 of 2 training calls came without labels)"
    step(model, training=False)
    assert streambp.describe(model).head == f"{CALLERS} (2 of 2 training calls came without labels)"
    step(model).backward()
    assert (
        streambp.describe(model).head == f"{BLOCKWISE} (2 of 3 training calls came without labels)"
    )


def test_evaluation_tells_until_training_does():
    model = streambp.patch(zoo.build("qwen3", torch.float32), streambp.StreamConfig(chunk_size=5))
    step(model, labels=False, training=False)
    assert streambp.describe(model).head.endswith("no call yet in training or with labels")
    step(model, training=False)
    assert streambp.describe(model).head == BLOCKWISE
    model.loss_function = lambda logits, labels, *_, **__: logits.sigmoid().mean()
    step(model, training=True).backward()
    built = "builds the logits: the loss uses sigmoid on them, costs memory"
    assert streambp.describe(model).head == built
    model.loss_function = lambda logits, labels, *_, **__: F.cross_entropy(
        logits.flatten(0, 1), labels.flatten()
    )
    step(model, training=False)
    assert streambp.describe(model).head == built
    step(model, training=True)
    assert streambp.describe(model).head == BLOCKWISE


def test_metrics_on_logits_are_named_beside_a_blockwise_loss():
    model = streambp.patch(zoo.build("qwen3", torch.float32), streambp.StreamConfig(chunk_size=5))
    model.loss_function = lambda logits, labels, vocab_size, **_: (
        F.cross_entropy(logits.view(-1, vocab_size), labels.flatten())
        * (1 + logits.argmax(-1).float().mean() * 0)
    )
    step(model).backward()
    assert "argmax" in streambp.describe(model).head


NAMED_OPERATIONS = {
    "cross_entropy(weight=...)": {"weight": torch.ones(VOCABULARY)},
    "cross_entropy(label_smoothing=...)": {"label_smoothing": 0.1},
    "cross_entropy(weight=..., label_smoothing=...)": {
        "weight": torch.ones(VOCABULARY),
        "label_smoothing": 0.1,
    },
}


@pytest.mark.parametrize(
    ("argument_text", "arguments"), NAMED_OPERATIONS.items(), ids=NAMED_OPERATIONS
)
def test_arguments_that_need_the_logits_are_named(argument_text, arguments):
    """Of a loss that is computed blockwise without them; lazy logits have a rule for
    label_smoothing."""
    model = streambp.patch(zoo.build("qwen3", torch.float32), streambp.StreamConfig(chunk_size=5))
    model.loss_function = lambda logits, labels, *_, **__: F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), **arguments
    )
    step(model).backward()
    assert (
        streambp.describe(model).head
        == f"builds the logits: the loss uses {argument_text} on them, costs memory"
    )
    lazy = streambp.patch(
        zoo.build("qwen3", torch.float32), streambp.StreamConfig(chunk_size=5, lazy_logits=True)
    )
    batch = make_batch("plain")
    F.cross_entropy(
        lazy(input_ids=batch["input_ids"]).logits.flatten(0, 1),
        batch["labels"].flatten(),
        **arguments,
    ).backward()
    lazily = argument_text.replace(", label_smoothing=...", "")
    if arguments.keys() == {"label_smoothing"}:
        assert streambp.describe(lazy).head == "no logits: computed blockwise for cross_entropy"
    else:
        assert (
            streambp.describe(lazy).head
            == f"builds the logits: the program uses {lazily} on them, costs memory"
        )


def test_class_probabilities_are_named():
    model = streambp.patch(
        zoo.build("qwen3", torch.float32), streambp.StreamConfig(chunk_size=5, lazy_logits=True)
    )
    logits = model(input_ids=make_batch("plain")["input_ids"]).logits
    F.cross_entropy(
        logits.flatten(0, 1), torch.rand(logits.shape, generator=seeded(0)).flatten(0, 1)
    ).backward()
    assert "the program uses cross_entropy(target=...) on them" in streambp.describe(model).head


def test_lora_on_the_output_projection_builds_logits():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(zoo.build("qwen3", torch.float32), lora).train()
    step(streambp.patch(model)).backward()
    assert streambp.describe(model).head.startswith("builds the logits: ")


def test_it_travels_with_a_copy():
    model = streambp.patch(zoo.build("qwen3", torch.float32), streambp.StreamConfig(chunk_size=5))
    step(model).backward()
    file = io.BytesIO()
    pickle.dump(model, file)
    file.seek(0)
    for model_copy in (copy.deepcopy(model), pickle.load(file)):
        assert streambp.describe(model_copy).head == BLOCKWISE
        assert step(model_copy).isfinite()
