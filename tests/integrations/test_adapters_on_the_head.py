"""Adapters on `lm_head`: the Stream trainers refuse them with TRL's words, and HF Trainer with `patch`
trains them, as the page on trainers says.

covers: model/head_deferral.py, integrations/trl/trainer.py
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import streambp
from tests.families import build, make_batch
from tests.oracle import MAX_FLOAT64_ERROR, worst_error
from tests.seeds import seed_of, seed_torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import peft
import transformers

from tests.integrations.test_trl import STREAM_ARGUMENTS, train
from tests.integrations.test_trl_adapters import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "trainers.md"
TARGETS = {"target_modules": ["q_proj", "lm_head"], "r": 4, "init_lora_weights": False}
ADAPTERS = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.fast("sft")
@pytest.mark.parametrize("kind", KINDS)
def test_stream_trainers_refuse_them_before_a_step(kind, tmp_path):
    _, ours, data, settings = KINDS[kind]
    trainer = {name: value for name, value in settings.items() if name == "reward_funcs"}
    trainer["peft_config"] = peft.LoraConfig(**TARGETS)
    arguments = {name: value for name, value in settings.items() if name not in trainer}
    with pytest.raises(ValueError, match="lm_head"):
        train(
            *ours, data(), tmp_path, trainer=trainer, max_steps=1, **STREAM_ARGUMENTS, **arguments
        )


def test_the_page_says_what_to_use():
    text = " ".join(PAGE.read_text("utf-8").split())
    assert "An adapter on `lm_head` is refused by TRL's trainers" in text
    assert (
        "HF Trainer with `streambp.patch(model)` trains it exactly (LoRA, DoRA, `lora_bias`)"
        in text
    )


def changes(model, folder):
    """What two steps of transformers' Trainer change of each weight that trains."""
    weights_before = {
        name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
    }
    rows = [
        {name: x[0] for name, x in make_batch("right-padded", seed=seed).items()}
        for seed in range(4)
    ]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", optim="sgd",
        per_device_train_batch_size=2, learning_rate=0.1, lr_scheduler_type="constant",
        max_grad_norm=0.0, seed=seed_of(3), disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    weights_after = dict(model.named_parameters())
    return {name: weights_after[name].detach() - old for name, old in weights_before.items()}


def check(name, folder):
    seed_torch(0)
    config = peft.LoraConfig(**{**TARGETS, **ADAPTERS[name]})
    stock = peft.get_peft_model(build("qwen3", torch.float64), config).double()
    ours = streambp.patch(copy.deepcopy(stock), streambp.StreamConfig(chunk_size=5))
    expected = changes(stock, folder / "stock")
    assert any("lm_head" in weight for weight in expected)
    assert all(change.any() for change in expected.values())
    assert worst_error(changes(ours, folder / "ours"), expected) <= MAX_FLOAT64_ERROR
    assert {layer.path for layer in streambp.describe(ours).layers} == {"streams"}


@pytest.mark.fast("DoRA")
@pytest.mark.parametrize("name", ADAPTERS)
def test_transformers_trainer_trains_them(name, tmp_path, float64_oracle):
    check(name, tmp_path)


def test_a_head_without_its_adapter_is_found(tmp_path, monkeypatch, float64_oracle):
    """As TRL's head: hidden states times `lm_head.weight`."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.base_layer.weight)

    real = streambp.patch

    def patch(model, config):
        head = real(model, config).get_output_embeddings()
        head.forward = forward.__get__(head)
        return model

    monkeypatch.setattr(streambp, "patch", patch)
    with pytest.raises(AssertionError):
        check("LoRA", tmp_path)
