"""Integrations with other libraries. Each module imports its library only when used."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

MODULES_BY_NAME = {
    "StreamCallback": "streambp.model.trainer_logs",
    "TokenBatchSampler": "streambp.integrations.token_batches",
    "optimizer_in_backward": "streambp.integrations.in_backward",
}
__all__ = ["StreamCallback", "TokenBatchSampler", "optimizer_in_backward"]


def __getattr__(name: str) -> Any:
    """Return a public class or function of this package, or the module that integrates a library,
    by name. The import happens here, at the first use, because importing transformers is slow."""
    if name in MODULES_BY_NAME:
        return getattr(importlib.import_module(MODULES_BY_NAME[name]), name)
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
