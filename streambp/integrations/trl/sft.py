"""`StreamSFTTrainer`."""

from __future__ import annotations

import dataclasses

import trl.trainer.sft_trainer
from trl import SFTConfig, SFTTrainer

from streambp.integrations.trl.settings import StreamArguments
from streambp.integrations.trl.trainer import StreamedTrainer


@dataclasses.dataclass
class StreamSFTConfig(StreamArguments, SFTConfig):  # type: ignore[misc]  # TRL is not typed
    """TRL's `SFTConfig` with `stream_*` fields."""


class StreamSFTTrainer(StreamedTrainer, SFTTrainer):  # type: ignore[misc]  # TRL is not typed
    """TRL's `SFTTrainer` on streamed models: the same arguments, with `args` a `StreamSFTConfig`."""

    trl_module = trl.trainer.sft_trainer
    splits_sequences = True
