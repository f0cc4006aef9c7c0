"""`StreamDPOTrainer`."""

from __future__ import annotations

import dataclasses
from typing import Any

import trl.trainer.dpo_trainer
from trl import DPOConfig, DPOTrainer

from streambp.integrations.trl.head import streamed_heads
from streambp.integrations.trl.settings import StreamArguments


@dataclasses.dataclass
class StreamDPOConfig(StreamArguments, DPOConfig):  # type: ignore[misc]  # TRL is not typed
    """TRL's `DPOConfig` with `stream_*` fields."""


class StreamDPOTrainer(DPOTrainer):  # type: ignore[misc]  # TRL is not typed
    """TRL's `DPOTrainer` on streamed models.

    Takes the same arguments. Policy and reference stream, and TRL's fused head is computed by ours; everything else is
    TRL's. A model that was patched before keeps its own settings.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = kwargs.get("args")
        if not isinstance(settings, StreamArguments):
            settings = next((value for value in args if isinstance(value, StreamArguments)), StreamArguments())
        with streamed_heads(trl.trainer.dpo_trainer, settings.stream_config()):
            super().__init__(*args, **kwargs)
