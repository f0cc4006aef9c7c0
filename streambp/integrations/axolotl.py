"""Integration with axolotl: a `streambp` section in its YAML, with the fields of `StreamConfig`.

    streambp:
      chunk_size: 8192
      saves: [attn_out]

An axolotl that discovers installed plugins (0.21) needs no further setting. For other versions add
`plugins: [streambp.integrations.axolotl.StreamPlugin]`. Without the section the plugin does
nothing.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, field_validator

from streambp.admission.stacks import find_stacks
from streambp.launch.process import LaunchedProcess
from streambp.launch.settings import config_from
from streambp.libraries import require_library

with require_library("axolotl"):
    from axolotl.integrations.base import BasePlugin

SECTION_NOTE = "The streambp section of axolotl's YAML"


class StreamSection(BaseModel):  # type: ignore[misc]  # pydantic is not typed here
    """pydantic schema of the section "streambp" in axolotl's config file.

    Attributes:
        streambp: the fields of `StreamConfig` by name; None: the file has no such section.
    """

    streambp: dict[str, Any] | None = None

    @field_validator("streambp")
    @classmethod
    def _check(cls, section: dict[str, Any] | None) -> dict[str, Any] | None:
        """Check the section's settings before a model is loaded, and return the section unchanged.

        Raises:
            ConfigError: a setting is invalid. pydantic reports it, because it is a ValueError.
        """
        if section is not None:
            config_from(section, SECTION_NOTE)
        return section


class StreamPlugin(BasePlugin):  # type: ignore[misc]  # axolotl is not typed
    """axolotl plugin that patches the model and the reference model of a trainer."""

    def get_input_args(self) -> str:
        """Return the import path of the section's schema (`StreamSection`). axolotl calls this
        method to merge the schema into that of its config file."""
        return f"{__name__}.{StreamSection.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Patch the trainer's model now, and its reference model when training begins, with the
        settings of the section "streambp". Do nothing without the section. axolotl calls this
        method.

        Args:
            cfg: axolotl's config; its attribute `streambp` is the section, or None.
            trainer: the new trainer.

        Raises:
            UnsupportedModelError: the model cannot be streamed.
            ConfigError: the section is invalid.
        """
        section = cfg.streambp
        if section is None:
            return
        config = config_from(dict(section), SECTION_NOTE)
        find_stacks(trainer.model)
        LaunchedProcess(config).patch_trainer(trainer)
