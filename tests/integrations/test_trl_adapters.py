"""Trainers with LoRA, ten steps, against the same steps of the unpatched model: adapted Linears are
computed as one operation.

covers: layer/adapters.py, layer/adapted_linear.py, integrations/trl/sft.py,
integrations/trl/dpo.py, integrations/trl/grpo.py
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import streambp
from streambp.layer import adapted_linear as operation
from tests.families import VOCABULARY, build
from tests.oracle import MAX_ERROR_RATIO, relative_l2
from tests.seeds import seed_of, seed_torch, seeded

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import peft
import transformers
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from streambp.integrations.trl import (
    StreamDPOConfig,
    StreamDPOTrainer,
    StreamGRPOConfig,
    StreamGRPOTrainer,
    StreamSFTConfig,
    StreamSFTTrainer,
)
from tests.integrations.test_trl import (  # noqa: F401  # a fixture
    STREAM_ARGUMENTS,
    exact_stock_head,
    pairs,
    prompts,
    reward,
    texts,
    train,
)
from tests.integrations.test_trl_shared import GRPO, compare

STEPS = 10
LORA = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "init_lora_weights": False}
KINDS = {
    "sft": ((SFTTrainer, SFTConfig), (StreamSFTTrainer, StreamSFTConfig), texts, {}),
    "dpo": ((DPOTrainer, DPOConfig), (StreamDPOTrainer, StreamDPOConfig), pairs, {}),
    "grpo": (
        (GRPOTrainer, GRPOConfig),
        (StreamGRPOTrainer, StreamGRPOConfig),
        prompts,
        {**GRPO, "gradient_accumulation_steps": 1, "reward_funcs": reward},
    ),
}


def trained(classes, kind, folder, steps, **settings):
    """Log, weights and trainer after some steps of one of TRL's trainers, or of ours."""
    *_, data, kind_settings = KINDS[kind]
    config_settings = {
        name: value for name, value in kind_settings.items() if name != "reward_funcs"
    }
    trainer = {name: value for name, value in kind_settings.items() if name == "reward_funcs"}
    trainer["peft_config"] = peft.LoraConfig(**LORA)
    seed_torch(0)
    return train(
        *classes, data(), folder, trainer=trainer, max_steps=steps, **config_settings, **settings
    )


def check(kind, folder, calls, steps, kernels="auto"):
    """kernels: of a patched model of TRL's own trainer; "auto": of our trainer."""
    stock, ours, *_ = KINDS[kind]
    expected = trained(stock, kind, folder, steps)
    assert not calls
    if kernels == "auto":
        streamed = trained(ours, kind, folder, steps, **STREAM_ARGUMENTS)
    else:
        config = streambp.StreamConfig(chunk_size=5, kernels=kernels)
        streamed = trained(stock, kind, folder, steps, patch_with=config)
    compare(expected, streamed)
    return streamed[2].model


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("sft", 2), *(pytest.param(kind, STEPS, marks=pytest.mark.full) for kind in KINDS)],
)
def test_steps(kind, steps, tmp_path, calls):
    model = check(kind, tmp_path, calls, steps)
    assert {shape[-1] for shape in calls} == {32, 40}  # what down_proj reads, and what others read
    assert "14 Linears with adapters are computed as one operation" in str(streambp.describe(model))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_own_kernels_leave_pefts_code(kind, tmp_path, calls, attended_chunks):
    check(kind, tmp_path, calls, 2, kernels="own")
    assert attended_chunks
    assert not calls


def unscaled(monkeypatch):
    monkeypatch.setattr(operation.AdapterScale, "b", 1.0)


@pytest.mark.full
def test_mutant(tmp_path, calls, monkeypatch):
    unscaled(monkeypatch)
    with pytest.raises(AssertionError):
        check("sft", tmp_path, calls, 2)
    assert calls


MODELS = 6
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


def rows_of(seed):
    generator = seeded(1000 + seed)
    ids = torch.randint(3, VOCABULARY, (2 * STEPS, 65), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids.tolist()]


def by_trainer(model, folder, seed, bf16):
    """What ten steps of transformers' Trainer have changed of the adapters."""
    weights_before = {
        name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
    }
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, bf16=bf16, use_cpu=True, report_to=[], save_strategy="no",
        per_device_train_batch_size=2, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
        max_grad_norm=0.0, seed=seed_of(seed), disable_tqdm=True, logging_steps=1000,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows_of(seed)).train()
    weights_after = dict(model.named_parameters())
    return {
        name: weights_after[name].detach().float() - old.float()
        for name, old in weights_before.items()
    }


