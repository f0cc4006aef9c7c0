"""Moves what forward saves to host memory behind the compute, and brings it back a chunk ahead of its use."""

from torch import nn

from streambp.errors import StreamBPError
from streambp.instance_forward import PATCH, forwards
from streambp.offload.manager import OffloadManager


def manager_of(model: nn.Module) -> OffloadManager:
    """What moves a patched model's tensors: its `stats`, `abort` after an exception, `close`.

    Args:
        model: that was patched, what wraps it, or a part of it that streams.

    Raises:
        StreamBPError: nothing leaves the device.
    """
    for module in model.modules():
        for state in (vars(module).get(PATCH), *(getattr(forward, "state", None) for forward in forwards(module))):
            manager = getattr(state, "offloader", None)
            if isinstance(manager, OffloadManager):
                return manager
    raise StreamBPError(
        f"Nothing of this {type(model).__name__} is offloaded. Patch it with streambp.StreamConfig(offload='cpu') first."
    )
