"""Errors that streambp raises on purpose. Catch `StreamBPError` to catch all of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OF_DEVICE_MEMORY = (
    "A streamed step ran out of device memory. Code that catches torch.OutOfMemoryError catches it."
)


class StreamBPError(RuntimeError):
    """Base class. A message says what was found, what was expected and what to do next."""


class ConfigError(StreamBPError, ValueError):
    """A `StreamConfig` field has a value that it cannot have."""


class UnsupportedModelError(StreamBPError):
    """The model, or a part of it, cannot be streamed exactly."""


class UnsupportedMaskError(StreamBPError):
    """The attention mask lets a query read later keys, or does not fit the sequence."""


class UnsharedError(StreamBPError):
    """Rows with a common beginning cannot run as a tree of prefixes; they run as rows."""


class BackwardError(StreamBPError):
    """The requested backward pass cannot compute the right gradient."""


class HostMemoryError(StreamBPError):
    """The host memory that offloading may use does not suffice."""


class KernelError(StreamBPError):
    """A kernel of a device, or the library that it comes from, failed. Another one may do."""


class MissingLibraryError(StreamBPError, ModuleNotFoundError):
    """A library that streambp can do without is not installed, and is needed now."""


class AttentionChoiceError(StreamBPError):
    """The attention that `StreamConfig` names cannot compute what the model asks for."""


if TYPE_CHECKING:

    class DeviceMemoryError(StreamBPError, torch.OutOfMemoryError):
        """Declare the class of `__getattr__` for type checkers."""


def __getattr__(name: str) -> Any:
    """Build `DeviceMemoryError` on first access, because torch defines one of its bases.

    An error about an argument must not wait for torch's import.
    """
    if name != "DeviceMemoryError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    bases = StreamBPError, importlib.import_module("torch").OutOfMemoryError
    error = type(name, bases, {"__doc__": OF_DEVICE_MEMORY, "__module__": __name__})
    return globals().setdefault(name, error)
