"""Detect collectives inside a layer: tensor or expert parallelism of any library.

The chunk loop would run these collectives once for each chunk. Ranks may have different numbers of
chunks, and would wait for each other forever or sum unrelated tensors. Parameters reveal only
DTensors. A layer's trial is therefore checked for calls of torch's collectives by any code.
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


class CollectiveGuard(TorchDispatchMode):
    """Torch dispatch mode for a layer's test run. The mode raises before a collective of
    torch.distributed, such as an all-reduce, runs. A layer in chunks would call the collective once
    for each chunk, and ranks with more chunks would wait for ever.

    Attributes:
        layer: the decoder layer that is tested.
        collective_name: the name of the first collective; None: no collective was called.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.collective_name: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            self.collective_name = self.collective_name or str(func._schema.name).rpartition("::")[
                2
            ].strip("_")
            raise self.error()
        return func(*args, **(kwargs or {}))

    def error(self) -> UnsupportedModelError:
        """Return the error for a layer that cannot be chunked because it calls a collective. The
        error's message names the layer and the collective."""
        return UnsupportedModelError(
            f"{type(self.layer).__name__} makes collectives inside its forward "
            f"({self.collective_name}), as under tensor or expert parallelism (DeepSpeed's "
            "AutoTP). Each chunk would make them, and ranks with other numbers of chunks would "
            "wait for ever. Use DDP, ZeRO or FSDP2 around whole decoder layers, or run the model "
            "unpatched (streambp.unpatch(model))."
        )


@contextlib.contextmanager
def forbid_collectives(layer: nn.Module) -> Iterator[None]:
    """Context manager for a test run of a layer. If there are several ranks, a collective of
    torch.distributed in the layer's forward raises. Such a layer cannot run in chunks: ranks with
    more chunks would call the collective more often, and wait for ever.

    Args:
        layer: the decoder layer, named in the error.

    Raises:
        UnsupportedModelError: the layer called a collective.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    watched = CollectiveGuard(layer)
    try:
        with watched:
            yield
    except Exception as error:
        if watched.collective_name is not None:
            raise watched.error() from error
        raise
    if (
        watched.collective_name is not None
    ):  # the trial took the exception for a failure of the layer
        raise watched.error()
