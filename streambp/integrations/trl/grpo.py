"""Streamed version of TRL's `GRPOTrainer`."""

from __future__ import annotations

import dataclasses

import trl.trainer.grpo_trainer
from trl import GRPOConfig, GRPOTrainer

from streambp.integrations.trl.settings import StreamArguments
from streambp.integrations.trl.trainer import StreamedTrainer


@dataclasses.dataclass
class StreamGRPOConfig(StreamArguments, GRPOConfig):  # type: ignore[misc]  # TRL is not typed
    """TRL's `GRPOConfig` with further `stream_*` fields, the settings of streambp
    (`StreamArguments`)."""


class StreamGRPOTrainer(StreamedTrainer, GRPOTrainer):  # type: ignore[misc]  # TRL is not typed
    """TRL's `GRPOTrainer`, whose models are patched by streambp and computed chunk by chunk. The
    arguments are TRL's, with `args` a `StreamGRPOConfig`."""

    trl_module = trl.trainer.grpo_trainer
