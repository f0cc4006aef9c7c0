"""Whether a layer makes collectives of its own: tensor and expert parallelism, whichever library brings it.

Inside the chunk loop they would run once a chunk. Ranks may have different numbers of chunks, and would then wait for each
other for ever, or add up what does not belong together. Parameters tell of DTensors alone. So a layer's trial is watched,
for calls of torch's collectives by whoever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from streambp.errors import UnsupportedModelError
from streambp.known_names import COLLECTIVES


class Watched(TorchDispatchMode):
    """Refuses collectives before they are made: ranks whose sequences differ in length could not make them together.

    seen: the name of the first; None: there was none.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.seen: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            self.seen = self.seen or str(func._schema.name).rpartition("::")[2].strip("_")
            raise self.error()
        return func(*args, **(kwargs or {}))

    def error(self) -> UnsupportedModelError:
        """Return the error that names the layer and the collective."""
        return UnsupportedModelError(
            f"{type(self.layer).__name__} makes collectives inside its forward ({self.seen}), as under tensor or expert "
            "parallelism (DeepSpeed's AutoTP): each chunk would make them, and ranks with other numbers of chunks would "
            "wait for ever. Use DDP, ZeRO or FSDP2 around whole decoder layers, or run the model unpatched "
            "(streambp.unpatch(model))."
        )


@contextlib.contextmanager
def no_collectives(layer: nn.Module) -> Iterator[None]:
    """Context manager that watches a layer's trial, if there are other ranks.

    Raises:
        UnsupportedModelError: the layer would have made collectives within.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    watched = Watched(layer)
    try:
        with watched:
            yield
    except Exception as error:
        if watched.seen is not None:
            raise watched.error() from error
        raise
    if watched.seen is not None:  # the trial took it for an error of the layer's
        raise watched.error()
