"""streambp in axolotl: a section of its YAML, with `StreamConfig`'s fields.

    streambp:
      chunk_size: 8192
      saves: [attn_out]

An axolotl that looks for installed plugins (0.21) needs no more; otherwise add
`plugins: [streambp.integrations.axolotl.StreamPlugin]`. Without the section nothing happens.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, field_validator

from streambp.admission.stacks import find_stacks
from streambp.launch.process import Launched
from streambp.launch.settings import config_from
from streambp.libraries import required

with required("axolotl"):
    from axolotl.integrations.base import BasePlugin

SECTION = "The streambp section of axolotl's YAML"


class StreamSection(BaseModel):  # type: ignore[misc]  # pydantic is not typed here
    """What the plugin adds to axolotl's schema."""

    streambp: dict[str, Any] | None = None

    @field_validator("streambp")
    @classmethod
    def _check(cls, section: dict[str, Any] | None) -> dict[str, Any] | None:
        """Raises ConfigError, a ValueError, before a model is loaded."""
        if section is not None:
            config_from(section, SECTION)
        return section


class StreamPlugin(BasePlugin):  # type: ignore[misc]  # axolotl is not typed
    """Patches the model that a trainer of axolotl's trains, and its reference."""

    def get_input_args(self) -> str:
        """Where the section's schema is."""
        return f"{__name__}.{StreamSection.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Raises UnsupportedModelError for a model that cannot be streamed, and ConfigError for a wrong section."""
        section = cfg.streambp
        if section is None:
            return
        config = config_from(dict(section), SECTION)
        find_stacks(trainer.model)
        Launched(config).trainer_made(trainer)
