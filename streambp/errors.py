"""Errors that streambp raises on purpose. Catch `StreamBPError` to catch all of them."""

from __future__ import annotations

import importlib
from typing import Any


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


class ConflictingDistributionError(StreamBPError, ImportError):
    """Another distribution has installed files into the folder of the package `streambp`."""


class AttentionChoiceError(StreamBPError):
    """The attention that `StreamConfig` names cannot compute what the model asks for."""


def __getattr__(name: str) -> Any:
    """Import `DeviceMemoryError` from `device`, on first access, because `device` imports torch.

    An error about an argument must not wait for this import.
    """
    if name == "DeviceMemoryError":
        return importlib.import_module("streambp.device").DeviceMemoryError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
