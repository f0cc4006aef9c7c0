"""Errors that streambp raises on purpose. Catch `StreamBPError` to catch all of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEVICE_MEMORY_DOCSTRING = (
    "A streamed step ran out of device memory. Code that catches torch.OutOfMemoryError catches it."
)

TWO_BACKWARDS = (
    "Zero-bubble pipelines (torch's ScheduleZBVZeroBubble, ScheduleInterleavedZeroBubble, "
    "ScheduleDualPipeV) run backward twice, for inputs and for weights; 1F1B, interleaved 1F1B and "
    "GPipe run it once."
)


class StreamBPError(RuntimeError):
    """Base class of all errors of streambp. A message says what happened, why, and what to do."""


class ConfigError(StreamBPError, ValueError):
    """A value of a `StreamConfig` field, or of an argument, is not allowed."""


class UnsupportedModelError(StreamBPError):
    """The model, or a part of it, cannot be computed chunk by chunk with the same results as
    unpatched."""


class UnsupportedMaskError(StreamBPError):
    """The attention mask does not fit the sequence, or the sequence cannot be cut into chunks:
    wherever it is cut, an earlier query attends to a later key."""


class UnsharedError(StreamBPError):
    """Rows with a common prefix cannot be computed as one packed row with a single copy of the
    prefix. The library catches this error and computes the rows separately."""


class BackwardError(StreamBPError):
    """The requested backward pass would give a wrong gradient."""


class HostMemoryError(StreamBPError):
    """The host memory that offloading may use is too small for saved tensors, or for weights and
    their gradients."""


class KernelError(StreamBPError):
    """A kernel of a device, or a library such as cuDNN, failed. Another choice of kernels may
    succeed."""


class MissingLibraryError(StreamBPError, ModuleNotFoundError):
    """An optional library that the called function needs is not installed."""


class ConflictingDistributionError(StreamBPError, ImportError):
    """Another distribution has installed files into the folder of the package `streambp`."""


class AttentionChoiceError(StreamBPError):
    """The attention kernel that `StreamConfig.attention` names cannot compute the model's
    attention."""


if TYPE_CHECKING:

    class DeviceMemoryError(StreamBPError, torch.OutOfMemoryError):
        """The device ran out of memory; the message adds a remedy. This declaration is for type
        checkers; at run time the module's `__getattr__` creates the class."""


def __getattr__(name: str) -> Any:
    """Create the class `DeviceMemoryError` on first access, because its base
    `torch.OutOfMemoryError` needs the import of torch.

    An error about an argument must not wait for torch's import.
    """
    if name != "DeviceMemoryError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    bases = StreamBPError, importlib.import_module("torch").OutOfMemoryError
    error = type(name, bases, {"__doc__": DEVICE_MEMORY_DOCSTRING, "__module__": __name__})
    return globals().setdefault(name, error)
