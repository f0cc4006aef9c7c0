"""Other models than causal language models, and what users put around them.

covers: model/patching.py, model/wrappers.py
"""

from __future__ import annotations

import copy
import functools
import itertools
import types

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.modeling_outputs import CausalLMOutput

import streambp
from tests import zoo
from tests.families import LENGTH, VOCABULARY, make_batch
from tests.oracle import assert_as_precise, gradients, relative_l2, worst_error
from tests.seeds import seed_torch, seeded

IMAGE = VOCABULARY - 1
IMAGE_TOKENS = slice(5, 9)


def gradients_of(model, run):
    model.zero_grad(set_to_none=True)
    loss = run(model)
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def check(stock, run, chunk_size=5, tolerance=1e-10):
    """The patched copy gives the same loss and the same gradients; returns it."""
    seed_torch(0)
    expected_loss, expected = gradients_of(stock.double().train(), run)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=chunk_size))
    loss, grads = gradients_of(ours, run)
    assert abs(loss - expected_loss) <= tolerance * abs(expected_loss)
    assert worst_error(grads, expected) <= tolerance
    assert any(layer.path == "streams" for layer in streambp.describe(ours).layers)
    return ours


def text(mode="left-padded"):
    batch = make_batch(mode)
    del batch["labels"]
    return batch


@pytest.mark.sees_padding("their losses have padding in them")
@pytest.mark.usefixtures("float64_everywhere")
@pytest.mark.parametrize(
    ("auto_class", "run"),
    [
        (AutoModel, lambda m: m(**text(), use_cache=False).last_hidden_state.pow(2).mean()),
        (
            AutoModelForSequenceClassification,
            lambda m: m(**text(), labels=torch.tensor([0, 2]), use_cache=False).loss,
        ),
        (
            AutoModelForTokenClassification,
            lambda m: m(**text(), labels=text()["input_ids"] % 3, use_cache=False).loss,
        ),
        (
            AutoModelForQuestionAnswering,
            lambda m: (
                m(
                    **text(),
                    start_positions=torch.tensor([3, 9]),
                    end_positions=torch.tensor([7, 20]),
                ).loss
            ),
        ),
    ],
    ids=["backbone", "sequence classification", "token classification", "question answering"],
)
def test_models_with_other_heads(auto_class, run):
    config = zoo.tiny_config("qwen3", num_labels=3)
    config.classifier_dropout = 0.0
    check(auto_class.from_config(config), run)


@pytest.mark.usefixtures("float64_everywhere")
def test_reward_model():
    """A pair of sequences scored by one number each, as TRL's RewardTrainer does."""
    config = zoo.tiny_config("llama", num_labels=1)

    def run(model):
        chosen, rejected = model(**text(), use_cache=False).logits.unbind()
        return -nn.functional.logsigmoid(chosen - rejected).mean()

    check(AutoModelForSequenceClassification.from_config(config), run)


def image_batch():
    ids = torch.randint(3, IMAGE - 3, (2, LENGTH), generator=seeded(0))
    ids[:, IMAGE_TOKENS] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    pixels = torch.randn(2, 3, 8, 8, generator=seeded(1), dtype=torch.float64)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels, "use_cache": False}


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
}


@pytest.mark.usefixtures("float64_everywhere")
def test_llava():
    vision = CLIPVisionConfig(**VISION, patch_size=4, projection_dim=16)
    config = LlavaConfig(
        vision_config=vision,
        text_config=zoo.tiny_config("llama"),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    check(LlavaForConditionalGeneration(config), lambda m: m(**image_batch()).loss)


@pytest.mark.usefixtures("float64_everywhere")
def test_qwen_vl_with_its_three_positions_per_token():
    text_config = zoo.tiny_config("qwen2").to_dict()
    text_config["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 2],
    }
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
        "spatial_merge_size": 1, "window_size": 8, "fullatt_block_indexes": [1], "temporal_patch_size": 2,
    }  # fmt: skip
    del text_config["model_type"]
    config = Qwen2_5_VLConfig(text_config=text_config, vision_config=vision, image_token_id=IMAGE)
    batch = image_batch()
    batch["pixel_values"] = torch.randn(8, 96, generator=seeded(1), dtype=torch.float64)
    batch["image_grid_thw"] = torch.tensor([[1, 2, 2], [1, 2, 2]])
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    ours = check(Qwen2_5_VLForConditionalGeneration(config), lambda m: m(**batch).loss)
    assert "left as it is: Qwen2_5_VisionTransformerPretrainedModel" in str(streambp.describe(ours))


