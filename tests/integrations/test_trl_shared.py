"""TRL's trainers with packed rows against TRL's own, ten steps, with the tokens that are computed
counted by hand.

covers: launch/groups.py, launch/process.py, integrations/trl/trainer.py, integrations/trl/grpo.py,
integrations/trl/dpo.py
"""

from __future__ import annotations

import pytest
import torch

import streambp
from streambp.integrations.trl import keep_groups
from streambp.launch import groups, process
from streambp.prefixes import calls
from streambp.prefixes.tree import PrefixTree, find_tree
from tests.oracle import worst_error
from tests.prefixes.batches import counted
from tests.seeds import seed_torch, seeded

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import peft
import trl.trainer.grpo_trainer
from datasets import Dataset
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from streambp.integrations.trl import (
    StreamDPOConfig,
    StreamDPOTrainer,
    StreamGRPOConfig,
    StreamGRPOTrainer,
    StreamSFTConfig,
    StreamSFTTrainer,
)
from tests.families import build
from tests.integrations import test_ppo
from tests.integrations.test_trl import (  # noqa: F401  # the fixtures
    LORA,
    STREAM_ARGUMENTS,
    checkpoint,
    exact_stock_head,
    pairs,
    prompts,
    reward,
    texts,
    train,
    words,
)

STEPS = [4, pytest.param(10, marks=pytest.mark.full)]
SHARED_ROWS_ARGUMENTS = {**STREAM_ARGUMENTS, "stream_rows": "packed"}
GRPO = {
    "num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3,
    "max_completion_length": 5, "temperature": 0.9, "beta": 0.05,
}  # fmt: skip


@pytest.fixture(autouse=True)
def computed(monkeypatch):
    """(tokens of the rows, different ones, tokens that were computed) of every call of a backbone
    that may share."""
    counts = []

    def find(ids, mask=None, *args, **kwargs):
        tree = find_tree(ids, mask, *args, **{**kwargs, "min_prefix": 1, "min_savings": 0.0})
        rows, different = counted(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}
        )
        counts.append((rows, different, tree.tokens if isinstance(tree, PrefixTree) else rows))
        return tree

    monkeypatch.setattr(calls, "find_tree", find)
    return counts


@pytest.fixture
def savings(monkeypatch):
    """(of TRL's micro-batches, and of ours with the same rows) the tokens of all rows over those
    that differ in one."""
    shares = []

    def saving(batches):
        full_batches = [
            {
                "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
                "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
            }
            for batch in batches
        ]
        tokens, different = (sum(part) for part in zip(*map(counted, full_batches), strict=True))
        return tokens / different

    def group_batches(batches):
        ours = real(batches)
        shares.append((saving(batches), saving(ours)))
        return ours

    real = groups.group_batches
    monkeypatch.setattr(groups, "group_batches", group_batches)
    return shares


def compare(expected, streamed, keys=("loss", "reward", "rewards/margins")):
    """Losses of every step, and the weights after the last. Metrics that are means over
    micro-batches are left out."""
    (expected_log, expected_weights, _), (log, weights, _) = expected, streamed
    assert len(log) == len(expected_log)
    for key in keys:
        ours, theirs = (
            [entry[key] for entry in entries if key in entry] for entries in (log, expected_log)
        )
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7), key
    assert worst_error(weights, expected_weights) <= 1e-9
    # of SGD at 0.1: every step moved them
    assert min(entry["grad_norm"] for entry in expected_log) > 1e-2


def as_counted(computed):
    """Every different token was computed once; what that saves."""
    assert computed
    assert all(computed_tokens == different for _, different, computed_tokens in computed)
    return sum(rows for rows, _, _ in computed) / sum(
        computed_tokens for _, _, computed_tokens in computed
    )


