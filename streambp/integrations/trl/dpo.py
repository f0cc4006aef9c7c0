"""Streamed version of TRL's `DPOTrainer`."""

from __future__ import annotations

import dataclasses

import trl.trainer.dpo_trainer
from trl import DPOConfig, DPOTrainer

from streambp.integrations.trl.settings import StreamArguments
from streambp.integrations.trl.trainer import StreamedTrainer


@dataclasses.dataclass
class StreamDPOConfig(StreamArguments, DPOConfig):  # type: ignore[misc]  # TRL is not typed
    """TRL's `DPOConfig` with further `stream_*` fields, the settings of streambp
    (`StreamArguments`)."""


class StreamDPOTrainer(StreamedTrainer, DPOTrainer):  # type: ignore[misc]  # TRL is not typed
    """TRL's `DPOTrainer`, whose models are patched by streambp and computed chunk by chunk. The
    arguments are TRL's, with `args` a `StreamDPOConfig`."""

    trl_module = trl.trainer.dpo_trainer