def gemma3_with_images():
    """Image tokens read their whole image, later ones too."""
    config = Gemma3Config(
        text_config=zoo.tiny_config("gemma3_text").to_dict(),
        vision_config=SiglipVisionConfig(**VISION, patch_size=4).to_dict(),
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_index=IMAGE - 2,
        eoi_token_index=IMAGE - 1,
    )
    batch = image_batch()
    batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return Gemma3ForConditionalGeneration(config), batch


@pytest.mark.usefixtures("float64_everywhere")
@pytest.mark.parametrize("chunk_size", [5, 7, LENGTH])
def test_images_stream(chunk_size):
    model, batch = gemma3_with_images()
    check(model, lambda m: m(**batch).loss, chunk_size)


def test_optimizer_fused_into_backward(float64_everywhere):
    """Each parameter is updated and its gradient freed as soon as it is complete; two steps, tied
    embedding."""
    stock = zoo.build("qwen3", tie_word_embeddings=True)
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    for model in (stock, ours):
        for parameter in model.parameters():

            def step(p):
                with torch.no_grad():
                    p.sub_(p.grad, alpha=0.1)
                p.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        for seed in (1, 2):
            model(**make_batch("plain", seed=seed), use_cache=False).loss.backward()
        assert all(p.grad is None for p in model.parameters())
    updated = dict(ours.named_parameters())
    assert worst_error(updated, dict(stock.named_parameters())) <= 1e-10


def test_compiled_model_says_that_layers_stay_eager(float64_everywhere):
    stock = zoo.build("qwen3")
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    compiled = torch.compile(ours, backend="eager")
    _, expected = gradients_of(stock, lambda m: m(**make_batch("plain"), use_cache=False).loss)
    compiled(**make_batch("plain"), use_cache=False).loss.backward()
    assert worst_error({name: p.grad for name, p in ours.named_parameters()}, expected) <= 1e-10
    assert "torch.compile" in str(streambp.describe(compiled))
    assert "torch.compile" not in str(streambp.describe(streambp.patch(zoo.build("llama"))))


def fused_loss_forward(self, input_ids=None, labels=None, **kwargs):
    """A forward that computes the loss from hidden_states and the head's weight by itself, as
    Liger's does."""
    hidden_states = self.model(input_ids=input_ids, **kwargs)[0]
    shifted = hidden_states[:, :-1].reshape(-1, hidden_states.shape[-1])
    logits = torch.mm(shifted, self.lm_head.weight.t())
    return CausalLMOutput(loss=nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1)))


@pytest.mark.parametrize("patched_first", [True, False])
def test_forward_replaced_by_another_library(patched_first, float64_everywhere):
    stock = zoo.build("qwen3")
    ours = copy.deepcopy(stock)
    stock.forward = types.MethodType(fused_loss_forward, stock)
    if patched_first:
        streambp.patch(ours, streambp.StreamConfig(chunk_size=5))
    ours.forward = types.MethodType(fused_loss_forward, ours)
    if not patched_first:
        streambp.patch(ours, streambp.StreamConfig(chunk_size=5))
    batch = make_batch("plain")
    (expected_loss, expected), (loss, grads) = (
        gradients_of(model, lambda m: m(**batch, use_cache=False).loss) for model in (stock, ours)
    )
    assert abs(loss - expected_loss) <= 1e-12 * abs(expected_loss)
    assert worst_error(grads, expected) <= 1e-10
    assert patched_first == ("replaced the model's forward" in str(streambp.describe(ours)))
    streambp.unpatch(ours)
    assert ours.__dict__["forward"].__func__ is fused_loss_forward


