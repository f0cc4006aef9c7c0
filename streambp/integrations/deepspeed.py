"""streambp from a DeepSpeed config: a "streambp" section with `StreamConfig`'s fields.

    {"zero_optimization": {"stage": 3}, "streambp": {"chunk_size": 8192, "saves": ["attn_out"], "offload": "cpu"}}

`initialize` takes such a config where `deepspeed.initialize` would be called. With HF Trainer or accelerate, pass the same
file as `deepspeed=` and add `StreamCallback()`: DeepSpeed ignores sections that it does not know.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from streambp.config import FIELDS, StreamConfig, config_of
from streambp.errors import ConfigError
from streambp.fields import shown
from streambp.launch import logs
from streambp.libraries import required
from streambp.planner.auto import patch
from streambp.reporting import reason

SECTION = "streambp"


def initialize(*args: Any, model: nn.Module | None = None, config: Any = None, **kwargs: Any) -> Any:
    """`deepspeed.initialize` for a model that streams as the config's "streambp" section says.

    Args:
        model: patched here, unless the config has no such section.
        config: a dictionary, the path of a JSON file, its text, or that as base64. `config_params` and
            `args.deepspeed_config` are looked at as well.

    Returns:
        What deepspeed.initialize returns.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, or two settings contradict each other.
    """
    with required("deepspeed"):
        import deepspeed

    if args:  # deepspeed.initialize(args, model, ...)
        kwargs = {**dict(zip(("args", "model"), args, strict=False)), **kwargs}
        model = kwargs.pop("model", model)
    source = config or kwargs.get("config_params") or getattr(kwargs.get("args"), "deepspeed_config", None)
    settings = read(source)
    stream = stream_config(settings)
    if stream is not None and model is not None:
        patch(model, stream)
    if source is config and config is not None:
        config = {key: value for key, value in settings.items() if key != SECTION}
    return deepspeed.initialize(model=model, config=config, **kwargs)


def read(source: Any) -> dict[str, Any]:
    """A DeepSpeed config as a dictionary.

    Args:
        source: a mapping, the path of a JSON file, its text, or that as base64.

    Raises:
        ConfigError: it is none of these.
    """
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return dict(source)
    try:
        if not isinstance(source, str | os.PathLike):
            raise ValueError(f"it is a {type(source).__name__}")
        text = os.fspath(source)
        if not text.lstrip().startswith("{"):
            # No text of a config is asked for among files: beyond 255 characters the system refuses it as a name.
            with contextlib.suppress(ValueError):
                decoded = base64.urlsafe_b64decode(text).decode()
                text = decoded if decoded.lstrip().startswith("{") else text
        found = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"No DeepSpeed config could be read from {shown(source)} ({reason(error)}). Pass the path of a JSON file that "
            "is there, the file's text, that as base64, or a dictionary."
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"The DeepSpeed config is a {type(found).__name__}; it must be a JSON object.")
    return found


def stream_config(settings: dict[str, Any]) -> StreamConfig | None:
    """The `StreamConfig` of a DeepSpeed config's "streambp" section; None if it has none.

    Raises:
        ConfigError: the section cannot be read as one, or activation_checkpointing is set beside it.
    """
    section = settings.get(SECTION)
    if section is None:
        return None
    if not isinstance(section, dict):
        raise ConfigError(f'"{SECTION}" is {shown(section)}; it must be an object with the fields {list(FIELDS)}.')
    if settings.get("activation_checkpointing"):
        raise ConfigError(
            '"activation_checkpointing" and "streambp" are both set; streamed layers recompute themselves. Remove '
            '"activation_checkpointing".'
        )
    return config_of(section, f'The section "{SECTION}"', StreamConfig())


class StreamCallback(logs.StreamCallback):
    """Patches a Trainer's model before training, as its DeepSpeed config's "streambp" section says, and adds numbers of the
    last step to its logs (`streambp.integrations.StreamCallback`)."""

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Raises ConfigError for a section that `stream_config` does not take."""
        stream = stream_config(read(args.deepspeed))
        if stream is not None and model is not None:
            patch(model, stream)
