"""Streamed version of TRL's `SFTTrainer`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.utils.data
import trl.trainer.sft_trainer
from trl import SFTConfig, SFTTrainer

from streambp.errors import ConfigError
from streambp.integrations.token_batches import TokenBatchSampler
from streambp.integrations.trl.settings import StreamArguments
from streambp.integrations.trl.trainer import StreamedTrainer
from streambp.model.installed_patch import find_patch


@dataclasses.dataclass
class StreamSFTConfig(StreamArguments, SFTConfig):  # type: ignore[misc]  # TRL is not typed
    """TRL's `SFTConfig` with further `stream_*` fields, the settings of streambp
    (`StreamArguments`).

    Args:
        stream_batch_tokens: maximum number of tokens in a micro-batch; replaces
            `per_device_train_batch_size`. The loss remains a mean over all labels of a step,
            because Trainer counts the labels of its micro-batches (`num_items_in_batch`).
    """

    stream_batch_tokens: int | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Tokens of a micro-batch at most, in place of per_device_train_batch_size rows."
        },
    )


class StreamSFTTrainer(StreamedTrainer, SFTTrainer):  # type: ignore[misc]  # TRL is not typed
    """TRL's `SFTTrainer`, whose models are patched by streambp and computed chunk by chunk. The
    arguments are TRL's, with `args` a `StreamSFTConfig`."""

    trl_module = trl.trainer.sft_trainer
    splits_sequences = True

    def get_train_dataloader(self) -> Any:
        """Return TRL's dataloader. If `stream_batch_tokens` is set, its batches have at most this
        number of tokens, instead of a fixed number of rows.

        Raises:
            ConfigError: the model has rows="as_given" and would compute padding, the rows' lengths
                are unknown, or a row is too long.
        """
        loader = super().get_train_dataloader()
        tokens = getattr(self.args, "stream_batch_tokens", None)  # args may be TRL's own
        if tokens is None:
            return loader
        by_tokens = torch.utils.data.DataLoader(
            loader.dataset,
            batch_sampler=TokenBatchSampler(
                self._lengths(loader.dataset),
                tokens,
                num_replicas=self.accelerator.num_processes,
                seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            ),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            persistent_workers=loader.persistent_workers,
            prefetch_factor=loader.prefetch_factor,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )
        settings = self.accelerator.dataloader_config
        # The sampler's batches are even already; accelerate requires this flag to be False.
        even = settings.even_batches
        settings.even_batches = False
        try:
            return self.accelerator.prepare(by_tokens)
        finally:
            settings.even_batches = even

    def _lengths(self, dataset: Any) -> list[int]:
        """Return the number of tokens of each row of the data set, by which `TokenBatchSampler`
        fills batches."""
        patched = find_patch(self.model)  # an earlier patch may have other settings
        if patched is not None and patched[1].config.rows == "as_given":
            raise ConfigError(
                "stream_batch_tokens counts tokens without padding, and this model has "
                'rows="as_given", which computes padding too. A batch of one long row and many '
                'short rows would then cost many times its tokens. Set stream_rows="packed", or '
                "leave rows out of StreamConfig if you patch the model yourself."
            )
        columns = getattr(dataset, "column_names", None) or ()
        if isinstance(dataset, torch.utils.data.IterableDataset) or "input_ids" not in columns:
            raise ConfigError(
                "stream_batch_tokens needs the length of every row before training, and "
                f"{type(dataset).__name__} has no column input_ids to tell it. Tokenize the data "
                "set before, or leave stream_batch_tokens out."
            )
        return [len(ids) for ids in dataset["input_ids"]]
