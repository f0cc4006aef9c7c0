"""Integration with ms-swift: a callback, imported by a user's file for `--external_plugins`.

    echo "import streambp.integrations.ms_swift" > plugin.py
    export STREAMBP_LAUNCH='{"chunk_size": 8192}'
    swift sft --external_plugins plugin.py --callbacks streambp ...

ms-swift has no arguments for callbacks. The settings are therefore in the environment variable of
`streambp launch`; without settings, the defaults apply.
"""

from __future__ import annotations

from typing import Any

from streambp.admission.stacks import find_stacks
from streambp.known_names import SWIFTS_PLUGIN
from streambp.launch.hook import read
from streambp.launch.process import LaunchedProcess
from streambp.launch.settings import settings_from_fields
from streambp.libraries import require_library

with require_library("swift"):
    from swift.callbacks import callbacks_map
    from swift.callbacks.base import TrainerCallback

# ms-swift puts a plugin's folder first on sys.path. `import deepspeed` would then import the module
# beside this file.
if __name__.startswith(SWIFTS_PLUGIN):
    raise ImportError(
        f"{__file__} was given to ms-swift itself; name a file that imports "
        "streambp.integrations.ms_swift."
    )


class SwiftStreamCallback(TrainerCallback):  # type: ignore[misc]  # ms-swift is not typed
    """Callback of an ms-swift trainer that patches the trainer's model and reference model.
    ms-swift passes the trainer to the callback."""

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Patch the trainer's model now, and its reference model when training begins. The settings
        are those of the environment variable STREAMBP_LAUNCH, or the defaults.

        Raises:
            UnsupportedModelError: the model cannot be streamed.
            ConfigError: the settings are invalid.
        """
        config = settings_from_fields(read()).config
        find_stacks(self.trainer.model)
        LaunchedProcess(config).patch_trainer(self.trainer)


callbacks_map["streambp"] = SwiftStreamCallback