@pytest.mark.full
@pytest.mark.parametrize("rows", ["auto", "packed"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_sft_computes_no_padding(accumulation, rows, tmp_path, computed):
    """Rows of 5 to 29 tokens, four in a micro-batch: what they have in common at their beginning is
    chance."""
    settings = {"max_length": 32, "max_steps": 10, "per_device_train_batch_size": 4}
    settings["gradient_accumulation_steps"] = accumulation
    expected = train(SFTTrainer, SFTConfig, texts(), tmp_path, **settings)
    assert not computed
    streamed = train(
        StreamSFTTrainer,
        StreamSFTConfig,
        texts(),
        tmp_path,
        **settings,
        **STREAM_ARGUMENTS,
        stream_rows=rows,
    )
    compare(expected, streamed, ("loss", "entropy", "mean_token_accuracy", "num_tokens"))
    assert len(computed) == 10 * accumulation
    as_counted(computed)


@pytest.mark.full
def test_by_default_no_trainer_computes_padding(tmp_path, computed, savings, checkpoint):  # noqa: F811
    """DPO and GRPO with their rows as TRL cuts them; what these share is computed once, too."""
    for theirs, ours, data, kind_settings in (
        ((DPOTrainer, DPOConfig), (StreamDPOTrainer, StreamDPOConfig), pairs(), {}),
        (
            (GRPOTrainer, GRPOConfig),
            (StreamGRPOTrainer, StreamGRPOConfig),
            prompts(),
            {**GRPO, "trainer": {"reward_funcs": reward}},
        ),
    ):
        settings = {**checkpoint, "max_steps": 10, **kind_settings}
        computed.clear()
        compare(
            train(*theirs, data, tmp_path, **settings),
            train(*ours, data, tmp_path, **settings, **STREAM_ARGUMENTS),
        )
        assert as_counted(computed) > 1.1
    assert not savings


@pytest.mark.full
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    "lora", [False, pytest.param(True, marks=pytest.mark.full)], ids=["full", "peft"]
)
def test_dpo_shares_its_prompts(lora, steps, tmp_path, computed, checkpoint):  # noqa: F811
    def run(trainer_class, config_class, **settings):
        seed_torch(0)
        trainer, model = (
            ({"peft_config": peft.LoraConfig(**LORA)}, {}) if lora else ({}, checkpoint)
        )
        settings |= {**model, "max_steps": steps}
        return train(trainer_class, config_class, pairs(), tmp_path, trainer=trainer, **settings)

    expected = run(DPOTrainer, DPOConfig)
    assert not computed
    streamed = run(StreamDPOTrainer, StreamDPOConfig, **SHARED_ROWS_ARGUMENTS)
    compare(expected, streamed)
    assert len(computed) == 2 * 2 * steps  # policy and reference, two micro-batches a step
    assert as_counted(computed) > 1.15


@pytest.mark.parametrize("steps", STEPS)
def test_grpo_keeps_groups_together(steps, tmp_path, computed, savings, checkpoint):  # noqa: F811
    """An optimizer step has the rows that it has by TRL's own shuffle; its micro-batches are three
    prompts' four rows."""
    settings = {**GRPO, **checkpoint, "trainer": {"reward_funcs": reward}, "max_steps": steps}
    expected = train(GRPOTrainer, GRPOConfig, prompts(), tmp_path, **settings)
    streamed = train(
        StreamGRPOTrainer,
        StreamGRPOConfig,
        prompts(),
        tmp_path,
        **settings,
        **SHARED_ROWS_ARGUMENTS,
    )
    compare(expected, streamed)
    assert len(savings) == steps
    theirs, ours = (sum(saved) / len(savings) for saved in zip(*savings, strict=True))
    print(f"GRPO: rows / tree {ours:.2f}, as TRL shuffles {theirs:.2f}")
    assert as_counted(computed) > 1.5
    assert ours > 1.5 > 1.35 > theirs


@pytest.mark.full
def test_grpo_of_several_steps_each_with_whole_groups(tmp_path, computed, checkpoint, monkeypatch):  # noqa: F811
    """Two optimizer steps of a generation batch: TRL's trainer with a shuffle that knows its groups
    by their numbers."""

    def shuffled(rows):
        order = torch.randperm(len(rows["prompt_ids"])).tolist()
        groups_of = list(dict.fromkeys(row // GRPO["num_generations"] for row in order))
        order.sort(key=lambda row: groups_of.index(row // GRPO["num_generations"]))
        return {
            name: value[order] if torch.is_tensor(value) and value.dim() else value
            for name, value in rows.items()
        }

    step_settings = {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "max_steps": 10,
    }
    settings = {**GRPO, **checkpoint, **step_settings, "trainer": {"reward_funcs": reward}}
    with monkeypatch.context() as patched:
        patched.setattr(trl.trainer.grpo_trainer, "shuffle_sequence_dict", shuffled)
        expected = train(GRPOTrainer, GRPOConfig, prompts(), tmp_path, **settings)
    streamed = train(
        StreamGRPOTrainer,
        StreamGRPOConfig,
        prompts(),
        tmp_path,
        **settings,
        **SHARED_ROWS_ARGUMENTS,
    )
    compare(expected, streamed)
    assert as_counted(computed) > 1.5


class LaunchedRLOO(RLOOTrainer):
    """As `streambp launch` has it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        launched = process.LaunchedProcess(
            streambp.StreamConfig(chunk_size=5, rows="packed", lazy_logits=True)
        )
        launched.patch_trainer(self)


@pytest.mark.full
def test_launched_rloo_keeps_groups_together(tmp_path, computed, savings, checkpoint, monkeypatch):  # noqa: F811
    monkeypatch.setattr(process.atexit, "register", lambda function, **kwargs: None)
    settings = {**GRPO, **checkpoint, "trainer": {"reward_funcs": reward}, "max_steps": 10}
    expected = train(RLOOTrainer, RLOOConfig, prompts(), tmp_path, **settings)
    compare(expected, train(LaunchedRLOO, RLOOConfig, prompts(), tmp_path, **settings))
    assert as_counted(computed) > 1.5
    theirs, ours = (sum(saved) / len(savings) for saved in zip(*savings, strict=True))
    assert ours > 1.5 > theirs


@pytest.mark.full
def test_kto_shares_what_is_in_a_batch(tmp_path, computed, checkpoint):  # noqa: F811
    """Rows of a prompt are wherever the sampler puts them; mismatched completions follow prompts of
    the same batch."""
    generator = seeded(0)
    prompts_of_words = [words(generator, 6, 9) for _ in range(2)]
    rows = [
        {
            "prompt": prompts_of_words[i % 2],
            "completion": " " + words(generator, 2, 6),
            "label": i % 3 == 0,
        }
        for i in range(24)
    ]
    data, settings = (
        Dataset.from_list(rows),
        {**checkpoint, "max_steps": 10, "per_device_train_batch_size": 4},
    )
    expected = train(KTOTrainer, KTOConfig, data, tmp_path, **settings)
    streamed = train(
        KTOTrainer,
        KTOConfig,
        data,
        tmp_path,
        **settings,
        patch_with=streambp.StreamConfig(5, rows="packed"),
    )
    compare(expected, streamed)
    assert as_counted(computed) > 1.3


@pytest.mark.full
def test_trainers_that_keep_no_groups(tmp_path, savings, checkpoint):  # noqa: F811
    """Sharing is off: TRL's micro-batches. It is on, but the model is TRL's: those too, until
    `keep_groups`."""
    settings = {**GRPO, **checkpoint, "trainer": {"reward_funcs": reward}, "max_steps": 1}
    train(StreamGRPOTrainer, StreamGRPOConfig, prompts(), tmp_path, **settings, **STREAM_ARGUMENTS)
    assert not savings
    created_trainer = train(
        GRPOTrainer,
        GRPOConfig,
        prompts(),
        tmp_path,
        **settings,
        patch_with=streambp.StreamConfig(5, rows="packed"),
    )[2]
    assert not savings
    created_trainer._buffered_inputs = None
    keep_groups(created_trainer)
    keep_groups(created_trainer)
    created_trainer.args.max_steps = 2
    created_trainer.train()
    assert savings


@pytest.mark.full
def test_ppo_shares_its_prompts(tmp_path, computed, savings):
    """Against our own trainer with rows: TRL has none. A minibatch is a rollout of eight prompts,
    four rows each."""
    settings = {
        "num_generations": 4,
        "steps_per_generation": 1,
        "max_steps": 3,
        "learning_rate": 0.1,
        "optim": "sgd",
    }

    def run(**row_settings):
        trainer = test_ppo.make(tmp_path, build("qwen3", torch.float64), **settings, **row_settings)
        trainer.train()
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    expected = run(stream_rows="as_given")
    assert not computed
    our_weights = run(stream_rows="packed")
    assert savings
    assert worst_error(our_weights, expected) <= 1e-9
    assert as_counted(computed) > 1.3
