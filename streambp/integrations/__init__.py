"""Other libraries' ways in; each imports its library only when it is used."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__all__ = ["StreamCallback", "TokenBatchSampler", "optimizer_in_backward"]


def __getattr__(name: str) -> Any:
    """Import the callback for a Trainer's logs, the sampler, an optimizer in backward, or a library's module, when it is
    asked for: transformers is slow."""
    if name == "StreamCallback":
        return importlib.import_module("streambp.launch.logs").StreamCallback
    if name == "TokenBatchSampler":
        return importlib.import_module("streambp.integrations.token_batches").TokenBatchSampler
    if name == "optimizer_in_backward":
        return importlib.import_module("streambp.integrations.in_backward").optimizer_in_backward
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
