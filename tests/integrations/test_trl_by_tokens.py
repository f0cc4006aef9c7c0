"""StreamSFTTrainer with batches by tokens, against TRL's own trainer with the same batches.

covers: integrations/trl/sft.py
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import streambp
from streambp.errors import ConfigError
from streambp.integrations import TokenBatchSampler
from tests.families import build
from tests.oracle import relative_l2, worst_error
from tests.versions import TRAINER_DIVIDES_TWICE

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from datasets import IterableDataset
from trl import SFTConfig, SFTTrainer

from streambp.integrations.trl import StreamSFTConfig, StreamSFTTrainer
from tests.integrations.test_trl import STREAM_ARGUMENTS, exact_stock_head, texts, train  # noqa: F401  # a fixture

TOKENS = 48
MICRO_BATCHES = 1000  # more than the data set has


class BySameTokens(SFTTrainer):
    """TRL's trainer with these batches, which nothing of ours computes."""

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        lengths = [len(ids) for ids in loader.dataset["input_ids"]]
        sampler = TokenBatchSampler(lengths, TOKENS, seed=self.args.seed)
        return DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn)


@pytest.fixture
def steps_seen(monkeypatch):
    """Real tokens and rows of every micro-batch that trains."""
    batch_sizes, training_step = [], SFTTrainer.training_step

    def step(self, model, inputs, num_items_in_batch=None):
        mask = (
            inputs["attention_mask"]
            if "attention_mask" in inputs
            else torch.ones_like(inputs["input_ids"])
        )
        batch_sizes.append((int(mask.sum()), len(mask)))
        return training_step(self, model, inputs, num_items_in_batch)

    monkeypatch.setattr(SFTTrainer, "training_step", step)
    return batch_sizes


def test_sft_by_tokens(tmp_path, steps_seen):
    _, expected, _ = train(BySameTokens, SFTConfig, texts(), tmp_path, max_length=32)
    theirs = list(steps_seen)
    steps_seen.clear()
    _, weights, created_trainer = train(
        StreamSFTTrainer,
        StreamSFTConfig,
        texts(),
        tmp_path,
        max_length=32,
        stream_batch_tokens=TOKENS,
        **STREAM_ARGUMENTS,
    )
    assert steps_seen == theirs
    assert all(tokens <= TOKENS for tokens, _ in steps_seen)
    assert len({rows for _, rows in steps_seen}) > 1
    assert worst_error(weights, expected) <= 1e-9
    assert created_trainer.accelerator.even_batches  # for the loaders that come after


@pytest.mark.full
def test_training_goes_on_where_it_was_left(tmp_path, steps_seen):
    """In the middle of the second epoch, which has another order than the first."""
    settings = {
        "max_length": 32,
        "stream_batch_tokens": TOKENS,
        "max_steps": 14,
        "gradient_accumulation_steps": 1,
    }
    settings |= {"save_strategy": "steps", "save_steps": 12}
    _, expected, created_trainer = train(
        StreamSFTTrainer, StreamSFTConfig, texts(), tmp_path, **settings, **STREAM_ARGUMENTS
    )
    epoch = len(created_trainer.get_train_dataloader())
    assert epoch < 12 < 14 <= 2 * epoch
    assert steps_seen[: 14 - epoch] != steps_seen[epoch:]
    later_batches = steps_seen[12:]
    steps_seen.clear()
    created_trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert steps_seen == later_batches
    assert worst_error(dict(created_trainer.model.named_parameters()), expected) <= 1e-9


def test_the_loss_counts_each_label_of_a_step_alike(tmp_path, steps_seen):
    """One step over the whole data set, in micro-batches of unlike sizes, is that of a single batch
    of all rows.

    Where TRL's own trainer divides it by the number of micro-batches, so does ours.
    """
    data, model = texts(), build("qwen3", torch.float64)
    weights_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    common = {"max_length": 32, "max_steps": 1, "num_train_epochs": 1}
    _, single_batch, _ = train(
        SFTTrainer,
        SFTConfig,
        data,
        tmp_path,
        per_device_train_batch_size=len(data),
        gradient_accumulation_steps=1,
        **common,
    )
    steps_seen.clear()
    _, by_tokens, _ = train(
        StreamSFTTrainer, StreamSFTConfig, data, tmp_path, model=model, stream_batch_tokens=TOKENS,
        gradient_accumulation_steps=MICRO_BATCHES, **common, **STREAM_ARGUMENTS,
    )  # fmt: skip
    assert sum(rows for _, rows in steps_seen) == len(data)
    assert len(steps_seen) > 4
    weight_changes, expected = (
        {name: of[name] - start for name, start in weights_before.items()}
        for of in (by_tokens, single_batch)
    )
    if TRAINER_DIVIDES_TWICE:
        expected = {name: step / MICRO_BATCHES for name, step in expected.items()}
    assert relative_l2(weight_changes, expected) <= 1e-9


def test_a_model_that_computes_padding_is_refused(tmp_path):
    config = streambp.StreamConfig(rows="as_given")
    # before the trainer, whose settings it does not take
    ours = streambp.patch(build("qwen3", torch.float64), config)
    with pytest.raises(ConfigError, match="leave rows out of StreamConfig"):
        train(
            StreamSFTTrainer,
            StreamSFTConfig,
            texts(),
            tmp_path,
            model=ours,
            max_length=32,
            stream_batch_tokens=TOKENS,
        )


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (texts, {"stream_rows": "as_given"}, 'rows="as_given", which computes padding'),
        (
            lambda: IterableDataset.from_generator(lambda: iter(texts())),
            {},
            "needs the length of every row",
        ),
        (texts, {"max_length": None, "stream_batch_tokens": 8}, "truncate rows"),
    ],
)
def test_data_that_cannot_be_counted_is_refused(data, settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train(
            StreamSFTTrainer, StreamSFTConfig, data(), tmp_path,
            **{"max_length": 32, "stream_batch_tokens": TOKENS, **STREAM_ARGUMENTS, **settings},
        )  # fmt: skip
