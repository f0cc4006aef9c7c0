"""Streamed versions of TRL's trainers: `StreamSFTTrainer` with `StreamSFTConfig`, and so on."""

from __future__ import annotations

import importlib
from typing import Any

from streambp.launch.groups import keep_groups
from streambp.libraries import require_library

MODULES_BY_NAME = {
    "StreamSFTConfig": "sft",
    "StreamSFTTrainer": "sft",
    "StreamDPOConfig": "dpo",
    "StreamDPOTrainer": "dpo",
    "StreamGRPOConfig": "grpo",
    "StreamGRPOTrainer": "grpo",
    "StreamPPOConfig": "ppo",
    "StreamPPOTrainer": "ppo",
}
__all__ = [*MODULES_BY_NAME, "keep_groups"]


def __getattr__(name: str) -> Any:
    """Return a trainer or a trainer's config class by name. The class's module is imported on first
    use, because TRL's trainers are slow to import."""
    if name not in MODULES_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with require_library("trl"):
        return getattr(importlib.import_module(f"{__name__}.{MODULES_BY_NAME[name]}"), name)
