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
from tests.integrations.test_trl import STREAMED, exact_stock_head, texts, train  # noqa: F401  # a fixture

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
def seen(monkeypatch):
    """Real tokens and rows of every micro-batch that trains."""
    found, own = [], SFTTrainer.training_step

    def step(self, model, inputs, num_items_in_batch=None):
        mask = (
            inputs["attention_mask"]
            if "attention_mask" in inputs
            else torch.ones_like(inputs["input_ids"])
        )
        found.append((int(mask.sum()), len(mask)))
        return own(self, model, inputs, num_items_in_batch)

    monkeypatch.setattr(SFTTrainer, "training_step", step)
    return found


def test_sft_by_tokens(tmp_path, seen):
    _, expected, _ = train(BySameTokens, SFTConfig, texts(), tmp_path, max_length=32)
    theirs = list(seen)
    seen.clear()
    _, found, made = train(
        StreamSFTTrainer,
        StreamSFTConfig,
        texts(),
        tmp_path,
        max_length=32,
        stream_batch_tokens=TOKENS,
        **STREAMED,
    )
    assert seen == theirs
    assert all(tokens <= TOKENS for tokens, _ in seen)
    assert len({rows for _, rows in seen}) > 1
    assert worst_error(found, expected) <= 1e-9
    assert made.accelerator.even_batches  # for the loaders that come after


def test_training_goes_on_where_it_was_left(tmp_path, seen):
    """In the middle of the second epoch, which has another order than the first."""
    settings = {
        "max_length": 32,
        "stream_batch_tokens": TOKENS,
        "max_steps": 14,
        "gradient_accumulation_steps": 1,
    }
    settings |= {"save_strategy": "steps", "save_steps": 12}
    _, expected, made = train(
        StreamSFTTrainer, StreamSFTConfig, texts(), tmp_path, **settings, **STREAMED
    )
    epoch = len(made.get_train_dataloader())
    assert epoch < 12 < 14 <= 2 * epoch
    assert seen[: 14 - epoch] != seen[epoch:]
    left = seen[12:]
    seen.clear()
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert seen == left
    assert worst_error(dict(made.model.named_parameters()), expected) <= 1e-9


def test_the_loss_counts_each_label_of_a_step_alike(tmp_path, seen):
    """One step over the whole data set, in micro-batches of unlike sizes, is that of a single batch
    of all rows.

    Where TRL's own trainer divides it by the number of micro-batches, so does ours.
    """
    data, model = texts(), build("qwen3", torch.float64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    common = {"max_length": 32, "max_steps": 1, "num_train_epochs": 1}
    _, whole, _ = train(
        SFTTrainer,
        SFTConfig,
        data,
        tmp_path,
        per_device_train_batch_size=len(data),
        gradient_accumulation_steps=1,
        **common,
    )
    seen.clear()
    _, found, _ = train(
        StreamSFTTrainer, StreamSFTConfig, data, tmp_path, model=model, stream_batch_tokens=TOKENS,
        gradient_accumulation_steps=MICRO_BATCHES, **common, **STREAMED,
    )  # fmt: skip
    assert sum(rows for _, rows in seen) == len(data)
    assert len(seen) > 4
    moved, expected = (
        {name: of[name] - start for name, start in before.items()} for of in (found, whole)
    )
    if TRAINER_DIVIDES_TWICE:
        expected = {name: step / MICRO_BATCHES for name, step in expected.items()}
    assert relative_l2(moved, expected) <= 1e-9


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
    ("data", "settings", "said"),
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
def test_data_that_cannot_be_counted_is_refused(data, settings, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        train(
            StreamSFTTrainer, StreamSFTConfig, data(), tmp_path,
            **{"max_length": 32, "stream_batch_tokens": TOKENS, **STREAMED, **settings},
        )  # fmt: skip
