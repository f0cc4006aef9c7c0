"""The objectives of the examples against TRL's own, on the log-probabilities of the same model.

covers: losses/masked.py
"""

from __future__ import annotations

import pytest
import torch

from examples.objectives import (
    DPO_LOSSES,
    F_DIVERGENCES,
    GRPO_LOSSES,
    SMOOTHED,
    dpo_loss,
    grpo_loss,
)
from tests.families import build

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from tests.integrations.test_trl import pairs, prompts, reward, tokenizer
from tests.seeds import seeded

SETTINGS = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
}


def scores(model, input_ids, attention_mask, labels):
    logits = (
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        .logits[:, :-1]
        .float()
    )
    return logits.log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]


@pytest.fixture(scope="module")
def dpo(tmp_path_factory):
    arguments = DPOConfig(output_dir=str(tmp_path_factory.mktemp("dpo")), **SETTINGS)
    trainer = DPOTrainer(
        model=build("qwen3"), ref_model=build("qwen3", seed=7), args=arguments, train_dataset=pairs(),
        processing_class=tokenizer(),
    )  # fmt: skip
    trainer.label_smoothing = 0.1
    return trainer, next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
@pytest.mark.parametrize("loss_type", DPO_LOSSES)
def test_dpo(dpo, loss_type, divergence):
    trainer, batch = dpo
    trainer.loss_types, trainer.loss_weights = [loss_type], [1.0]
    trainer.f_divergence_type, trainer.beta = divergence, 0.3
    expected = trainer.compute_loss(trainer.model, dict(batch))
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    values = [
        scores(m, batch["input_ids"], batch["attention_mask"], labels)
        for m in (trainer.model, trainer.ref_model)
    ]
    loss = dpo_loss(
        values[0], values[1].detach(), labels[:, 1:] != -100, beta=0.3, loss_type=loss_type, f_divergence=divergence,
        alpha=trainer.f_alpha_divergence_coef, tau=trainer.args.discopop_tau,
        label_smoothing=0.1 if loss_type in SMOOTHED else 0.0,
    )  # fmt: skip
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    arguments = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("grpo")),
        num_generations=4,
        max_completion_length=7,
        temperature=1.0,
        **SETTINGS,
    )
    trainer = GRPOTrainer(
        model=build("qwen3"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=prompts(),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    generator = seeded(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    completion_mask = torch.ones(4, 7, dtype=torch.long)
    completion_mask[1, 5:] = completion_mask[2, 1:] = 0
    batch = {
        "prompt_ids": torch.randint(3, 50, (4, 5), generator=generator),
        "prompt_mask": torch.ones(4, 5, dtype=torch.long),
        "completion_ids": torch.randint(3, 50, (4, 7), generator=generator),
        "completion_mask": completion_mask,
        "advantages": draw(4),
        "num_items_in_batch": torch.tensor(15.0),
    }
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    values = scores(trainer.model, ids, torch.cat([batch["prompt_mask"], completion_mask], 1), ids)[
        :, -7:
    ]
    batch["old_per_token_logps"] = values.detach() + 0.3 * draw(4, 7)
    batch["ref_per_token_logps"] = values.detach() + 0.3 * draw(4, 7)
    return trainer, batch, values


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 1.1])
@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_grpo(grpo, loss_type, delta, level):
    trainer, batch, values = grpo
    trainer.loss_type, trainer.importance_sampling_level, trainer.args.delta = (
        loss_type,
        level,
        delta,
    )
    trainer.beta, trainer.epsilon_low, trainer.epsilon_high = 0.05, 0.2, 0.28
    trainer.args.steps_per_generation = 1
    trainer.args.use_bias_correction_kl = weighted_kl = delta is None
    expected = trainer._compute_loss(trainer.model, dict(batch))
    loss = grpo_loss(
        values, batch["advantages"], batch["completion_mask"].bool(), old_log_probs=batch["old_per_token_logps"],
        ref_log_probs=batch["ref_per_token_logps"], loss_type=loss_type, beta=0.05, weighted_kl=weighted_kl,
        epsilon_low=0.2, epsilon_high=0.28, delta=delta, level=level, max_completion_length=7, num_items=15,
        temperatures=(trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg),
    )  # fmt: skip
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
