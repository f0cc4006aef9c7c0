"""State that a recomputation must share with the forward: autocast, training mode, and disabled
checkpointing.

[Note: autocast] A program's autocast applies to its model's computation only. `Autocast.off`
therefore surrounds a layer's call, its tests and its backward pass, also if the program calls
backward inside its own autocast. `Autocast.restored` surrounds only the layer's own forward
(`LayerCall.run`), in forward and in recomputations. Tensors that streambp joins, sums and compares
keep their dtypes: a join of float16 raises under bfloat16's autocast. Gradients need no autocast:
autograd returns each gradient in its value's dtype, and autocast would round the factors of a
float32 region's gradients to half precision. The outer context keeps autocast's weight copies for
all chunks, because torch drops the copies at the end of the outermost autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from streambp.errors import BackwardError
from streambp.known_names import CHECKPOINTING

NULL_CONTEXT: contextlib.AbstractContextManager[None] = contextlib.nullcontext()  # reusable


class Autocast(NamedTuple):
    """The state of torch's autocast, for a device and for the CPU. [Note: autocast]

    Attributes:
        states: (device type, enabled, dtype) for each device type.
        cache: True if autocast caches weight copies.
        on: True if autocast is enabled for one of the device types.
    """

    states: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    on: bool

    @classmethod
    def capture(cls, device: torch.device) -> Autocast:
        """Return the current state of autocast for this device and the CPU."""
        states, on = [], False
        for kind in ("cpu",) if device.type == "cpu" else (device.type, "cpu"):
            if torch.amp.is_autocast_available(kind):
                active = torch.is_autocast_enabled(kind)
                states.append((kind, active, torch.get_autocast_dtype(kind)))
                on |= active
        return cls(tuple(states), torch.is_autocast_cache_enabled(), on)

    def off(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which autocast is disabled."""
        return self.restored(enabled=False)

    def restored(self, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        """Context manager that restores autocast's captured state.

        Args:
            enabled: False: disable autocast instead.
        """
        for kind, active, _ in self.states:
            if active or torch.is_autocast_enabled(kind):
                return self._switched(enabled)
        return NULL_CONTEXT

    @contextlib.contextmanager
    def _switched(self, enabled: bool) -> Iterator[None]:
        cached = self.cache and torch.is_autocast_cache_enabled()  # a trial switches it off
        with contextlib.ExitStack() as stack:
            for kind, active, dtype in self.states:
                if active or torch.is_autocast_enabled(kind):
                    on = active and enabled
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=cached)
                    )
            yield


def check_mode(layer: nn.Module, training: bool) -> None:
    """Raise BackwardError if the layer is in train mode and was in eval mode in forward, or the
    reverse.

    Args:
        layer: the layer.
        training: `layer.training` in forward.
    """
    if layer.training != training:
        raise BackwardError(
            f"The layer was in {'train' if training else 'eval'} mode in forward and is in the "
            "other mode in backward, so its recomputation would differ. Call model.train() or "
            "model.eval() outside of a step."
        )


@contextlib.contextmanager
def computed_as_written(modules: list[nn.Module]) -> Iterator[None]:
    """Context manager that disables transformers' checkpointing and `parametrize.cached()` for a
    layer.

    From transformers 5.23 on a layer's forward would wrap itself in a checkpoint. Cached
    parametrized weights have no graph, or a graph that ends elsewhere. Recomputations need this
    context manager too, because TRL sets `gradient_checkpointing` again between forward and
    backward.

    Args:
        modules: the layer's modules that have a `gradient_checkpointing` flag.
    """
    flagged, cached = (
        [module for module in modules if module.__dict__.get(CHECKPOINTING[0])],
        parametrize._cache_enabled,
    )
    try:
        for module in flagged:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        if cached:  # global for the process, so threads without a cache must not set it
            parametrize._cache_enabled = 0
        yield
    finally:
        if cached:
            parametrize._cache_enabled = cached
        for module in flagged:
            module.gradient_checkpointing = True  # type: ignore[assignment]
