"""StreamPPOTrainer: learns, is exact, and keeps its values through checkpoints.

covers: integrations/trl/ppo.py, integrations/trl/values.py, losses/ppo.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import streambp
from streambp.layer.function import StreamedLayer
from streambp.losses import ppo_loss
from tests.families import VOCABULARY, build
from tests.oracle import lift_float32_casts, worst_error

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import peft
from datasets import Dataset
from transformers import AutoModelForTokenClassification

from streambp.integrations.trl import StreamPPOConfig, StreamPPOTrainer, values
from tests.integrations.test_trl import tokenizer
from tests.seeds import seed_of, seeded

PROMPT_LENGTHS = (5, 9, 14, 20)


def prompts():
    """Two words each: which word to repeat, and one that gives a reward or not whatever is
    answered."""
    return Dataset.from_list(
        [{"prompt": f"w{PROMPT_LENGTHS[i % 4]} w{30 + i % 7}"} for i in range(64)]
    )


def repeats(prompts, completions, **_):
    """The share of a completion's three words that repeat the prompt's first."""
    return [
        sum(word == p.split()[0] for word in c.split()) / 3
        for p, c in zip(prompts, completions, strict=True)
    ]


def luck(prompts, **_):
    return [float(int(prompt.split()[1][1:]) % 2) for prompt in prompts]


def make(folder, model, value_model=None, peft_config=None, **settings):
    arguments = StreamPPOConfig(
        output_dir=str(folder),
        **{
            "max_steps": 4, "per_device_train_batch_size": 32, "num_generations": 2, "steps_per_generation": 2,
            "num_iterations": 2, "learning_rate": 3e-3, "max_completion_length": 3, "report_to": [], "use_cpu": True,
            "bf16": False, "disable_tqdm": True, "logging_steps": 20, "save_strategy": "no", "value_coef": 0.5,
            "lr_scheduler_type": "constant", "seed": seed_of(42), "kl_coef": 0.01, "stream_chunk_size": "2", **settings,
        },
    )  # fmt: skip
    return StreamPPOTrainer(
        model=model, args=arguments, train_dataset=prompts(), processing_class=tokenizer(),
        reward_funcs=[repeats, luck], value_model=value_model, peft_config=peft_config,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.full
def test_learns_what_the_prompt_asks_for(seed, tmp_path, attended_chunks):
    trainer = make(tmp_path, build("qwen3", seed=seed), max_steps=320, seed=seed_of(seed))
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [entry["rewards/repeats/mean"] for entry in log]
    explained = [entry["explained_variance"] for entry in log]
    print(
        "reward",
        [f"{r:.2f}" for r in rewards],
        "explained variance",
        [f"{e:.2f}" for e in explained],
    )
    assert attended_chunks
    assert rewards[0] <= 0.2
    assert sorted(rewards[-8:])[4] >= 0.9  # the policy may slip once it has learnt
    assert explained[0] < max(explained[-3:])
    assert max(explained[-3:]) >= 0.6


def rollouts(trainer):
    generator = seeded(0)
    draw = lambda: torch.randn(4, 5, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = torch.ones(4, 5, dtype=torch.long)
    mask[1, 3:] = mask[2, 1:] = 0
    return {
        "prompt_ids": torch.randint(3, VOCABULARY, (4, 6), generator=generator),
        "prompt_mask": torch.ones(4, 6, dtype=torch.long),
        "completion_ids": torch.randint(3, VOCABULARY, (4, 5), generator=generator),
        "completion_mask": mask,
        "old_per_token_logps": -4 + 0.3 * draw(), "advantages": draw(), "old_values": draw(), "returns": draw(),
    }  # fmt: skip


def reference_loss(model, inputs, trainer, values_of):
    """From full logits, with the policy's and the value's losses on one graph."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    output = model(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
    log_p = output.logits[:, :-1].log_softmax(-1)
    token_log_probs = log_p.gather(-1, ids[:, 1:, None])[..., 0][:, -5:]
    entropy = -(log_p.exp() * log_p).sum(-1)[:, -5:]
    values = values_of(output.hidden_states[-1], ids, mask)[:, :-1][:, -5:]
    return ppo_loss(
        token_log_probs, inputs["old_per_token_logps"], inputs["advantages"], inputs["completion_mask"].bool(), values,
        inputs["old_values"], inputs["returns"], entropy=entropy, entropy_coef=0.1, value_coef=0.5,
    ).loss  # fmt: skip


