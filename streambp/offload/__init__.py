"""Moves what forward saves to host memory behind the compute, and brings it back a chunk ahead of its use."""

from torch import nn

from streambp.errors import StreamBPError
from streambp.offload.manager import OffloadManager


def manager_of(model: nn.Module) -> OffloadManager:
    """What moves a patched model's tensors: its `stats`, `abort` after an exception, `close`.

    Raises:
        StreamBPError: nothing leaves the device.
    """
    for module in model.modules():
        if "_streambp" in module.__dict__:
            manager: OffloadManager | None = module.__dict__["_streambp"].offloader
            if manager is not None:
                return manager
    raise StreamBPError(
        f"Nothing of this {type(model).__name__} is offloaded. Patch it with streambp.StreamConfig(offload='cpu') first."
    )
