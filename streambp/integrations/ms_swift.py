"""streambp in ms-swift: a callback, for a file that `--external_plugins` names.

    STREAMBP_LAUNCH='{"chunk_size": 8192}' swift sft --external_plugins PATH/streambp/integrations/ms_swift.py \\
        --callbacks streambp ...

ms-swift has no arguments for callbacks, so the settings are where `streambp launch` has them; without any, the defaults.
"""

from __future__ import annotations

from typing import Any

from swift.callbacks import callbacks_map
from swift.callbacks.base import TrainerCallback

from streambp.launch.hook import read
from streambp.launch.process import Launched
from streambp.launch.settings import from_fields
from streambp.stacks import find_stacks


class StreamCallback(TrainerCallback):  # type: ignore[misc]  # ms-swift is not typed
    """Patches the model that a trainer of ms-swift's trains, and its reference; ms-swift passes the trainer."""

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedModelError for a model that cannot be streamed, and ConfigError for wrong settings."""
        config = from_fields(read()).config
        find_stacks(self.trainer.model)
        Launched(config).trainer_made(self.trainer)


callbacks_map["streambp"] = StreamCallback