def trainer_errors(seed, folder, kernels="auto"):
    """Our error and the unpatched model's, of ten steps under bf16, against float32."""
    base = build("qwen3", torch.bfloat16, seed, **SIZES)
    seed_torch(2000 + seed)
    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    stock = peft.get_peft_model(base, config)
    true = by_trainer(copy.deepcopy(stock).float(), folder, seed, False)
    config = streambp.StreamConfig(chunk_size=40, kernels=kernels)
    ours = streambp.patch(copy.deepcopy(stock), config)
    both_changes = [by_trainer(model, folder, seed, True) for model in (ours, stock)]
    return [relative_l2(changes, true) for changes in both_changes]


def check_bf16(folder):
    pairs_of = [trainer_errors(seed, folder) for seed in range(MODELS)]
    ours, stock = (sum(column) for column in zip(*pairs_of, strict=True))
    print(f"{ours / stock:.3f} of the unpatched model's error over {MODELS} models: {pairs_of}")
    assert ours <= MAX_ERROR_RATIO * stock


@pytest.mark.full
@pytest.mark.trls_kernel  # without float64's casts
def test_transformers_trainer_under_bf16(tmp_path, calls):
    check_bf16(tmp_path)
    assert calls


@pytest.mark.full
@pytest.mark.trls_kernel
def test_mutant_under_bf16(tmp_path, calls, monkeypatch):
    unscaled(monkeypatch)
    monkeypatch.setitem(globals(), "MODELS", 1)
    with pytest.raises(AssertionError):
        check_bf16(tmp_path)
    assert calls


@pytest.fixture(scope="module")
def in_four_bits(tmp_path_factory):
    """A checkpoint for models that transformers quantizes as it loads them."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    folder = str(tmp_path_factory.mktemp("model"))
    build("qwen3", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(folder)
    return folder


def loaded(checkpoint, dtype, attention="sdpa"):
    """A model whose Linears have 4-bit weights, as transformers loads it."""
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint,
        quantization_config=settings,
        dtype=dtype,
        attn_implementation=attention,
        device_map={"": "cpu"},
    )
    seed_torch(0)
    return model


def adapters_of(weights):
    return {name: weight.float() for name, weight in weights.items() if "lora_" in name}


def by_trl(checkpoint, folder, attention="sdpa", config=None, kind="sft"):
    """TRL casts the adapters of such a model to bfloat16."""
    classes, _, data, kind_settings = KINDS[kind]
    settings = {name: value for name, value in kind_settings.items() if name != "reward_funcs"}
    trainer = {name: value for name, value in kind_settings.items() if name == "reward_funcs"}
    if kind != "grpo":
        settings["max_length"] = 32
    *_, weights, trained_by = train(
        *classes,
        data(),
        folder,
        model=loaded(checkpoint, torch.bfloat16, attention),
        trainer={**trainer, "peft_config": peft.LoraConfig(**LORA)},
        patch_with=config,
        max_steps=STEPS,
        bf16=True,
        **settings,
    )
    return adapters_of(weights), trained_by.model


RUNS = {
    "sft": by_trl,
    "dpo": functools.partial(by_trl, kind="dpo"),
    "grpo": functools.partial(by_trl, kind="grpo"),
}


def by_transformers(checkpoint, folder, attention="sdpa", config=None):
    config_of_peft = peft.LoraConfig(**{**LORA, "lora_alpha": 4})  # of 12, rounding grows
    model = peft.get_peft_model(loaded(checkpoint, torch.float32, attention), config_of_peft)
    if config is not None:
        streambp.patch(model, config)
    return by_trainer(model, folder, 0, False), model


@pytest.mark.full
@pytest.mark.trls_kernel
@pytest.mark.parametrize("run", [*RUNS.values(), by_transformers], ids=[*RUNS, "trainer"])
def test_qlora(run, tmp_path, calls, in_four_bits):
    """No further from unpatched QLoRA than twice the distance between two of its attention
    kernels."""
    stock, _ = run(in_four_bits, tmp_path)
    eager_weights, _ = run(in_four_bits, tmp_path, "eager")
    assert not calls
    peft_weights, _ = run(
        in_four_bits, tmp_path, config=streambp.StreamConfig(chunk_size=5, kernels="own")
    )
    assert not calls
    our_weights, model = run(in_four_bits, tmp_path, config=streambp.StreamConfig(chunk_size=5))
    assert calls
    assert sum(type(module).__name__ == "Linear4bit" for module in model.modules()) >= 14
    assert "14 Linears with adapters are computed as one operation" in str(streambp.describe(model))
    errors = [relative_l2(weights, stock) for weights in (our_weights, peft_weights, eager_weights)]
    print("as one operation, peft's code, another attention kernel:", errors)
    assert max(errors[:2]) <= 2 * errors[2]
