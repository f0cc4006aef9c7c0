"""Other libraries' ways in; each imports its library only when it is used."""

from __future__ import annotations

from typing import Any

__all__ = ["StreamCallback"]


def __getattr__(name: str) -> Any:
    """Import the callback for a Trainer's logs when it is asked for: transformers is slow to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streambp.launch.logs import StreamCallback

    return StreamCallback
