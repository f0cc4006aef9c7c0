"""Integration with DeepSpeed: a "streambp" section in its config, with the fields of
`StreamConfig`.

    {"zero_optimization": {"stage": 3},
     "streambp": {"chunk_size": 8192, "saves": ["attn_out"], "offload": "cpu"}}

Call `initialize` with this config instead of `deepspeed.initialize`. With HF Trainer or accelerate,
pass the same file as `deepspeed=` and add `DeepSpeedStreamCallback()`. DeepSpeed ignores sections
with unknown names.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from streambp.config import CONFIG_FIELDS, StreamConfig, config_of
from streambp.errors import ConfigError
from streambp.fields import short_repr
from streambp.libraries import require_library
from streambp.model.trainer_logs import StreamCallback as LoggingCallback
from streambp.planner.auto import patch
from streambp.reporting import reason

CONFIG_SECTION = "streambp"


def initialize(
    *args: Any, model: nn.Module | None = None, config: Any = None, **kwargs: Any
) -> Any:
    """Call `deepspeed.initialize` after patching the model with the settings in the "streambp"
    section of the DeepSpeed config.

    Args:
        args: positional arguments of `deepspeed.initialize`.
        model: the model; patched only if the config has a section "streambp".
        config: a dictionary, the path of a JSON file, JSON text, or base64 of JSON text. If None,
            the config is DeepSpeed's argument `config_params`, or the attribute `deepspeed_config`
            of DeepSpeed's argument `args`.
        kwargs: keyword arguments of `deepspeed.initialize`.

    Returns:
        The result of `deepspeed.initialize`.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, or two settings contradict each
            other.
    """
    with require_library("deepspeed"):
        import deepspeed

    if args:  # deepspeed.initialize(args, model, ...)
        kwargs = {**dict(zip(("args", "model"), args, strict=False)), **kwargs}
        model = kwargs.pop("model", model)
    source = (
        config
        or kwargs.get("config_params")
        or getattr(kwargs.get("args"), "deepspeed_config", None)
    )
    settings = read(source)
    stream = stream_config(settings)
    if stream is not None and model is not None:
        patch(model, stream)
    if source is config and config is not None:
        config = {key: value for key, value in settings.items() if key != CONFIG_SECTION}
    return deepspeed.initialize(model=model, config=config, **kwargs)


def read(source: Any) -> dict[str, Any]:
    """Return a DeepSpeed config as a dictionary.

    Args:
        source: a mapping, the path of a JSON file, JSON text, or base64 of JSON text; None: an
            empty config.

    Raises:
        ConfigError: `source` is none of these.
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
            # Try base64 before a path: the system rejects file names beyond 255 characters.
            with contextlib.suppress(ValueError):
                decoded = base64.urlsafe_b64decode(text).decode()
                text = decoded if decoded.lstrip().startswith("{") else text
        config = json.loads(
            text if text.lstrip().startswith("{") else Path(text).read_text("utf-8")
        )
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"No DeepSpeed config could be read from {short_repr(source)} ({reason(error)}). Pass "
            "the path of an existing JSON file, the file's text, the text in base64, or a dictionary."
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"The DeepSpeed config is a {type(config).__name__}; it must be a JSON object."
        )
    return config


def stream_config(settings: dict[str, Any]) -> StreamConfig | None:
    """Return the `StreamConfig` from the "streambp" section of a DeepSpeed config; None without the
    section.

    Args:
        settings: the DeepSpeed config.

    Raises:
        ConfigError: the section is invalid, or activation_checkpointing is set as well.
    """
    section = settings.get(CONFIG_SECTION)
    if section is None:
        return None
    if not isinstance(section, dict):
        raise ConfigError(
            f'"{CONFIG_SECTION}" is {short_repr(section)}; it must be an object with the fields '
            f"{list(CONFIG_FIELDS)}."
        )
    if settings.get("activation_checkpointing"):
        raise ConfigError(
            '"activation_checkpointing" and "streambp" are both set; streamed layers recompute '
            'themselves. Remove "activation_checkpointing".'
        )
    return config_of(section, f'The section "{CONFIG_SECTION}"', StreamConfig())


class DeepSpeedStreamCallback(LoggingCallback):
    """Trainer callback that patches the model before training, with the settings in the "streambp"
    section of the Trainer's DeepSpeed config.

    The base class adds numbers of the last step to the logs
    (`streambp.integrations.StreamCallback`).
    """

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Patch the Trainer's model with the settings of its DeepSpeed config. Do nothing if the
        config has no section "streambp".

        Raises:
            ConfigError: the section "streambp" is invalid.
        """
        stream = stream_config(read(args.deepspeed))
        if stream is not None and model is not None:
            patch(model, stream)


def __getattr__(name: str) -> Any:
    """Return `DeepSpeedStreamCallback` for its former name `StreamCallback`, with a warning."""
    if name != "StreamCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.StreamCallback is called DeepSpeedStreamCallback now; the old name goes with "
        "the next release.",
        DeprecationWarning,
        stacklevel=2,
    )
    return DeepSpeedStreamCallback