def test_trl_activation_offloading_is_refused():
    pytest.importorskip("trl", reason="TRL is not installed")
    from trl.models.activation_offloading import OffloadActivations

    def pack(tensor):
        return tensor

    pack.__module__ = OffloadActivations.__module__
    model = streambp.patch(zoo.build("qwen3", torch.float32))
    # the class itself wants a CUDA device
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, pack)
    with hooks, pytest.raises(streambp.StreamBPError, match=r"offload='cpu'"):
        model(**make_batch("plain"), use_cache=False)


def dequantised(model):
    """The float64 model that a quantised one stands for."""
    wide = copy.deepcopy(model)
    for module in list(wide.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and type(child.weight) is not nn.Parameter:
                weight = child(torch.eye(child.in_features, dtype=torch.bfloat16)).detach().T
                linear = nn.Linear(
                    child.in_features, child.out_features, bias=child.bias is not None
                )
                linear.weight = nn.Parameter(weight, requires_grad=False)
                setattr(module, name, linear)
    return wide.double()


def quantise_torchao(config, settings, model):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(model.model.layers, getattr(quantization, config)(**settings))


def quantise_bitsandbytes(bits, model):
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                sizes = (child.in_features, child.out_features, child.bias is not None)
                if bits == 4:
                    quantised = bnb.Linear4bit(
                        *sizes, compute_dtype=torch.bfloat16, quant_type="nf4"
                    )
                    quantised.weight = bnb.Params4bit(
                        child.weight.data, requires_grad=False, quant_type="nf4"
                    )
                else:
                    quantised = bnb.Linear8bitLt(*sizes, has_fp16_weights=False)
                    quantised.weight = bnb.Int8Params(
                        child.weight.data, requires_grad=False, has_fp16_weights=False
                    )
                setattr(module, name, quantised.to("cpu"))


@pytest.mark.full
@pytest.mark.parametrize(
    "quantise",
    [
        functools.partial(quantise_torchao, "Int8WeightOnlyConfig", {}),
        functools.partial(quantise_torchao, "Float8WeightOnlyConfig", {}),
        functools.partial(quantise_torchao, "IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
        functools.partial(quantise_bitsandbytes, 4),
        functools.partial(quantise_bitsandbytes, 8),
    ],
    ids=[
        "torchao int8",
        "torchao float8",
        "torchao int4",
        "bitsandbytes 4-bit",
        "bitsandbytes 8-bit",
    ],
)
def test_quantised_base_with_lora(quantise):
    """As close as the unpatched quantised model to the float64 model that its weights stand for."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    batch = make_batch("left-padded", length=128)

    def run(model):
        return model(**batch, use_cache=False).loss

    def squared_errors(seed):
        base = zoo.build("llama", torch.bfloat16, seed=seed, hidden_size=64, intermediate_size=64)
        quantise(base)
        model = peft.get_peft_model(base, lora).train()
        _, truth = gradients_of(dequantised(model), run)
        _, stock = gradients_of(model, run)
        streambp.patch(model, streambp.StreamConfig(chunk_size=29))
        _, ours = gradients_of(model, run)
        assert ours.keys() == stock.keys() == truth.keys()
        assert {layer.path for layer in streambp.describe(model).layers} == {"streams"}
        return [relative_l2(ours, truth) ** 2, relative_l2(stock, truth) ** 2]

    def errors():
        """Errors of eight models at a time: those of single ones scatter by a fifth."""
        for first in itertools.count(step=8):
            squares = torch.tensor([squared_errors(first + seed) for seed in range(8)])
            yield squares.mean(0).sqrt().tolist()

    assert_as_precise(errors())


def test_describe_tells_of_calls_with_a_cache(float64_oracle):
    """Prefix tuning trains keys and values that come in as a cache."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    stock = peft.get_peft_model(zoo.build("qwen3"), prefix).double()
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    assert "given a cache" not in str(streambp.describe(ours))
    (_, expected), (_, grads) = (gradients(model, **make_batch("plain")) for model in (stock, ours))
    assert worst_error(grads, expected) <= 1e-10
    assert "calls in training that were given a cache (prefix tuning) ran unpatched" in str(
        streambp.describe(ours)
    )
