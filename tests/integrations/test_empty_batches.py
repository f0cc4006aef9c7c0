"""The Stream trainers on micro-batches without a token to learn from, against TRL's own in float64.

covers: integrations/trl/trainer.py, integrations/trl/values.py, model/empty_batches.py
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

import streambp
from streambp.head.log_probs import HeadGradients
from tests.families import VOCABULARY, build
from tests.oracle import lift_float32_casts, worst_error
from tests.seeds import seeded

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from streambp.integrations.trl import (
    StreamDPOConfig,
    StreamDPOTrainer,
    StreamGRPOConfig,
    StreamGRPOTrainer,
    StreamSFTConfig,
    StreamSFTTrainer,
)
from tests.integrations.test_ppo import make, reference_loss, rollouts
from tests.integrations.test_trl import STREAM_ARGUMENTS, FullLogits, prompts, train, words

MAX_LENGTH = 12


@pytest.fixture(autouse=True)
def exact_stock_head(monkeypatch):
    lift_float32_casts(monkeypatch)
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", FullLogits)


def tokenized():
    """Return rows of tokens of which every other has no label."""
    generator = seeded(0)
    examples = []
    for index in range(8):
        ids = torch.randint(3, VOCABULARY, (MAX_LENGTH - index,), generator=generator)
        labels = torch.full_like(ids, -100) if index % 2 else ids
        examples.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return Dataset.from_list(examples)


def long_prompts():
    """Return pairs of which every other has a prompt that the collator cuts before its
    completions."""
    generator = seeded(0)
    examples = []
    for index in range(8):
        prompt = (
            words(generator, MAX_LENGTH + 3, MAX_LENGTH + 6)
            if index % 2
            else words(generator, 3, 5)
        )
        examples.append(
            {
                "prompt": prompt,
                **{name: " " + words(generator, 3, 6) for name in ("chosen", "rejected")},
            }
        )
    return Dataset.from_list(examples)


def longest(completions, **_):
    return [float(len(text)) for text in completions]


CASES = {
    "sft": ((SFTTrainer, SFTConfig), (StreamSFTTrainer, StreamSFTConfig), tokenized, {"max_length": None}),
    "dpo": (
        (DPOTrainer, DPOConfig), (StreamDPOTrainer, StreamDPOConfig), long_prompts,
        {"trainer": {"data_collator": DataCollatorForPreference(pad_token_id=0, max_length=MAX_LENGTH)}},
    ),
    "grpo": (
        (GRPOTrainer, GRPOConfig), (StreamGRPOTrainer, StreamGRPOConfig), prompts,
        {
            "mask_truncated_completions": True, "max_completion_length": 2, "num_generations": 2,
            "steps_per_generation": 1, "trainer": {"reward_funcs": [longest]},
        },
    ),
}  # fmt: skip


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", CASES)
def test_weights_are_those_of_trl(kind, tmp_path):
    stock, streamed, data, settings = CASES[kind]
    rows = 2 if kind == "grpo" else 1
    settings = {**settings, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    folder = tmp_path / "model"  # TRL loads the reference model from where the policy came from
    build("qwen3", torch.float64).save_pretrained(folder)
    settings |= {"model": str(folder), "model_init_kwargs": {"dtype": "auto"}}
    log, expected, _ = train(*stock, data(), tmp_path, **settings)
    _, weights, _ = train(*streamed, data(), tmp_path, **STREAM_ARGUMENTS, **settings)
    norms = [step["grad_norm"] for step in log]
    assert 0.0 in norms, norms
    assert all(weight.isfinite().all() for weight in weights.values())
    assert worst_error(weights, expected) <= 1e-9


@pytest.mark.parametrize("upstream", [1.0, 0.0, math.inf, math.nan])
def test_ppo_with_no_completion_token(upstream, tmp_path):
    stock = build("qwen3", torch.float64)
    trainer = make(tmp_path, copy.deepcopy(stock), entropy_coef=0.1, temperature=1.0)
    trainer.current_gradient_accumulation_steps = 1
    inputs = rollouts(trainer)
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    head = copy.deepcopy(trainer.model.value_head)
    (
        reference_loss(stock, inputs, trainer, lambda hidden, ids, mask: head(hidden)[..., 0])
        * upstream
    ).backward()
    expected = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    expected |= {f"value_head.{name}": p.grad for name, p in head.named_parameters()}
    trainer.model.train()
    (trainer._compute_loss(trainer.model, inputs) * upstream).backward()
    our_gradients = {
        name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None
    }
    assert our_gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        finite = gradient.isfinite()
        assert not gradient[finite].any()
        assert torch.equal(our_gradients[name].isfinite(), finite), name
        assert not our_gradients[name][finite].any(), name


def test_without_zeros_of_empty_batches_that_is_red(tmp_path, monkeypatch):
    """Gradients of an empty micro-batch are what is left out where it has no rows."""

    def results(self, *args, real=HeadGradients.results):
        gradients = real(self, *args)
        return (
            gradients
            if self.inputs.labelled
            else tuple(None if x is None else x + torch.nan for x in gradients)
        )

    monkeypatch.setattr(HeadGradients, "results", results)
    with pytest.raises((AssertionError, streambp.StreamBPError)):
        test_weights_are_those_of_trl("sft", tmp_path)
