"""What the streamed trainers share."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

from streambp.integrations.trl.head import streamed_heads
from streambp.integrations.trl.settings import StreamArguments
from streambp.launch.groups import keep_groups
from streambp.model.fused_head import FusedHead


class StreamedTrainer:
    """Comes before one of TRL's trainers among a class's bases; its arguments and everything else are TRL's.

    Policy and reference stream, and TRL's fused head is computed by ours. A model that was patched before keeps its own
    settings. Where these share prefixes, a prompt's completions stay together. [Note: whole groups]

    trl_module: where the TRL trainer is defined. head_class: what stands in for TRL's head.
    """

    trl_module: ClassVar[ModuleType]
    head_class: ClassVar[type[FusedHead]] = FusedHead

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = kwargs.get("args")
        if not isinstance(settings, StreamArguments):
            settings = next((value for value in args if isinstance(value, StreamArguments)), StreamArguments())
        with streamed_heads(self.trl_module, settings.stream_config(), self.head_class):
            super().__init__(*args, **kwargs)
        keep_groups(self)