@pytest.mark.parametrize("separate", [False, True], ids=["value head", "value model"])
def test_gradients_and_one_backward(separate, tmp_path, monkeypatch):
    lift_float32_casts(monkeypatch)
    value_model = None
    if separate:
        config = copy.deepcopy(build("qwen3").config)
        config.num_labels, config.classifier_dropout = 1, 0.0
        value_model = AutoModelForTokenClassification.from_config(config).double()
    stock = build("qwen3", torch.float64)
    trainer = make(
        tmp_path,
        copy.deepcopy(stock),
        copy.deepcopy(value_model),
        entropy_coef=0.1,
        temperature=1.0,
    )
    trainer.current_gradient_accumulation_steps = 1
    inputs = rollouts(trainer)
    if separate:

        def values_of(hidden, ids, mask):
            return value_model(input_ids=ids, attention_mask=mask).logits[..., 0]

        extra = {f"value_model.{name}": p for name, p in value_model.named_parameters()}
    else:
        head = copy.deepcopy(trainer.model.value_head)
        values_of = lambda hidden, ids, mask: head(hidden)[..., 0]  # noqa: E731
        extra = {f"value_head.{name}": p for name, p in head.named_parameters()}
    reference_loss(stock, inputs, trainer, values_of).backward()
    expected = {
        name: p.grad
        for name, p in {**dict(stock.named_parameters()), **extra}.items()
        if p.grad is not None
    }
    calls = []
    real = StreamedLayer.backward
    monkeypatch.setattr(
        StreamedLayer, "backward", staticmethod(lambda ctx, *g: calls.append(ctx) or real(ctx, *g))
    )
    trainer.model.train()
    trainer._compute_loss(trainer.model, inputs).backward()
    our_gradients = {
        name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None
    }
    assert worst_error(our_gradients, expected) <= 1e-9
    layers = len(stock.model.layers)
    assert len(calls) == (2 * layers if separate else layers)


def test_a_mutant_whose_values_do_not_reach_the_backbone_turns_that_red(tmp_path, monkeypatch):
    real = values.blockwise_values
    monkeypatch.setattr(
        values, "blockwise_values", lambda hidden, norm, head: real(hidden.detach(), norm, head)
    )
    with pytest.raises(AssertionError):
        test_gradients_and_one_backward(False, tmp_path, monkeypatch)


@pytest.mark.full
def test_checkpoints_hold_policy_and_values_apart(tmp_path):
    steered = {"kl_target": 1.0, "kl_horizon": 320}
    trainer = make(
        tmp_path, build("qwen3"), save_strategy="steps", save_steps=2, max_steps=4, **steered
    )
    trainer.train()
    trained_weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    loaded = type(trainer.model).from_pretrained(tmp_path / "checkpoint-4")
    assert torch.equal(loaded.lm_head.weight, trained_weights["lm_head.weight"])
    resumed_trainer = make(
        tmp_path, build("qwen3", seed=5), save_strategy="steps", save_steps=2, max_steps=4
    )
    resumed_trainer._load_from_checkpoint(str(tmp_path / "checkpoint-4"))
    for name, p in resumed_trainer.model.named_parameters():
        assert torch.equal(p, trained_weights[name]), name
    assert resumed_trainer.kl_coef == trainer.kl_coef != trainer.args.kl_coef
    config = copy.deepcopy(build("qwen3").config)
    config.num_labels = 1
    other_trainer = make(
        tmp_path, build("qwen3"), AutoModelForTokenClassification.from_config(config)
    )
    with pytest.raises(streambp.StreamBPError, match="value head or value_model"):
        other_trainer._load_from_checkpoint(str(tmp_path / "checkpoint-4"))


@pytest.mark.full
def test_lora_policy(tmp_path):
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make(tmp_path, build("qwen3"), peft_config=lora)
    weights_before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    changed_names = {
        name
        for name, p in trainer.model.named_parameters()
        if not torch.equal(p, weights_before[name])
    }
    assert any("lora" in name for name in changed_names)
    assert any("value_head" in name for name in changed_names)
    assert all("lora" in name or "value_head" in name for name in changed_names)


def test_kl_coefficient_is_steered_to_its_target(tmp_path):
    trainer = make(tmp_path, build("qwen3"), kl_target=2.0, kl_horizon=10)
    trainer.model.train()
    for divergence, factor in ((8.0, 1.08), (2.0, 1.0), (0.0, 0.92)):
        coefficient = trainer.kl_coef
        trainer._steer(torch.full((4,), divergence))
        assert trainer.kl_coef == pytest.approx(coefficient * factor)


def test_reward_lands_on_the_last_token_and_kl_on_every_one(tmp_path):
    trainer = make(tmp_path, build("qwen3"), kl_coef=0.5)
    trainer.reward_weights = torch.tensor([1.0, 2.0])
    trainer._rewards = torch.tensor([[1.0, 0.5], [float("nan"), 1.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, 7.0, 7.0]])
    output = {"ref_per_token_logps": torch.tensor([[-1.5, -2.0, -2.0], [-3.0, 0.0, 0.0]])}
    token_rewards = trainer._token_rewards(output, log_probs, mask)
    expected = torch.tensor([[-0.25, 0.0, 2.0 + 0.5], [2.0 - 1.0, 0.0, 0.0]])
    torch.testing.assert_close(token_rewards, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_type", "bnpo"),
        ("delta", 1.5),
        ("importance_sampling_level", "sequence"),
        ("beta", 0.3),
    ],
)
def test_settings_of_grpos_loss_are_refused(name, value):
    with pytest.raises(streambp.StreamBPError, match=f"{name} is set"):
        StreamPPOConfig(output_dir="x", bf16=False, **{name: value})
    assert StreamPPOConfig(output_dir="x", bf16=False, kl_coef=0.2, beta=0.2).kl_coef == 0.2


def test_another_config_is_refused(tmp_path):
    with pytest.raises(streambp.StreamBPError, match="needs a StreamPPOConfig"):
        StreamPPOTrainer(
            model=build("qwen3"),
            reward_funcs=[repeats],
            args=nn.Identity(),
            train_dataset=prompts(),
        )
