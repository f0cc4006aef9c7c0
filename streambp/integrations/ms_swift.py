"""streambp in ms-swift: a callback, for a file of one's own that `--external_plugins` names.

    echo "import streambp.integrations.ms_swift" > plugin.py
    STREAMBP_LAUNCH='{"chunk_size": 8192}' swift sft --external_plugins plugin.py --callbacks streambp ...

ms-swift has no arguments for callbacks, so the settings are where `streambp launch` has them; without any, the defaults.
"""

from __future__ import annotations

from typing import Any

from streambp.admission.stacks import find_stacks
from streambp.known_names import SWIFTS_PLUGIN
from streambp.launch.hook import read
from streambp.launch.process import Launched
from streambp.launch.settings import from_fields
from streambp.libraries import required

with required("swift"):
    from swift.callbacks import callbacks_map
    from swift.callbacks.base import TrainerCallback

if __name__.startswith(SWIFTS_PLUGIN):  # its folder is first on sys.path now, where `import deepspeed` would find ours
    raise ImportError(f"{__file__} was given to ms-swift itself; name a file that imports streambp.integrations.ms_swift.")


class StreamCallback(TrainerCallback):  # type: ignore[misc]  # ms-swift is not typed
    """Patches the model that a trainer of ms-swift's trains, and its reference; ms-swift passes the trainer."""

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedModelError for a model that cannot be streamed, and ConfigError for wrong settings."""
        config = from_fields(read()).config
        find_stacks(self.trainer.model)
        Launched(config).trainer_made(self.trainer)


callbacks_map["streambp"] = StreamCallback
