"""Move tensors saved by forward to host memory behind the compute, and back one chunk ahead of
their use.
"""

from torch import nn

from streambp.errors import StreamBPError
from streambp.instance_forward import PATCH_ATTRIBUTE, forwards
from streambp.offload.manager import OffloadManager


def manager_of(model: nn.Module) -> OffloadManager:
    """Return the object that moves a patched model's saved tensors to host memory, with the methods
    `stats`, `abort` (after an exception) and `close`.

    Args:
        model: a patched model, a module around the model, or a module inside whose forward was
            replaced.

    Raises:
        StreamBPError: the patch does not offload tensors, or offload="if_faster" has not moved any
            tensor until now.
    """
    for module in model.modules():
        for state in (
            vars(module).get(PATCH_ATTRIBUTE),
            *(getattr(forward, "state", None) for forward in forwards(module)),
        ):
            manager = getattr(state, "offloader", None)
            if isinstance(manager, OffloadManager) and manager.is_used:
                return manager
    raise StreamBPError(
        f"Nothing of this {type(model).__name__} is offloaded. Patch it with "
        "streambp.StreamConfig(offload='cpu') first."
    )
